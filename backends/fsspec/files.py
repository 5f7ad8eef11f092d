"""Any file system of fsspec: what it has of paths, streams and ranges, and no more."""

from __future__ import annotations

import os
import re
import secrets
import threading
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.backends.fsspec.errors import Scrubber, explained, is_transient, place
from penstock.backends.fsspec.http_client import bounded_client
from penstock.backends.fsspec.retry import Retry
from penstock.backends.fsspec.store import Store
from penstock.backends.fsspec.streams import StreamWriter, flush
from penstock.backends.fsspec.waiting import settle
from penstock.core.abc import copy_bytes
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    CapabilityError,
    ConfigError,
    StorageError,
)
from penstock.core.types import BlobInfo, Capabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from penstock.backends.fsspec.config import FsspecConfig
    from penstock.backends.fsspec.ranges import Span
    from penstock.backends.fsspec.writer import StoreWriter

T = TypeVar("T")

_READ_ONLY = frozenset({"http", "https"})
# Stores where a put is whole or not at all, and where there are no folders to be made. A rename
# would be a copy.
_OBJECT_STORES = frozenset(
    {"gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "cos", "obs", "tos", "s3", "s3a"}
)
# Those whose `pipe_file(mode="create")` lets the store decide whether the name is free. What fsspec
# itself does for others looks first, and then puts.
_CONDITIONAL = frozenset({"gs", "gcs", "abfs", "abfss", "az"})
# Those whose `open` knows of "xb". Others refuse it, or look first and then open as with "wb".
_EXCLUSIVE = frozenset({"file", "local"})
# How file systems call the time of the last change in `info`.
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_TEMPORARY = re.compile(r"~[0-9a-f]{16}$")  # `~` cannot be part of a name of ours


class FileStore(Store):
    """Blobs are files below a folder of whatever file system fsspec has for the scheme."""

    def __init__(self, config: FsspecConfig) -> None:
        """Loads the file system's class."""
        self._scrub = Scrubber(config.secrets)
        self._fs, self._root = self._load(config)
        super().__init__(config)
        self._retry = Retry(config.attempts, config.retry_total_s)
        self._object_store = config.scheme in _OBJECT_STORES

    def find_capabilities(self) -> Capabilities:
        """Streams take bytes in order. Tries out conditional puts where there may be some."""
        exclusive, notes = self._conditional()
        return Capabilities(
            preferred_io_bytes=self.config.part_bytes,
            preferred_parallel=self.config.parallel,
            exclusive_publish=exclusive,
            ordered=True,
            outlives_process=self.config.scheme != "memory",
            notes=notes,
        )

    def writer(self, name: str, *, size_hint: int | None) -> StoreWriter:
        del size_hint
        self._check_writable("create", name)
        return StreamWriter(self, name, feeds=self.feeds)

    def fill(self, span: Span) -> None:
        data = memoryview(
            self._ask(
                "read",
                span.name,
                lambda: self._fs.cat_file(self.path(span.name), start=span.start, end=span.stop),
            )
        )
        if data.nbytes != span.stop - span.start:
            msg = (
                f"{place('read', span.name, self.url)}: bytes {span.start} to {span.stop} were "
                f"asked for, {data.nbytes} came"
            )
            if data.nbytes > span.stop - span.start:  # says nothing of what is stored
                msg += "; the store does not serve ranges of bytes: copy the run, or use another"
                raise StorageError(msg)
            raise BlobTruncatedError(msg)
        for piece in span.pieces:
            at = piece.offset - span.start
            copy_bytes(piece.target, data[at : at + piece.target.nbytes])

    def read_record(self, name: str, *, limit_bytes: int) -> bytes | int:
        size = self.stat(name).size_bytes
        if size > limit_bytes:
            return size
        # What that tells and what comes are two answers. Object stores are asked for all of it: not
        # each of them serves a range that ends behind the end.
        part = {} if self._object_store else {"start": 0, "end": limit_bytes + 1}
        data = self._ask("read", name, lambda: self._fs.cat_file(self.path(name), **part))
        return bytes(data) if len(data) <= limit_bytes else len(data)

    def publish(self, name: str, data: bytes, *, exclusive: bool) -> None:
        self._check_writable("publish", name)
        if exclusive and self.capabilities.exclusive_publish:
            self._publish_if_absent(name, data)
            return
        if exclusive:
            self.refuse_taken("publish", name)
        path = self.path(name)
        with self.explained("publish", name):
            self.make_parent(path)
            if not self._renames:
                self._fs.pipe_file(path, bytes(data))
                return
            temporary = f"{path}~{secrets.token_hex(8)}"
            try:
                with self._fs.open(temporary, "wb") as stream:
                    stream.write(data)
                    flush(stream)
                self._fs.mv(temporary, path)
            except BaseException:
                with suppress(Exception):
                    self._fs.rm_file(temporary)
                raise

    def list(self, prefix: str) -> Sequence[BlobInfo]:
        return [info for info in self._find(prefix) if not _TEMPORARY.search(info.name)]

    def stat(self, name: str) -> BlobInfo:
        path = self.path(name)
        info = self._ask("stat", name, lambda: self._fs.info(path))
        if info.get("type") == "directory":
            msg = f"{place('stat', name, self.url)}: a folder of that name stands there"
            raise BlobNotFoundError(msg)
        return self._info(name, info)

    def delete(self, names: Sequence[str]) -> None:
        self._check_writable("delete", names[0] if names else "")
        settle([self.transfers.submit(partial(self._delete, name)) for name in names])

    def sweep(self, before_s: float) -> None:
        """Remove temporary records that nobody renamed."""
        for info in self._find(""):
            if _TEMPORARY.search(info.name) and info.modified_s < before_s:
                self._delete(info.name)

    # -- for writers ----------------------------------------------------------------------------

    def open_stream(self, name: str) -> Any:
        """A stream into a new blob."""
        with self.explained("create", name):
            path = self.path(name)
            self.make_parent(path)
            return self._fs.open(path, self._creates, block_size=self.config.part_bytes)

    def rewrite(self, name: str, length: int) -> None:
        """Cut a blob that is stored already, by writing it again.

        Raises:
            StorageError: It is too long to be held in memory for that.
        """
        if length > self.config.part_bytes:
            msg = f"{place('seal', name, self.url)}: it cannot be cut to {length} bytes any more"
            raise StorageError(msg)
        path = self.path(name)
        with self.explained("seal", name):
            data = self._fs.cat_file(path, start=0, end=length)
            self._fs.pipe_file(path, bytes(data))

    def remove(self, name: str) -> None:
        """Remove what an abort leaves, if it can be removed."""
        with suppress(Exception):
            self._fs.rm_file(self.path(name))

    def holds(self, name: str, stream: Any) -> bool:
        """Whether the file of that name is known to be the one that `stream` has open.

        Of most stores nobody knows it: the name is the only thing that they tell of a blob.
        """
        path = self.path(name)
        with suppress(OSError, AttributeError, ValueError):
            there = os.stat(path, follow_symlinks=False)
            return os.path.samestat(os.fstat(stream.fileno()), there)
        held = getattr(self._fs, "store", None)  # of a file system in memory
        return isinstance(held, dict) and held.get(path) is stream

    def make_parent(self, path: str) -> None:
        """Make the folder of `path`, where there are folders."""
        if not self._object_store:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def path(self, name: str) -> str:
        """Where a blob is, in the file system's own words."""
        return f"{self._root}/{name}" if name else self._root

    def explained(self, what: str, name: str) -> AbstractContextManager[None]:
        """Errors from inside become ours."""
        return explained(what, name, url=self.url, scrub=self._scrub)

    # -- below ----------------------------------------------------------------------------------

    def _conditional(self) -> tuple[bool, tuple[str, ...]]:
        """Whether the store decides between two publishers, and what to say of it."""
        if self._read_only:
            return False, ("a store that can only be read",)
        wanted = self.config.conditional_put
        if wanted != "auto" or self.config.scheme not in _CONDITIONAL:
            return wanted == "yes" and self.config.scheme in _CONDITIONAL, ()
        probe = f"clock/{secrets.token_hex(8)}"  # where `prune` looks for what was left behind
        try:
            self._put_if_absent(probe, b"1")
        except StorageError as error:
            return False, (f"conditional puts could not be tried out: {error}",)
        try:
            self._put_if_absent(probe, b"2")
        except BlobExistsError:
            return True, ()
        except StorageError as error:
            return False, (f"conditional puts do not work: {error}",)
        finally:
            self.remove(probe)
        return False, ("the store puts in spite of its condition, so one saver per root",)

    def _publish_if_absent(self, name: str, data: bytes) -> None:
        try:
            self._put_if_absent(name, data)
        except BlobExistsError as error:
            # These file systems try again by themselves, also what had succeeded.
            found: bytes | int
            try:
                found = self.read_record(name, limit_bytes=len(data))
            except BlobNotFoundError:
                found = b""  # another's, deleted since
            except StorageError:
                found = data  # it may be: "taken" would be believed
            if found != data:
                raise
            msg = (
                f"{place('publish', name, self.url)}: unknown outcome. The name is taken, perhaps "
                "by this very record after a lost answer: read it to learn whose it is"
            )
            raise StorageError(msg) from error

    def _put_if_absent(self, name: str, data: bytes) -> None:
        with self.explained("publish", name):
            self._fs.pipe_file(self.path(name), bytes(data), mode="create")

    @property
    def _read_only(self) -> bool:
        return self.config.scheme in _READ_ONLY

    @property
    def _creates(self) -> str:
        """How a new blob is opened: where possible so that another's of its name is not emptied."""
        return "xb" if self.config.scheme in _EXCLUSIVE else "wb"

    @cached_property
    def _renames(self) -> bool:
        """Whether there is a rename; the one that fsspec puts in its place is copy and delete."""
        if self._object_store:
            return False
        from fsspec import AbstractFileSystem  # noqa: PLC0415 - 80 ms

        return type(self._fs).mv is not AbstractFileSystem.mv

    def _load(self, config: FsspecConfig) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415 - 80 ms

            with explained("open", "", url=config.shown_url, scrub=self._scrub):
                # Listings would be remembered, and instances shared with the user's own.
                options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
                if config.scheme in _READ_ONLY:
                    guard = bool(config.options.get("headers"))
                    options["get_client"] = partial(bounded_client, guard_headers=guard)
                fs, root = url_to_fs(config.url, **{**options, **config.options})
        except StorageError as error:
            cause = error.__cause__
            if isinstance(cause, ImportError):
                module = getattr(cause.__cause__, "name", None) or getattr(cause, "name", None)
                missing = f" ({module.partition('.')[0]} is not installed)" if module else ""
                msg = (
                    f"{config.shown_url}: fsspec needs another package for {config.scheme}://: "
                    f"{cause}{missing}"
                )
                raise ConfigError(msg) from error
            if isinstance(cause, (TypeError, ValueError)):
                msg = f"{config.shown_url}: fsspec does not take it: {self._scrub(str(cause))}"
                raise ConfigError(msg) from error
            raise
        return fs, str(root).rstrip("/")

    def _check_writable(self, what: str, name: str) -> None:
        if self._read_only:
            msg = (
                f"{place(what, name, self.url)}: {self.config.scheme} can only be read; save to "
                "another store"
            )
            raise CapabilityError(msg)

    def _ask(self, what: str, name: str, operation: Callable[[], T]) -> T:
        """An operation that changes nothing, so may be repeated."""
        with self.explained(what, name):
            return self._retry.run(operation, transient=is_transient, stop=threading.Event())

    def _find(self, prefix: str) -> Iterator[BlobInfo]:
        folder = self.path(prefix.rpartition("/")[0])

        def find() -> dict[str, Any]:
            self._fs.invalidate_cache()
            return self._walk(folder)

        for path, info in self._ask("list", prefix, find).items():
            if path.startswith(f"{self._root}/"):
                name = path[len(self._root) + 1 :]
                if name.startswith(prefix) and info.get("type") != "directory":
                    yield self._info(name, info)

    def _walk(self, top: str) -> dict[str, Any]:
        """All files below `top`, by path; nothing where that is no folder.

        Not fsspec's `find`: most file systems inherit one that takes a folder whose listing fails,
        be it for a broken connection, for an empty one. A commit record that is not listed is a
        checkpoint that is not there, whose data `prune` deletes.
        """
        found: dict[str, Any] = {}
        folders = [top]
        while folders:
            folder = folders.pop()
            try:
                entries = self._fs.ls(folder, detail=True)
            except (FileNotFoundError, NotADirectoryError):  # or deleted since
                continue
            for info in entries:
                path = info["name"].rstrip("/")
                if info.get("type") != "directory":
                    found[path] = info
                elif path.startswith(f"{folder.rstrip('/')}/"):  # not itself, nor one above
                    folders.append(path)
        return found

    def _info(self, name: str, info: dict[str, Any]) -> BlobInfo:
        size = info.get("size")
        if size is None:  # a page of links tells none
            full = self._ask("stat", name, lambda: self._fs.info(self.path(name)))
            size = full.get("size")
        if size is None:
            msg = f"{place('stat', name, self.url)}: the store does not tell its size"
            raise StorageError(msg)
        return BlobInfo(name, int(size), self._time(name, info))

    def _time(self, name: str, info: dict[str, Any]) -> float:
        told = next((info[key] for key in _TIMES if info.get(key) is not None), None)
        if isinstance(told, str):
            told = datetime.fromisoformat(told)
        if isinstance(told, datetime):
            return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
        if isinstance(told, (int, float)):
            return float(told)
        if self._read_only:
            return 0.0  # only what may be deleted needs a time
        msg = f"{place('stat', name, self.url)}: the store does not tell when it was changed"
        raise StorageError(msg)

    def _delete(self, name: str) -> None:
        # A folder is no blob: none of that name is there.
        mapped = self.explained("delete", name)
        with suppress(BlobNotFoundError), mapped, suppress(IsADirectoryError):
            self._fs.rm_file(self.path(name))
