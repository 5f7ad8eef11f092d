"""The state tree and its objects: paths, patterns, describing, placing.

Here: making a flat list of objects with paths from a tree of live objects, and the way back. Not
here: bytes, chunks, files. Every package above it may import it; it imports `abc` and the words
that everything uses.
"""
