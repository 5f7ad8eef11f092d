"""The commands, one module each or one for two: arguments and help, the work, and what it prints.

A module here is imported only when its command runs.
"""
