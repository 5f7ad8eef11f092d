"""Stored bytes, all of them sans-IO: records, parts, sections, index.

Here: encoding, decoding and validating stored records. Not here: reading or writing a store, and
the commit protocol. Needs neither torch nor a thread.
"""
