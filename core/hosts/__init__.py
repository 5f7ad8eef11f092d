"""Lets ranks read a checkpoint together: one rank reads bytes that several ranks need.

Here: which ranks are on which host, which rank reads which bytes, the shared memory that passes
them on within a host, and the HTTP that passes them on between hosts. Not here: how bytes are read
and verified (`pipeline`), nor the plan of what a rank needs (`restore`). `restore`
imports it.
"""
