"""Handles, reports, events and progress: the caller's view of work in flight.

Here: records and futures that are handed to users. Not here: the code that fills them. Everything
above `abc` may import it.
"""
