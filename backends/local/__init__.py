"""The shared code of the file backends: names under a root, direct I/O, writers and transfers.

It includes the thread engine; the io_uring engine is in `penstock.backends.uring`. Imported by
`posix`, `uring` and `lustre`.
"""
