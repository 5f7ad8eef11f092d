"""Finds, checks and chooses providers, codecs and backends.

Covers entry points, the registry, and the choice of a provider, but not contracts (`abc`) or the
plugins themselves, which core never imports. `save`, `restore` and higher packages import this one.
"""
