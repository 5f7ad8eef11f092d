"""The backend `uring`, which moves files with io_uring.

The package contains the ring, and the engine that keeps transfers in flight. The code that `uring`
shares with `posix` is in `penstock.backends.local`.
"""

from penstock.backends.uring.engine import UringBackend, UringConfig

__all__ = ["UringBackend", "UringConfig"]
