"""The backends that ship with Penstock.

A backend keeps blobs and records under one root. From Penstock it imports only the contracts, types
and errors of `penstock.core`. Core finds backends by entry point.
"""
