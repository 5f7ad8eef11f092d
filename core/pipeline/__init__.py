"""Moves bytes between memory and blobs, through staging memory and codec chains.

Turns chunks into stored frames, and frames into verified bytes. The package `plan` chooses which
bytes; the callers decide when a save or restore is complete.
"""
