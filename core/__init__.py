"""The contracts and the engine of Penstock.

`checkpointer` is the facade, `reader` the read-only view of a run. The docstring of each package
lists its contents; `docs/architecture.md` has the order of the packages.
"""
