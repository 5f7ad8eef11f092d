"""Threads and their waits: pools, latches, deadlines, watchdogs, clocks.

Nothing here knows what a checkpoint or a backend is. Every package of core may import it; plugins
see the parts that `penstock.core.abc` names.
"""
