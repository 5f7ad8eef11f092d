"""The backend `fsspec`: S3, and every file system of fsspec.

Here: the backend, the parts that both kinds of store share, and the store for file systems of
fsspec. S3 has a store of its own, in the package `s3`.
"""

from __future__ import annotations

from penstock.backends.fsspec.backend import FsspecBackend
from penstock.backends.fsspec.config import FsspecConfig

__all__ = ["FsspecBackend", "FsspecConfig"]
