"""The file backends' common part: names under a root folder, direct I/O, the life of a file.

It includes the engine of threads; the engine of io_uring is in `penstock.backends.uring`. Imported
by `posix`, `uring` and `lustre`.
"""
