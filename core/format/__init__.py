"""Stored bytes, all of them sans-IO: records, parts, sections, index.

Here: encoding, decoding and validating what is stored. Not here: reading or writing a store, and
what a run does with its records. Needs neither torch nor a thread.
"""
