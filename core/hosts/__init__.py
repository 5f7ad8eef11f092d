"""Joint reads of a checkpoint: one rank reads bytes that several ranks need.

Covers which ranks are on which host; which rank reads which bytes; the shared memory that passes
bytes on within a host; the HTTP that passes bytes on between hosts. Also serves a host's root to
the other hosts of its job. `pipeline` reads and verifies bytes. `restore` plans a rank's needs and
imports this package.
"""
