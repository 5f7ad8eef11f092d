"""The target of an export, written piece by piece.

An export appears complete and durable, or not at all. The next piece is read while the last piece
is written.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from penstock import ConfigError, StorageError, StorageFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

_EXPORTED = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|__.*\.distcp|\.metadata"
)
"""The files that make a folder an export."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of the files beside the weights of a model, which an export may copy."""

PIECE_BYTES = 16 << 20
"""The most bytes of a tensor that are read and written at once."""


def read_ahead(
    tensors: Iterable[tuple[Callable[[int, memoryview], object], int]],
) -> Generator[memoryview]:
    """Yield the bytes of tensors in pieces, each valid until the next is requested.

    The caller must close the iterator, which ends the reading thread.

    Args:
        tensors: For each tensor, a function as in `Streamed`, and the number of bytes.
    """
    buffers = [memoryview(bytearray(PIECE_BYTES)) for _ in range(2)]
    pieces = (
        (read, start, min(PIECE_BYTES, nbytes - start))
        for read, nbytes in tensors
        for start in range(0, nbytes, PIECE_BYTES)
    )

    def fill(read: Callable[[int, memoryview], object], start: int, out: memoryview) -> memoryview:
        read(start, out)
        return out

    with ThreadPoolExecutor(1, "penstock-export") as thread:
        reading: Future[memoryview] | None = None
        for number, (read, start, nbytes) in enumerate(pieces):
            last, reading = reading, thread.submit(fill, read, start, buffers[number % 2][:nbytes])
            if last is not None:
                yield last.result()
        if reading is not None:
            yield reading.result()


@contextmanager
def published(out: Path, *, is_folder: bool, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary path beside `out`; at the end, make it durable and move it to `out`.

    A crash leaves the old content or the whole export at `out`. It may also leave a path beside
    `out` whose name begins with a dot and contains `.partial-`. An exception leaves nothing.

    Args:
        out: The path of the export.
        is_folder: Whether it is a folder or one file.
        overwrite: Whether to replace a file, or a folder with an earlier export, at `out`.

    Raises:
        ConfigError: `out` has content that must not be replaced. A folder may have files beside the
            weights only if the export writes files of the same names.
        StorageError: `out` cannot be written. Nothing was changed there, unless only the final sync
            of its folder failed.
    """
    _check_free(out, is_folder=is_folder, overwrite=overwrite)
    partial = out.with_name(f".{out.name}.partial-{secrets.token_hex(8)}")
    missing = [folder for folder in out.parents if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if is_folder:
            partial.mkdir()
        yield partial
        for path in sorted(partial.rglob("*")) if is_folder else ():
            _sync(path)
        _sync(partial)
        written = {path.name for path in partial.iterdir()} if is_folder else frozenset()
        _check_free(out, is_folder=is_folder, overwrite=overwrite, written=written)
        _move(partial, out, overwrite=overwrite)
        for path in (out, *missing):
            _sync(path.parent)
    except OSError as error:
        kind = StorageFullError if error.errno in {errno.ENOSPC, errno.EDQUOT} else StorageError
        msg = f"the export to {out} failed: {error.strerror or error}"
        raise kind(msg) from error
    finally:
        if is_folder:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                partial.unlink()


def begin_write_back(file: int, start: int = 0, stop: int = PIECE_BYTES) -> None:
    """Start to write back a file's page cache, while more of the file is prepared.

    Otherwise the final `fsync` writes all of it, while nothing is read.

    Args:
        file: An open descriptor.
        start: Where the last written bytes begin.
        stop: Where they end. The write-back starts only if they cross a multiple of `PIECE_BYTES`:
            it visits all pages of the file, which is too slow after every small tensor.
    """
    if start // PIECE_BYTES == stop // PIECE_BYTES:
        return
    # It also drops clean pages from the cache, which is welcome: no read needs them soon.
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _check_free(
    out: Path, *, is_folder: bool, overwrite: bool, written: Collection[str] | None = None
) -> None:
    """Refuse to replace anything but an export; `written` has the new names, if known."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        msg = f"{out} exists: export to another place, or replace it with overwrite (--overwrite)"
        raise ConfigError(msg)
    if out.is_symlink() or out.is_dir() != is_folder:
        msg = (
            f"{out} is not a {'folder' if is_folder else 'file'}, so it is not replaced; remove it"
        )
        raise ConfigError(msg)
    if not is_folder:
        return
    names = [path.name for path in out.iterdir()]
    beside = [name for name in names if not _EXPORTED.fullmatch(name)]
    others = sorted(
        name
        for name in beside
        if not name.endswith(COPIED) or (written is not None and name not in written)
    )
    if others or len(beside) == len(names):
        has = f"it has {', '.join(others[:3])}" if others else "it has no weights"
        msg = f"{out} is not an earlier export ({has}), so it is not replaced; remove it yourself"
        raise ConfigError(msg)


def _move(partial: Path, out: Path, *, overwrite: bool) -> None:
    if not partial.is_dir():
        if overwrite:
            partial.replace(out)
            return
        try:
            os.link(partial, out)  # unlike a rename, it never replaces a new file
        except FileExistsError:
            raise
        except OSError:  # a filesystem without links
            partial.rename(out)
        return
    if not os.path.lexists(out):
        partial.rename(out)  # the system refuses if a folder with files is there now
        return
    _exchange(partial, out)  # then `published` deletes the old one


def _exchange(one: Path, other: Path) -> None:
    """Exchange two folders in one system call, since a crash could come between two renames.

    Raises:
        OSError: The filesystem cannot do that; both are unchanged.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        reason = f"{os.strerror(code)}: a folder cannot be replaced here, so remove {other} first"
        raise OSError(code, reason)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
