"""The `penstock` command: its options, its commands, and how errors end it.

Each command's work and output is in `commands`, `output` prints, `bench` measures the speed of a
store. Nothing here touches stored bytes, and nothing in the product imports this package.
"""
