"""Backends as the engine uses them: opened by configuration, checked, bounded in time.

Here: opening, and wrappers around one backend or two. Not here: backends themselves, nor tiers.
Everything above it may import it.
"""
