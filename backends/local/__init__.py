"""The file backends' common part: names under a root folder, direct I/O, the life of a file.

Here: everything but the engine that moves bytes, and the engine of threads. The engine of io_uring
is in `penstock.backends.uring`. Imported by `posix`, `uring` and `lustre`.
"""
