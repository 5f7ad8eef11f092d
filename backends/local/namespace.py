"""Names under one root folder: every lookup walks down with open folders and follows no link.

Names hold no `~` (the contract), so temporary files begin with it and can never be listed.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from penstock.backends.local.failures import storage_error
from penstock.backends.local.folders import FOLDER_FLAGS, Folders, make_folder
from penstock.core.abc import check_blob_name
from penstock.core.errors import BlobNotFoundError, CapabilityError, StorageError, UnsyncedError
from penstock.core.types import BlobInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Birth = Callable[[str], None]
    """Brings an empty file into being at a path where nothing is, in a way of its own.

    Raises OSError or StorageError; what it leaves behind then is removed.
    """

_T = TypeVar("_T")
TEMPORARY = "~"
_TOPS = ("commits", "data", "clock")
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
_ATTEMPTS = 8  # a folder found empty may be removed by a delete while we walk into it


class Namespace:
    """Blobs and records as files under `root`; holds no state, so it needs no lock."""

    def __init__(self, root: str) -> None:
        self.root = root

    def open_folders(self, name: str, *, create: bool = False) -> Folders:
        """Walk to the folder of `name`; the caller closes what it gets.

        Raises:
            OSError: A folder is missing, or a link or a file stands in the way.
        """
        return self._walk(name.split("/")[:-1], create=create)

    def create_file(self, name: str, *, birth: Birth | None = None) -> tuple[int, Folders]:
        """Make an empty file that did not exist; both results are the caller's to close.

        With `birth`, it is born under a temporary name and then linked to its own.

        Raises:
            StorageError: As `Backend.create`.
        """
        check_blob_name(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        leaf = name.rpartition("/")[2]

        def create(folder: int) -> int:
            if birth is None:
                return os.open(leaf, flags, 0o666, dir_fd=folder)
            return self._adopt(folder, name, birth)

        try:
            return self._make(name, create)
        except OSError as error:
            raise storage_error(error, "create", name, self.root) from error

    def open_file(self, name: str) -> int:
        """Open a blob for reading.

        Raises:
            StorageError: As `Backend.read`.
        """
        check_blob_name(name)
        leaf = name.rpartition("/")[2]
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            with self._folders(name) as folders:
                fd = os.open(leaf, flags, dir_fd=folders.last)
        except OSError as error:
            raise storage_error(error, "read", name, self.root) from error
        os.set_blocking(fd, True)  # non-blocking only so that opening a pipe cannot hang
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            msg = f"cannot read {name} under {self.root}: it is not a regular file"
            raise BlobNotFoundError(msg)
        return fd

    def publish(
        self, name: str, data: bytes, *, exclusive: bool, birth: Birth | None = None
    ) -> None:
        """As `Backend.publish`: temporary file, fsync, link or rename, fsync of the folders."""
        check_blob_name(name)
        leaf = name.rpartition("/")[2]
        visible = False
        make = None if birth is None else lambda leaf: birth(self._beside(name, leaf))
        try:
            temporary, folders = self._make(name, lambda folder: _temporary(folder, data, make))
            try:
                if exclusive:
                    self._link(temporary, leaf, folders.last, name)
                else:
                    os.replace(temporary, leaf, src_dir_fd=folders.last, dst_dir_fd=folders.last)
                visible = True
                folders.sync()
            finally:
                with suppress(OSError):  # after a rename it is gone already
                    os.unlink(temporary, dir_fd=folders.last)
                folders.close()
        except OSError as error:
            explained = storage_error(error, "publish", name, self.root)
            if not visible:
                raise explained from error
            msg = f"{explained}; the record is there already, but may not survive a power cut"
            raise UnsyncedError(msg) from error

    def list(self, prefix: str) -> list[BlobInfo]:
        """As `Backend.list`."""
        check_blob_name(prefix, prefix=True)
        folder = prefix.rpartition("/")[0]
        found: list[BlobInfo] = []
        try:
            with self._folders(prefix) as folders:
                _scan(folders.last, folder + "/" if folder else "", prefix, found)
        except FileNotFoundError:
            return []
        except OSError as error:
            if isinstance(error, NotADirectoryError) and os.path.isdir(self.root):
                return []
            raise storage_error(error, "list", prefix, self.root) from error
        return sorted(found, key=lambda info: info.name)

    def stat(self, name: str) -> BlobInfo:
        """As `Backend.stat`."""
        check_blob_name(name)
        leaf = name.rpartition("/")[2]
        try:
            with self._folders(name) as folders:
                status = os.stat(leaf, dir_fd=folders.last, follow_symlinks=False)
        except OSError as error:
            raise storage_error(error, "stat", name, self.root) from error
        if not stat.S_ISREG(status.st_mode):
            msg = f"cannot stat {name} under {self.root}: it is not a regular file"
            raise BlobNotFoundError(msg)
        return BlobInfo(name, status.st_size, status.st_mtime)

    def delete(self, names: Sequence[str]) -> None:
        """As `Backend.delete`: what is in one folder is durably gone before the next is touched."""
        for name in names:
            check_blob_name(name)
        start = 0
        while start < len(names):
            folder = names[start].rpartition("/")[0]
            stop = start + 1
            while stop < len(names) and names[stop].rpartition("/")[0] == folder:
                stop += 1
            try:
                self._delete_in_folder(names[start:stop])
            except OSError as error:
                raise storage_error(error, "delete", names[start], self.root) from error
            start = stop

    def free_bytes(self) -> int:
        """As `Backend.free_bytes`, where the root is or will be."""
        folder = self.root
        while True:
            try:
                status = os.statvfs(folder)
            except FileNotFoundError:
                folder = os.path.dirname(folder)
            except OSError as error:
                raise storage_error(error, "look at", "the free space", self.root) from error
            else:
                return status.f_bavail * status.f_frsize

    def sweep(self, before_s: float) -> None:
        """As `Backend.sweep`: temporary files, and folders without any file.

        Only where our names are: whatever else somebody keeps under the root is not ours.
        """
        for top in _TOPS:
            try:
                with self._folders(f"{top}/") as folders:
                    _sweep(folders.last, before_s)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise storage_error(error, "sweep", top, self.root) from error

    # -- below --------------------------------------------------------------------------------

    @contextmanager
    def _folders(self, name: str) -> Iterator[Folders]:
        folders = self.open_folders(name)
        try:
            yield folders
        finally:
            folders.close()

    def _make(self, name: str, action: Callable[[int], _T]) -> tuple[_T, Folders]:
        """Run `action` in the folder of `name`, made if needed, and again if a delete took it."""
        for attempt in range(_ATTEMPTS):
            try:
                folders = self.open_folders(name, create=True)
            except FileNotFoundError:
                if attempt + 1 == _ATTEMPTS:
                    raise
                continue
            try:
                return action(folders.last), folders
            except FileNotFoundError:
                folders.close()
                if attempt + 1 == _ATTEMPTS:
                    raise
            except BaseException:
                folders.close()
                raise
        raise AssertionError

    def _walk(self, parts: Sequence[str], *, create: bool) -> Folders:
        fds = [self._open_root(create=create)]
        try:
            for part in parts:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=fds[-1])
                fds.append(os.open(part, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=fds[-1]))
        except BaseException:
            Folders(self.root, fds).close()
            raise
        return Folders(self.root, fds)

    def _open_root(self, *, create: bool) -> int:
        try:
            return os.open(self.root, FOLDER_FLAGS)
        except FileNotFoundError:
            if not create:
                raise
        make_folder(self.root)
        return os.open(self.root, FOLDER_FLAGS)

    def _beside(self, name: str, leaf: str) -> str:
        return os.path.join(self.root, *name.split("/")[:-1], leaf)

    def _adopt(self, folder: int, name: str, birth: Birth) -> int:
        temporary = TEMPORARY + secrets.token_hex(8)
        try:
            birth(self._beside(name, temporary))
            fd = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                self._link(temporary, name.rpartition("/")[2], folder, name)
            except BaseException:
                os.close(fd)
                raise
        finally:
            with suppress(OSError):  # not born, or the folder is gone
                os.unlink(temporary, dir_fd=folder)
        return fd

    def _link(self, temporary: str, leaf: str, folder: int, name: str) -> None:
        try:
            os.link(temporary, leaf, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            # On a network file system the answer to a link that was made may be lost.
            if os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_nlink > 1:
                return
            if error.errno in _NO_LINKS:
                msg = (
                    f"cannot publish {name} exclusively under {self.root}: the file system makes "
                    f"no hard links ({error}); use another one for checkpoints"
                )
                raise CapabilityError(msg) from error
            raise

    def _delete_in_folder(self, names: Sequence[str]) -> None:
        try:
            folders = self.open_folders(names[0])
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(name.rpartition("/")[2], dir_fd=folders.last)
            os.fsync(folders.last)
            folders.close()
            self._remove_empty(names[0].split("/")[:-1])
        finally:
            folders.close()

    def _remove_empty(self, parts: Sequence[str]) -> None:
        for depth in range(len(parts), 0, -1):
            try:
                with self._folders("/".join(parts[:depth])) as above:
                    os.rmdir(parts[depth - 1], dir_fd=above.last)
                    os.fsync(above.last)
            except OSError:  # not empty, or gone: both are fine, removing is a courtesy
                return


def _temporary(folder: int, data: bytes, make: Callable[[str], None] | None = None) -> str:
    temporary = TEMPORARY + secrets.token_hex(8)
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if make is None:
            flags |= os.O_CREAT | os.O_EXCL
        else:
            make(temporary)
        fd = os.open(temporary, flags, 0o666, dir_fd=folder)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    return temporary


def _scan(folder: int, base: str, prefix: str, found: list[BlobInfo]) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = base + entry.name
            if not name.startswith(prefix):
                continue
            try:
                check_blob_name(name)
            except StorageError:  # a temporary file, or not ours
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    inner = os.open(entry.name, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
                    try:
                        _scan(inner, name + "/", prefix, found)
                    finally:
                        os.close(inner)
                else:
                    # A link or a pipe too: who reads it is refused, but a checkpoint whose record
                    # was replaced by one must not look as if it had never been.
                    status = entry.stat(follow_symlinks=False)
                    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                    found.append(BlobInfo(name, size, status.st_mtime))
            except FileNotFoundError:  # deleted while we looked
                continue


def _sweep(folder: int, before_s: float) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # somebody else was faster, or it is not ours to remove
                status = entry.stat(follow_symlinks=False)
                old = status.st_mtime < before_s
                if stat.S_ISDIR(status.st_mode):
                    inner = os.open(entry.name, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
                    try:
                        _sweep(inner, before_s)
                    finally:
                        os.close(inner)
                    if old:
                        os.rmdir(entry.name, dir_fd=folder)  # unless it holds something
                elif old and entry.name.startswith(TEMPORARY):
                    os.unlink(entry.name, dir_fd=folder)
