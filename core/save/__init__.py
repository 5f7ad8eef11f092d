"""The save: live objects into frames and a commit record.

Here: one save from the described state to its end, on its threads. Not here: the public face, and
what happens to a checkpoint after its commit. Only the facade and `tiers` import it.
"""
