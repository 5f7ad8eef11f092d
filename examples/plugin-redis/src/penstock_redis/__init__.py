"""A backend for Penstock that keeps checkpoints in a Redis server."""
