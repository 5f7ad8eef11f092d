"""Finds, checks and chooses plugins: providers, codecs, backends and replayers.

Covers entry points, the registry, and the choice of a provider or replayer, but not contracts
(`abc`) or the plugins themselves, which core never imports. `save`, `restore` and higher packages
import this one.
"""
