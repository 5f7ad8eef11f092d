"""The state tree and its objects: paths, patterns, describing, placing.

The package turns a tree of live objects into a flat list of objects with paths, and back. It does
not handle chunks or files. Every package above it may import it. It imports `abc` and the modules
that everything uses.
"""
