"""Saves live objects as frames and a commit record.

Runs one save on its own threads, from the described state to its end. Other packages have the
public API, and copy a checkpoint after its commit.
"""
