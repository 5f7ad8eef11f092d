"""`fsspec`: object stores and everything else that has a URL; S3 has a fast path of its own."""

from __future__ import annotations

from penstock.backends.fsspec.backend import FsspecBackend
from penstock.backends.fsspec.config import FsspecConfig

__all__ = ["FsspecBackend", "FsspecConfig"]
