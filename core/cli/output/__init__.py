"""The output of commands: tables, trees, sums, statistics, and runs found on this machine.

Used by the commands and by `doctor`; nothing here reads options or decides an exit code.
"""
