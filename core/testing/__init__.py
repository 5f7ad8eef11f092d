"""Conformance suites and faulty backends, for our own tests and for authors of plugins.

`backends`, `codecs` and `providers` check a plugin against its contract; `faults`, `latency` and
`powercut` are backends that misbehave on purpose. Shipped, but imported by tests only.
"""
