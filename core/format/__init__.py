"""Encodes, decodes and validates stored records, parts, sections and indexes. Sans-IO.

Does not read or write a store, and does not know the commit protocol. Needs neither torch nor a
thread.
"""
