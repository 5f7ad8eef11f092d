"""The save: live objects into frames and a commit record.

Here: one save from the described state to its end, on its threads. Not here: the public face, and
the copies of a checkpoint after its commit. Only the facade, `copy` and `tiers` import it.
"""
