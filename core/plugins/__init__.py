"""How providers, codecs and backends are found, checked and chosen.

Here: entry points, the registry, and the choice of a provider. Not here: contracts (`abc`), and
the plugins themselves, which core never imports. `save`, `restore` and everything above import it.
"""
