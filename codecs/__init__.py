"""The codecs that ship with Penstock.

A codec encodes chunks into frames and decodes them. From Penstock it imports only the contracts,
types and errors of `penstock.core`. Core finds codecs by entry point.
"""
