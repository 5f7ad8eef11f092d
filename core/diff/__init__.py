"""Comparison of two checkpoints, by checksums or by reading.

Here: comparing manifests, bytes and norms. Not here: printing. The commands import this package.
"""
