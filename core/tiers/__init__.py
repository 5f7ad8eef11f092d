"""The tiers of one run: drains, eviction, outages, repairs.

Here: moving a committed checkpoint from a fast tier to a durable tier. Not here: a single copy,
which is in `copy`; reads from the first tier that has a blob, which are in
`penstock.backends.tiered`. Only the facade and the commands import it.
"""
