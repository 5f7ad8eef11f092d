"""What `posix` and `uring` share: names under a root folder, direct I/O, the life of a file."""
