"""Restores a checkpoint, whole or in part, into live or new objects.

Reads and verifies its frames, and falls back to an older checkpoint. `catalog` knows which
checkpoints exist. `copy`, `diff`, `log`, the facade and the commands import this package.
"""
