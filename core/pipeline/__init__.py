"""Bytes in flight: staging memory, codec chains, frames, blobs.

Here: the way from chunks to stored frames, and from frames to verified bytes. Not here: which bytes
(`plan`), and when a save or restore is complete. `save`, `restore`, `copy` and `diff` import it.
"""
