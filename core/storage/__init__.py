"""Opens backends from a configuration, checks them, and sets time limits on their calls.

The backends and the tiers themselves are elsewhere. Every higher package may import this one.
"""
