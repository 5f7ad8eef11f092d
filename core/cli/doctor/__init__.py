"""The `penstock doctor` command: checks of this machine and of a store.

`host` and `store_checks` measure, judge and advise; `doctor` runs them and prints.
"""
