"""Conformance suites and faults for authors of providers, codecs and backends."""
