"""Measures a store: its raw limit, and a sweep of saves and restores by the engine.

Used by the commands `bench`, `tune` and `doctor`; nothing here prints.
"""
