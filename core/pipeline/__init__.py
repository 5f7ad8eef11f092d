"""Moves bytes between memory and blobs, through staging memory and codec chains.

Turns chunks into stored frames, and frames into verified bytes. `plan` chooses the bytes; callers
know when a save or restore is complete. `save`, `restore`, `copy` and `diff` import it.
"""
