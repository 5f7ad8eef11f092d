"""A backend for Penstock that keeps checkpoints in the memory of a Redis server."""
