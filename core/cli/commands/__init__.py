"""The commands: the arguments, help, work and output of each, in modules of one or more commands.

A module here is imported only when its command runs.
"""
