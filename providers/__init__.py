"""State providers that ship with Penstock."""
