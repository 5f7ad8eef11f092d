"""The `penstock` command: its options, its commands, and its handling of errors.

`commands` has the commands, `output` prints their results, `bench` measures the speed of a store.
Other packages do the work on checkpoints. No other package imports this one.
"""
