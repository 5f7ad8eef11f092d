"""The `penstock` command: its options, its commands, and how errors end it.

Each command's work and output is in `commands`, `doctor` checks a machine and a store, `output`
prints. Nothing here touches stored bytes, and nothing in the product imports this package.
"""
