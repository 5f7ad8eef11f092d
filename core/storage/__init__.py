"""Backends as the engine uses them: opened from a configuration, checked, limited in time.

Covers opening and wrapping backends, but not the backends or the tiers themselves. Every higher
package may import this one.
"""
