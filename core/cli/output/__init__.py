"""The output of commands: tables, trees, statistics, damage, and runs found on this machine.

Used by the commands and by `doctor`; nothing here reads options or decides an exit code.
"""
