"""Copies a checkpoint into another store, byte for byte or encoded again.

Here: one copy, its lease, and the verification at either place. Not here: when a tier needs a copy
(`tiers`). `tiers` and the commands import this package.
"""
