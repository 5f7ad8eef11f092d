"""Threads and their waits: pools, latches, deadlines, watchdogs, clocks.

Nothing here depends on checkpoints or backends. Every package of core may import it; plugins see
the parts that `penstock.core.abc` exports.
"""
