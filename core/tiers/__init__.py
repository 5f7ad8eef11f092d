"""Several places for one run: drains, eviction, outages, repairs.

Here: moving a committed checkpoint from a fast place to a durable place. Not here: a single copy
(`copy`), or reads from the first place that has a blob (`penstock.backends.tiered`). Only the
facade and the commands import it.
"""
