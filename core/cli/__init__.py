"""The `penstock` command: its options, its commands, and its handling of errors.

`commands` has the commands, `output` prints their results, `bench` measures the speed of a store.
Nothing here touches stored bytes, and no other package imports this one.
"""
