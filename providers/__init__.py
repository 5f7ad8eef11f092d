"""The state providers that ship with Penstock.

A provider describes values of certain types as objects, and restores stored bytes into such values.
Providers import only the contracts, types and errors of `penstock.core`, no backends or codecs.
Core finds providers by entry point.
"""
