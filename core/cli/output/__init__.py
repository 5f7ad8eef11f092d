"""The output of commands: tables, trees, sums, statistics, and runs found on this machine.

Nothing here reads options or decides an exit code.
"""
