"""The codecs that ship with Penstock.

A codec encodes chunks into frames and decodes them. It imports the contracts, types and errors of
`penstock.core` only, neither providers nor backends; core finds codecs by entry point.
"""
