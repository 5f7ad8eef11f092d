"""The contracts and the engine of Penstock.

`checkpointer` is the facade; `reader` reads the checkpoints of a run. The docstring of each package
says what it contains; `docs/architecture.md` has the order of the packages.
"""
