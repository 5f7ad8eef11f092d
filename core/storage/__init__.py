"""Backends as the engine uses them: opened by configuration, checked, bounded in time.

Opens backends and wraps them; backends and tiers themselves are elsewhere. Every higher package may
import this one.
"""
