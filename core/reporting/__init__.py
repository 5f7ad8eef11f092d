"""Handles, reports, events and progress: the caller's view of work in flight.

Here: records and futures that users receive. Not here: the code that fills them. All packages above
`abc` may import this one.
"""
