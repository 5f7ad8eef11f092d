"""The state tree and its objects: paths, patterns, describing, placing.

Turns a tree of live objects into a flat list of objects with paths, and back. Knows no bytes,
chunks or files. Every package above it may import it; it imports `abc` and the modules that
everything uses.
"""
