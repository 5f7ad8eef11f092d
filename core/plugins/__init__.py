"""Finds, checks and chooses providers, codecs and backends.

Here: entry points, the registry, and the choice of a provider. Not here: contracts (`abc`), and the
plugins themselves, which core never imports. `save`, `restore` and higher packages import this one.
"""
