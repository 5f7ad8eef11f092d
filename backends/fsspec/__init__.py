"""The backend `fsspec`: object stores and all else that has a URL, with a fast path for S3."""

from __future__ import annotations

from penstock.backends.fsspec.backend import FsspecBackend
from penstock.backends.fsspec.config import FsspecConfig

__all__ = ["FsspecBackend", "FsspecConfig"]
