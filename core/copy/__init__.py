"""The copy of a checkpoint into another store, byte for byte or encoded anew.

Here: one copy, its lease, and the verification at either place. Not here: when a tier needs a copy
(`tiers`). `tiers` and the commands import it.
"""
