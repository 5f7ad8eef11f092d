"""Handles, reports, events and progress: the caller's view of work in flight.

Covers records and futures that users receive, but not the code that fills them. All packages above
`abc` may import this one.
"""
