"""The `penstock` command: its options, its commands, and how errors end it.

`commands` has each command's work and output, `output` prints, `bench` measures the speed of a
store. Nothing here touches stored bytes, and no other package imports this one.
"""
