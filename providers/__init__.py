"""The state providers that ship with Penstock.

A provider describes values of some types as objects, and places restored bytes into them. It
imports the contracts, types and errors of `penstock.core` only, neither backends nor codecs; core
finds providers by entry point.
"""
