"""Several places for one run: drains, eviction, outages, repairs.

Here: the way of a committed checkpoint from a fast place to a durable one. Not here: one copy
(`copy`), nor reading from the first place that has a blob (`penstock.backends.tiered`). Only the
facade and the commands import it.
"""
