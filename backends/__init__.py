"""Backends that ship with Penstock."""
