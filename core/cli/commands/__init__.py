"""The commands, one module each: a command's work, and what it prints.

Arguments and help are declared beside the application, in `penstock.core.cli`. A module here is
imported only when its command runs.
"""
