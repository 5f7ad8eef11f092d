"""Finds, checks and chooses plugins: providers, codecs, backends and replayers.

Covers entry points, the registry, and the choice of a provider or replayer, but neither the
contracts (`abc`) nor the plugins themselves, which core imports only through entry points. `save`,
`restore` and higher packages import this one.
"""
