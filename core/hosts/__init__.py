"""Joint reads of a checkpoint: one rank reads bytes that several ranks need.

Here: which ranks are on which host; which rank reads which bytes; the shared memory that passes
bytes on within a host; the HTTP that passes bytes on between hosts. Not here: reading and verifying
bytes, which is in `pipeline`; the plan of a rank's needs, which is in `restore`. `restore` imports
it.
"""
