"""The `penstock doctor` command: checks of this machine and of a store.

`host` and `probe` measure, the two modules of checks judge and advise, `doctor` runs and prints.
"""
