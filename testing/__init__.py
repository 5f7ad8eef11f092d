"""Conformance suites and faulty backends, for the authors of plugins and for our own tests.

`backends`, `codecs`, `providers` and `coordination` check an implementation against its contract;
`faults` and `powercut` have backends that fail, hang, crash, lag or lose power on purpose. Shipped,
but imported by tests only.
"""
