"""The contracts and the engine of Penstock.

`checkpointer` is the facade, `reader` the read-only view of a run; each package says in its
docstring what lives there. `docs/architecture.md` has the order of the packages.
"""
