"""Comparison of two checkpoints, by checksums or by reading.

Covers comparing manifests, bytes and norms, but not printing. The commands import this package.
"""
