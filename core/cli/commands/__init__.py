"""The commands, one module each: a command's arguments and help, its work, and what it prints.

A module here is imported only when its command runs.
"""
