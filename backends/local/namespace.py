"""Names under one root. Every lookup below it opens folder by folder, and follows no link.

Otherwise a link that replaces a folder could lead out of the root. Temporary files begin with `~`,
which no blob name contains, so they are never listed.
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

    from penstock.backends.local.folders import Ownership

    Birth = Callable[[str], None]
    """Creates an empty file at a new path, for instance with a layout.

    The path begins with `/proc/self/fd/` and the number of the open folder.

    Raises OSError or StorageError; the caller then removes any file at the path.
    """

_T = TypeVar("_T")
TEMPORARY = "~"
_TOPS = ("commits", "data", "clock", "tier")
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
_ATTEMPTS = 8  # a delete may remove an empty folder between its creation and its use


class Namespace:
    """Keeps blobs and records as files under `root`. Stateless, so it needs no lock."""

    def __init__(self, root: str, *, ownership: Ownership | None = None) -> None:
        self.root = root
        self._ownership = ownership

    def open_folders(self, name: str, *, create: bool = False) -> Folders:
        """Open the folders from the root to that of `name`; with `create`, create missing ones.

        The caller closes the result.

        Raises:
            OSError: A folder is missing, or a link or a file is in the way.
        """
        return self._walk(name.split("/")[:-1], create=create)

    def create_file(self, name: str, *, birth: Birth | None = None) -> tuple[int, Folders]:
        """Create a new empty file; the caller closes both results.

        If `birth` is given, it creates the file under a temporary name. The file is then linked to
        `name`, which fails if the name is taken.

        Raises:
            StorageError: See `Backend.create`.
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
            StorageError: See `Backend.read`.
        """
        check_blob_name(name)
        leaf = name.rpartition("/")[2]
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            with self._folders(name) as folders:
                fd = os.open(leaf, flags, dir_fd=folders.last)
        except OSError as error:
            raise storage_error(error, "read", name, self.root) from error
        os.set_blocking(fd, True)  # opened without blocking, so that opening a pipe cannot hang
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            msg = f"cannot read {name} under {self.root}: it is not a regular file"
            raise BlobNotFoundError(msg)
        return fd

    def publish(
        self, name: str, data: bytes, *, exclusive: bool, birth: Birth | None = None
    ) -> None:
        """Write a temporary file, sync it, link or rename it to `name`, and sync the folders."""
        check_blob_name(name)
        leaf = name.rpartition("/")[2]
        visible = False
        try:
            temporary, folders = self._make(name, lambda folder: _temporary(folder, data, birth))
            try:
                if exclusive:
                    self._link(temporary, leaf, folders.last, name)
                else:
                    os.replace(temporary, leaf, src_dir_fd=folders.last, dst_dir_fd=folders.last)
                visible = True
                folders.sync()
            finally:
                with suppress(OSError):  # after a rename the temporary name is already gone
                    os.unlink(temporary, dir_fd=folders.last)
                folders.close()
        except OSError as error:
            failure = storage_error(error, "publish", name, self.root)
            if not visible:
                raise failure from error
            msg = f"{failure}; the record exists, but may not survive a power cut"
            raise UnsyncedError(msg) from error

    def list(self, prefix: str) -> list[BlobInfo]:
        """See `Backend.list`."""
        check_blob_name(prefix, prefix=True)
        folder = prefix.rpartition("/")[0]
        infos: list[BlobInfo] = []
        try:
            with self._folders(prefix) as folders:
                _scan(folders.last, folder + "/" if folder else "", prefix, infos)
        except FileNotFoundError:
            return []
        except OSError as error:
            if isinstance(error, NotADirectoryError) and os.path.isdir(self.root):
                self._refuse_no_folder(prefix)
                return []
            raise storage_error(error, "list", prefix, self.root) from error
        return sorted(infos, key=lambda info: info.name)

    def stat(self, name: str) -> BlobInfo:
        """See `Backend.stat`."""
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
        """See `Backend.delete`. Makes the deletions in a folder durable before the next folder."""
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

    def rename(self, old: str, new: str) -> None:
        """See `Backend.rename`."""
        check_blob_name(old)
        check_blob_name(new)
        try:
            with self._folders(old) as source:
                before = old.rpartition("/")[2], new.rpartition("/")[2]
                _, folders = self._make(
                    new,
                    lambda folder: os.rename(*before, src_dir_fd=source.last, dst_dir_fd=folder),
                )
                try:
                    folders.sync()
                finally:
                    folders.close()
                source.sync()
        except OSError as error:
            raise storage_error(error, "rename", old, self.root) from error

    def free_bytes(self) -> int:
        """Return the free bytes at the root or its nearest existing parent."""
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

    def check_writable(self) -> None:
        """Check that the root, or its nearest existing parent, can be written."""
        folder = self.root
        if self._ownership is not None:
            self._ownership.check()
        try:
            while not os.path.lexists(folder) and folder != os.path.dirname(folder):
                folder = os.path.dirname(folder)
            number = _obstacle(folder)
            below = [os.path.join(self.root, top) for top in _TOPS] if folder == self.root else []
            for path in filter(os.path.isdir, below):
                number = number or _obstacle(path)
        except OSError as error:
            raise storage_error(error, "write", "", self.root) from error
        if number:
            raise storage_error(OSError(number, os.strerror(number)), "write", "", self.root)

    def sweep(self, before_s: float) -> None:
        """Remove temporary files and empty folders that are older than `before_s`.

        Sweeps only the top folders that Penstock uses: other files under the root belong to the
        user.
        """
        for top in _TOPS:
            try:
                self._sweep_below(top, before_s)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise storage_error(error, "sweep", top, self.root) from error

    # -- below --------------------------------------------------------------------------------

    def _refuse_no_folder(self, prefix: str) -> None:
        """Raise if a top folder such as `commits` or `data` is a link or a file.

        Otherwise a run whose records were moved to another disk would look like a run without
        records, and `prune` would delete all its data as garbage.
        """
        top = prefix.partition("/")[0]
        path = os.path.join(self.root, top)
        if top not in _TOPS or not os.path.lexists(path):
            return
        msg = f"cannot list {prefix} under {self.root}: {path} is "
        if os.path.islink(path):
            msg += (
                "a symbolic link, and links below the root are not followed. Move the folder "
                "itself back, or mount it there (mount --bind); to keep a run on another disk, "
                "make the whole root a link"
            )
        else:
            msg += "not a folder. Move the file away, and put the run's folder back"
        raise StorageError(msg)

    def _sweep_below(self, top: str, before_s: float) -> None:
        """Sweep the folder `top` and all folders below it, the deepest first.

        Avoids recursion, and goes no deeper than valid names: thousands of nested folders would
        exhaust the stack or the open files.
        """
        todo, old = [top], list[str]()
        while todo:
            path = todo.pop()
            try:
                with self._folders(f"{path}/") as folders:
                    inside = _sweep_files(folders.last, before_s)
            except OSError:
                if path == top:
                    raise
                continue  # removed meanwhile, or a folder that this user may not read
            todo += [f"{path}/{name}" for name in inside if _is_name(f"{path}/{name}")]
            old += [f"{path}/{name}" for name, is_old in inside.items() if is_old]
        for path in reversed(old):
            above, _, name = path.rpartition("/")
            with suppress(OSError), self._folders(f"{above}/") as folders:
                os.rmdir(name, dir_fd=folders.last)  # fails, rightly, for a folder with files

    @contextmanager
    def _folders(self, name: str) -> Iterator[Folders]:
        folders = self.open_folders(name)
        try:
            yield folders
        finally:
            folders.close()

    def _make(self, name: str, action: Callable[[int], _T]) -> tuple[_T, Folders]:
        """Create the folder of `name` and run `action` in it; retry if a delete removes it."""
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
            fd = os.open(self.root, FOLDER_FLAGS)
        except FileNotFoundError:
            if not create:
                raise
            make_folder(self.root)
            fd = os.open(self.root, FOLDER_FLAGS)
        try:
            # After opening it: another user may have created the root just before us.
            if self._ownership is not None:
                self._ownership.check()
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _adopt(self, folder: int, name: str, birth: Birth) -> int:
        temporary = TEMPORARY + secrets.token_hex(8)
        try:
            birth(_inside(folder, temporary))
            fd = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                self._link(temporary, name.rpartition("/")[2], folder, name)
            except BaseException:
                os.close(fd)
                raise
        finally:
            with suppress(OSError):  # the file was not created, or the folder is gone
                os.unlink(temporary, dir_fd=folder)
        return fd

    def _link(self, temporary: str, leaf: str, folder: int, name: str) -> None:
        try:
            os.link(temporary, leaf, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            # On a network file system the answer may be lost although the link was made. The file
            # has two names in that case, and "taken" would wrongly count as a lost race.
            if os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_nlink > 1:
                return
            if error.errno in _NO_LINKS:
                msg = (
                    f"cannot publish {name} exclusively under {self.root}: the file system has "
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
                with suppress(FileNotFoundError, IsADirectoryError):  # a folder is no blob
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
            except OSError:  # not empty, or gone: a folder that stays does no harm
                return


def _obstacle(folder: str) -> int:
    """Return the errno with which creating a file in `folder` would fail; 0 if it would not."""
    if not stat.S_ISDIR(os.stat(folder).st_mode):
        return errno.ENOTDIR
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return errno.EROFS
    # For the effective user, as the kernel checks; `access` by default checks for the real one.
    return 0 if os.access(folder, os.W_OK | os.X_OK, effective_ids=True) else errno.EACCES


def _inside(folder: int, leaf: str) -> str:
    """Return a path into an open folder that stays valid if the folder is replaced."""
    return f"/proc/self/fd/{folder}/{leaf}"


def _temporary(folder: int, data: bytes, birth: Birth | None = None) -> str:
    temporary = TEMPORARY + secrets.token_hex(8)
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if birth is None:
            flags |= os.O_CREAT | os.O_EXCL
        else:
            birth(_inside(folder, temporary))
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


def _scan(folder: int, base: str, prefix: str, infos: list[BlobInfo]) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = base + entry.name
            if not name.startswith(prefix):
                continue
            try:
                check_blob_name(name)
            except StorageError:  # a temporary file, or one that Penstock did not create
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    inner = os.open(entry.name, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
                    try:
                        _scan(inner, name + "/", prefix, infos)
                    finally:
                        os.close(inner)
                else:
                    # Links and pipes, too: reading one is refused, but a checkpoint whose record
                    # was replaced by one must not look as if it never existed.
                    status = entry.stat(follow_symlinks=False)
                    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                    infos.append(BlobInfo(name, size, status.st_mtime))
            except FileNotFoundError:  # deleted during the listing
                continue


def _is_name(path: str) -> bool:
    try:
        check_blob_name(path)
    except StorageError:
        return False
    return True


def _sweep_files(folder: int, before_s: float) -> dict[str, bool]:
    """Remove old temporary files from one folder.

    Returns:
        The names of the folders inside, each with whether it is old.
    """
    inside: dict[str, bool] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # another process was faster, or this user may not remove it
                status = entry.stat(follow_symlinks=False)
                old = status.st_mtime < before_s
                if stat.S_ISDIR(status.st_mode):
                    inside[entry.name] = old
                elif old and entry.name.startswith(TEMPORARY):
                    os.unlink(entry.name, dir_fd=folder)
    return inside
