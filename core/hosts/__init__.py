"""Joint reads of a checkpoint: one rank reads bytes that several ranks need.

The modules find the ranks of each host, decide which rank reads which bytes, and pass the bytes on:
through shared memory within a host, over HTTP between hosts. Another module serves a host's root to
the other hosts of its job. `pipeline` reads and verifies bytes. `restore` plans a rank's needs and
imports this package.
"""
