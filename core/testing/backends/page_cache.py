"""The page cache: which part of a file is in it, after writes that should bypass it."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from penstock.core.abc import Backend

_PROBE_BYTES = 16 * mmap.PAGESIZE


def file_of_size(backend: Backend, size_bytes: int) -> Path | None:
    """Find a file of exactly that size below the folder that the URL of the backend names."""
    root = Path(unquote(urlsplit(backend.url).path))
    if not backend.capabilities.local or not root.is_dir():
        return None
    sized = (path for path in root.rglob("*") if path.is_file())
    return next((path for path in sized if path.stat().st_size == size_bytes), None)


def cached_part(file: Path) -> float | None:
    """Return the part of a file in the page cache, 0 to 1; None if the kernel does not tell."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as memory:
        pages = -(-len(memory) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(memory)
        try:
            look = ctypes.CDLL(None, use_errno=True).mincore
            address = ctypes.c_void_p(ctypes.addressof(anchor))
            failed = look(address, ctypes.c_size_t(len(memory)), found)
        except (AttributeError, OSError):
            return None
        finally:
            del anchor  # a mapping with an exported buffer cannot be closed
        return None if failed else sum(flags & 1 for flags in found) / pages


def goes_past_the_cache(folder: Path) -> bool:
    """Return whether direct writes leave nothing in the cache: a tmpfs consists of cache."""
    probe = folder / f"~direct-{os.getpid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0)
    try:
        fd = os.open(probe, flags, 0o600)
        try:
            with mmap.mmap(-1, _PROBE_BYTES) as page:
                os.write(fd, page)
        finally:
            os.close(fd)
        return cached_part(probe) == 0
    except OSError:
        return False
    finally:
        with suppress(OSError):
            probe.unlink()
