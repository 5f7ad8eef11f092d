"""Contracts and engine of Penstock."""
