"""The mapping of `OSError` to Penstock's errors, in one place for all file backends."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    StorageError,
    StorageFullError,
)
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.types import ByteRange

    Advise = Callable[[OSError, ByteRange | None], str]
    """Returns advice on a failure in a byte range of a blob; empty without advice."""

_HINTS = {
    errno.EACCES: "check the owner and the permissions of the folder",
    errno.EPERM: "check the owner and the permissions of the folder",
    errno.EROFS: "the file system is mounted read-only",
    errno.ELOOP: "a symbolic link is in the way; links below the root are not followed",
    errno.ENOTDIR: "a file or a link is where a folder is needed",
    errno.EISDIR: "a folder has that name",
    errno.EIO: "the device reported an error: look at the kernel log before using it again",
    errno.EFBIG: "the file would exceed the size limit of the process (ulimit -f) or file system",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENAMETOOLONG: "the name is longer than the file system allows",
    errno.ECANCELED: (
        "the kernel could start no worker thread for io_uring: raise the process limit "
        "(ulimit -u, pids.max of the container), or use posix://"
    ),
    errno.ESTALE: "the network file system lost the file: another machine may have deleted it",
}
_OF_THE_ROOT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_MAKING = {"create", "publish"}
_READING = {"read", "stat"}
_IN_THE_WAY = {errno.ELOOP, errno.ENOTDIR}
# At the size limit of the process the kernel cuts a write short: a direct one then ends within a
# block, which is refused (EINVAL), or within a page, and makes no progress (EIO). EFBIG is returned
# only for a write that begins after the limit.
_CUT_SHORT = {errno.EINVAL, errno.EIO}


def storage_error(error: OSError, what: str, name: str, root: str) -> StorageError:
    """Map `error` of the operation `what` on the blob or record `name` to a StorageError."""
    where = f"cannot {what} {name or 'the root'} under {root}"
    number = error.errno or 0
    if number in _OF_THE_ROOT:  # the root first: the user must change it, not the record
        where = f"{root}: cannot {what} {name or 'it'}"
    if number == errno.ENOENT and what in _MAKING:
        msg = (
            f"{root}: cannot {what} {name}: its folder cannot be created (ENOENT): the path is in "
            "a pseudo file system such as /proc, or another process keeps removing the folder"
        )
        return StorageError(msg)
    if number == errno.ENOENT:
        return BlobNotFoundError(f"{where}: it does not exist")
    if number == errno.EEXIST:
        return BlobExistsError(f"{where}: the name is taken")
    code = errno.errorcode.get(number, str(number))
    text = os.strerror(number) if number else str(error)
    if number in _FULL:
        msg = f"{where}: {text} ({code}); {_free(root)}; make room or raise the quota"
        return StorageFullError(msg)
    hint = _limit_within_a_page() if what == "write" and number in _CUT_SHORT else None
    hint = hint or _HINTS.get(number)
    # A link or a file in the way is no outage that a retry could fix: for a reader the blob is
    # missing, which counts as damage.
    kind = BlobNotFoundError if what in _READING and number in _IN_THE_WAY else StorageError
    return kind(f"{where}: {text} ({code})" + (f"; {hint}" if hint else ""))


@contextmanager
def explained(what: str, name: str, root: str, advise: Advise | None = None) -> Iterator[None]:
    """Map an `OSError` in the block to a StorageError."""
    try:
        yield
    except OSError as error:
        advice = "" if advise is None else advise(error, None)
        raise advised(storage_error(error, what, name, root), advice) from error


def advised(error: StorageError, advice: str) -> StorageError:
    """Return `error` with `advice` added to its message."""
    return type(error)(f"{error}; {advice}") if advice else error


def _limit_within_a_page() -> str | None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY or limit % PAGE_BYTES == 0:
        return None
    return (
        f"files of this process may have at most {limit} bytes, which is not a multiple of "
        f"{PAGE_BYTES}: raise or round the limit (ulimit -f)"
    )


def _free(root: str) -> str:
    try:
        status = os.statvfs(root)
    except OSError:
        return "the free space is unknown"
    return f"{status.f_bavail * status.f_frsize / 2**20:,.1f} MiB are free"
