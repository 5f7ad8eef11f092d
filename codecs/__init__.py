"""Codecs that ship with Penstock."""
