"""Finds, checks and chooses plugins: providers, codecs, backends and replayers.

Here: entry points, the registry, and the choice of a provider or replayer. Not here: contracts
(`abc`), and the plugins themselves, which core never imports. `save`, `restore` and higher packages
import this one.
"""
