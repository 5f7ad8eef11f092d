"""The backends that ship with Penstock.

A backend keeps blobs and records under one root. It imports the contracts, types and errors of
`penstock.core` only, neither providers nor codecs; core finds backends by entry point.
"""
