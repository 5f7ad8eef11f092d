"""Conformance suites and faulty backends, for plugin authors and Penstock's own tests.

`backends`, `codecs`, `providers`, `replayers` and `coordination` check an implementation against
its contract; `faults` and `powercut` have backends that fail, hang, crash, lag or lose power on
purpose. The package is shipped, but only tests import it.
"""
