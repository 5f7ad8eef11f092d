"""The restore: frames into live or new objects, whole or in part.

Reads, verifies and places one checkpoint, and falls back to an older one. `catalog` knows which
checkpoints exist. `copy`, `diff`, `reader` and the commands import this package.
"""
