"""The tiers of one run: drains, eviction, outages, repairs.

Covers moving a committed checkpoint from a fast tier to a durable tier. A single copy is in `copy`;
reads from the first tier that has a blob are in `penstock.backends.tiered`. Only the facade and the
commands import this package.
"""
