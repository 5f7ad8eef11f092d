"""The save: live objects into frames and a commit record.

Runs one save, from the described state to its end, on its threads. The public face, and copies of
a checkpoint after its commit, are elsewhere. Only the facade, `copy` and `tiers` import it.
"""
