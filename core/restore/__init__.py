"""The restore: frames into live objects, or into new ones, whole or in part.

Here: reading, verifying and placing one checkpoint, and falling back to an older one. Not here:
which checkpoints exist (`catalog`). `copy`, `diff`, `reader` and the commands import it.
"""
