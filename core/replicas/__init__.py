"""Copies of checkpoints on several hosts: where they go, what counts, and what may be deleted.

The decisions are sans-IO: `placement`, `holdings`, `epochs` and `replication`.
"""
