"""The commands: each module has one or a few, with their arguments, help, work and output.

A module here is imported only when its command runs.
"""
