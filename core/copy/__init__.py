"""Copies a checkpoint into another store, byte for byte or encoded again.

Covers one copy, its lease, and the verification at either place. `tiers` decides when a tier needs
a copy. `tiers` and the commands import this package.
"""
