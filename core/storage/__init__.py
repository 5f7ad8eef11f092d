"""Backends as the engine uses them: opened from a configuration, checked, limited in time.

Here: opening and wrapping backends. Not here: the backends and the tiers themselves. Every higher
package may import this one.
"""
