"""The store for fsspec's file systems, which uses only their paths, streams and ranges.

fsspec's HTTP file system reads answers of any length, and follows redirects to any host with the
headers of the user's options. So this module gives it a client that limits the length of answers
and sends headers to one origin only.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import weakref
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.backends.fsspec.blob_states import StoreWriter, settle
from penstock.backends.fsspec.messages import (
    RefusedAnswerError,
    Scrubber,
    explained,
    is_transient,
    place,
)
from penstock.backends.fsspec.store import Retry, Store
from penstock.core.abc import copy_bytes
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    CapabilityError,
    ConfigError,
    StorageError,
)
from penstock.core.types import BlobInfo, Capabilities, flat_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from aiohttp import ClientResponse, ClientSession

    from penstock.backends.fsspec.blob_states import Batch
    from penstock.backends.fsspec.config import FsspecConfig
    from penstock.backends.fsspec.store import Span
    from penstock.core.types import WriteRequest

T = TypeVar("T")

_READ_ONLY = frozenset({"http", "https"})
# Stores without folders that put a whole object or nothing. Their rename is a copy.
_OBJECT_STORES = frozenset(
    {"gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "cos", "obs", "tos", "s3", "s3a"}
)
# File systems whose `pipe_file(mode="create")` leaves the decision to the store. For all others
# fsspec itself checks that the name is free, and then puts, so two savers may both win.
_CONDITIONAL = frozenset({"gs", "gcs", "abfs", "abfss", "az"})
# File systems whose `open` supports "xb". Others refuse it, or check the name and then open "wb".
_EXCLUSIVE = frozenset({"file", "local"})
# Names of the time of the last change in the `info` of file systems.
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_TEMPORARY = re.compile(r"~[0-9a-f]{16}$")  # no name of ours has a `~`
# Texts that web servers put on a page that lists a folder, even an empty one.
_LISTING = re.compile(
    rb"index of|directory listing|parent directory|href=[\"']?\.\./?[\"' >]", re.IGNORECASE
)
_ENTRY = re.compile(r"/*[A-Za-z0-9][A-Za-z0-9._-]*/?")
_ZEROS = memoryview(bytes(1 << 20))

_PAGE_BYTES = 64 << 20  # the largest page of links to files
_REFUSAL_BYTES = 1 << 20
_ERROR = 400
_RANGE = re.compile(r"bytes=(\d+)-(\d+)", re.ASCII)


async def bounded_client(**options: Any) -> ClientSession:
    """Return a session that refuses answers longer than the requested range.

    If the user sets headers, the session also refuses redirects to another origin: aiohttp would
    send all headers there, except a few that it knows to be credentials.
    """
    import aiohttp  # noqa: PLC0415 - an extra

    guarded = bool(options.pop("guard_headers", False) or options.get("headers"))
    tracing = aiohttp.TraceConfig()
    if guarded:
        tracing.on_request_redirect.append(_check_redirect)
    options["trace_configs"] = [*(options.get("trace_configs") or ()), tracing]
    return aiohttp.ClientSession(**{"response_class": _bounded_response(), **options})


class FileStore(Store):
    """Keeps blobs as files under a folder of the fsspec file system for the URL's scheme."""

    def __init__(self, config: FsspecConfig) -> None:
        """Load the file system's class.

        Raises:
            ConfigError: fsspec lacks a package for the scheme, or refuses the options.
        """
        self._scrub = Scrubber(config.secrets)
        self._fs, self._root = _load(config, self._scrub)
        super().__init__(config)
        self._retry = Retry(config.attempts, config.retry_total_s)
        self._read_only = config.scheme in _READ_ONLY
        self._object_store = config.scheme in _OBJECT_STORES

    def find_capabilities(self) -> Capabilities:
        exclusive, notes = False, tuple[str, ...]()
        if self._read_only:
            notes = ("a store that can only be read",)
        elif self.config.scheme in _CONDITIONAL:
            exclusive = self.config.conditional_put == "yes"
            if self.config.conditional_put == "auto":
                exclusive, notes = self.probe_conditional_puts()
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
        return StreamWriter(self, name)

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
                f"{place('read', span.name, self.url)}: requested bytes {span.start} to "
                f"{span.stop}, got {data.nbytes}"
            )
            if data.nbytes > span.stop - span.start:
                # Not damage: the store ignored the range, so nothing is known of the blob.
                msg += (
                    "; the store does not serve byte ranges: copy the run's files to a store that "
                    "does, and read the run there"
                )
                raise StorageError(msg)
            raise BlobTruncatedError(msg)
        for piece in span.pieces:
            at = piece.offset - span.start
            copy_bytes(piece.target, data[at : at + piece.target.nbytes])

    def read_record(self, name: str, *, limit_bytes: int) -> bytes | int:
        size = self.stat(name).size_bytes
        if size > limit_bytes:
            return size
        # The record may be replaced by a longer one after `stat`, so the read is bounded, too.
        # Object stores return all of it: some refuse a range that ends after the end.
        part = {} if self._object_store else {"start": 0, "end": limit_bytes + 1}
        data = self._ask("read", name, lambda: self._fs.cat_file(self.path(name), **part))
        return bytes(data) if len(data) <= limit_bytes else len(data)

    def publish(self, name: str, data: bytes, *, exclusive: bool) -> None:
        self._check_writable("publish", name)  # before any request to the store
        super().publish(name, data, exclusive=exclusive)

    def put(self, name: str, data: bytes) -> None:
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
                    _flush(stream)
                self._fs.mv(temporary, path)
            except BaseException:
                with suppress(Exception):
                    self._fs.rm_file(temporary)
                raise

    def put_if_absent(self, name: str, data: bytes) -> None:
        try:
            with self.explained("publish", name):
                self._fs.pipe_file(self.path(name), bytes(data), mode="create")
        except BlobExistsError as error:
            # The client of the file system retries even a put that has succeeded. So the name may
            # be taken by this very record.
            record: bytes | int
            try:
                record = self.read_record(name, limit_bytes=len(data))
            except BlobNotFoundError:
                record = b""  # the name was another saver's record, deleted since
            except StorageError:
                record = data  # unknown: if this reported "taken", a save would believe it had lost
            if record != data:
                raise
            msg = (
                f"{place('publish', name, self.url)}: unknown outcome. The name is taken, perhaps "
                "by this record if an answer was lost: read the record to find out"
            )
            raise StorageError(msg) from error

    def list(self, prefix: str) -> Sequence[BlobInfo]:
        return [info for info in self._find(prefix) if not _TEMPORARY.search(info.name)]

    def stat(self, name: str) -> BlobInfo:
        path = self.path(name)
        info = self._ask("stat", name, lambda: self._fs.info(path))
        if info.get("type") == "directory":
            msg = f"{place('stat', name, self.url)}: there is a folder of that name"
            raise BlobNotFoundError(msg)
        return self._info(name, info)

    def delete(self, names: Sequence[str]) -> None:
        self._check_writable("delete", names[0] if names else "")
        settle([self.transfers.submit(partial(self._delete, name)) for name in names])

    def sweep(self, before_s: float) -> None:
        """Remove temporary records that were never renamed."""
        for info in self._find(""):
            if _TEMPORARY.search(info.name) and info.modified_s < before_s:
                self._delete(info.name)

    def close(self) -> None:
        super().close()
        session = getattr(self._fs, "_session", None)
        if self._read_only and session is not None:
            # Otherwise its connections stay open until the file system is garbage-collected.
            self._fs.close_session(self._fs.loop, session)

    # -- for writers ----------------------------------------------------------------------------

    def open_stream(self, name: str) -> Any:
        """Open a stream into a new blob."""
        with self.explained("create", name):
            path = self.path(name)
            self.make_parent(path)
            # "xb" where it is known, so that another saver's blob of that name is not emptied.
            mode = "xb" if self.config.scheme in _EXCLUSIVE else "wb"
            return self._fs.open(path, mode, block_size=self.config.part_bytes)

    def rewrite(self, name: str, length: int) -> None:
        """Truncate a stored blob by rewriting it.

        Raises:
            StorageError: The blob is too long to rewrite in memory.
        """
        if length > self.config.part_bytes:
            msg = (
                f"{place('seal', name, self.url)}: the store cannot truncate it to {length} bytes, "
                "and a rewrite is limited to part_bytes: raise part_bytes, or use another store"
            )
            raise StorageError(msg)
        path = self.path(name)
        with self.explained("seal", name):
            data = self._fs.cat_file(path, start=0, end=length)
            self._fs.pipe_file(path, bytes(data))

    def remove(self, name: str) -> None:
        """Try to remove a file; never raises."""
        with suppress(Exception):
            self._fs.rm_file(self.path(name))

    def holds(self, name: str, stream: Any) -> bool:
        """Return whether the blob of that name is known to be the open file of `stream`.

        Returns False for most stores, since they identify a blob only by its name.
        """
        path = self.path(name)
        with suppress(OSError, AttributeError, ValueError):
            status = os.stat(path, follow_symlinks=False)
            return os.path.samestat(os.fstat(stream.fileno()), status)
        files = getattr(self._fs, "store", None)  # of a file system in memory
        return isinstance(files, dict) and files.get(path) is stream

    def make_parent(self, path: str) -> None:
        """Create the folder of `path`, unless the store has no folders."""
        if not self._object_store:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def path(self, name: str) -> str:
        """Return the path of a blob in the file system; the root's path for an empty name."""
        return f"{self._root}/{name}" if name else self._root

    def explained(self, what: str, name: str) -> AbstractContextManager[None]:
        """Convert errors in the block to Penstock's errors."""
        return explained(what, name, url=self.url, scrub=self._scrub)

    # -- below ----------------------------------------------------------------------------------

    @cached_property
    def _renames(self) -> bool:
        """Whether `mv` really renames; fsspec's default `mv` copies and deletes."""
        if self._object_store:
            return False
        from fsspec import AbstractFileSystem  # noqa: PLC0415 - 80 ms

        return type(self._fs).mv is not AbstractFileSystem.mv

    def _check_writable(self, what: str, name: str) -> None:
        if self._read_only:
            msg = (
                f"{place(what, name, self.url)}: {self.config.scheme} can only be read; save to "
                "another store"
            )
            raise CapabilityError(msg)

    def _ask(self, what: str, name: str, operation: Callable[[], T]) -> T:
        """Run a read-only operation, with retries."""
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
        """Return all files below `top`, by path; empty if `top` is not a folder.

        fsspec's `find` is unsafe here: most file systems treat a folder as empty if its listing
        fails, even after a network error. A checkpoint with an unlisted commit record would seem
        not to exist, and `prune` would delete its data.
        """
        files: dict[str, Any] = {}
        folders = [top]
        while folders:
            folder = folders.pop()
            try:
                entries = self._fs.ls(folder, detail=True)
                if self._read_only:
                    self._check_is_listing(folder, entries)
            except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile, for example
                continue
            for info in entries:
                path = info["name"].rstrip("/")
                if info.get("type") != "directory":
                    files[path] = info
                elif path.startswith(f"{folder.rstrip('/')}/"):
                    # A page of links also names the folder itself and its parent: to follow these
                    # links would never end.
                    folders.append(path)
        return files

    def _check_is_listing(self, folder: str, entries: Sequence[dict[str, Any]]) -> None:
        """Refuse a page that only looks like an empty folder, such as a gateway's login page.

        fsspec parses any HTTP answer as a listing, and reads only its links. A run that seems to
        have no checkpoints would start from scratch.
        """
        if any(_ENTRY.fullmatch(entry["name"], len(folder)) for entry in entries):
            return
        if not _LISTING.search(self._fs.cat_file(folder)):
            msg = (
                "the server answers, but not with a page that lists files: is it behind a "
                "gateway? It must show folders as pages of links."
            )
            raise RefusedAnswerError(msg)

    def _info(self, name: str, info: dict[str, Any]) -> BlobInfo:
        size = info.get("size")
        if size is None:  # a page of links shows no sizes
            full = self._ask("stat", name, lambda: self._fs.info(self.path(name)))
            size = full.get("size")
        if size is None:
            msg = f"{place('stat', name, self.url)}: the store reports no size"
            raise StorageError(msg)
        changed_s = _time_s(info)
        if changed_s is None and not self._read_only:  # times only decide on deletions
            msg = f"{place('stat', name, self.url)}: the store reports no time of the last change"
            raise StorageError(msg)
        return BlobInfo(name, int(size), changed_s or 0.0)

    def _delete(self, name: str) -> None:
        # A folder is no blob, so a blob of that name does not exist.
        mapped = self.explained("delete", name)
        with suppress(BlobNotFoundError), mapped, suppress(IsADirectoryError):
            self._fs.rm_file(self.path(name))


def _load(config: FsspecConfig, scrub: Scrubber) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - 80 ms

        with explained("open", "", url=config.shown_url, scrub=scrub):
            # By default fsspec caches listings, and shares instances with the user's own code.
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
            msg = f"{config.shown_url}: fsspec refuses the URL or `options`: {scrub(str(cause))}"
            raise ConfigError(msg) from error
        raise
    return fs, str(root).rstrip("/")


def _time_s(info: dict[str, Any]) -> float | None:
    """Return the modification time; None if the store does not report it."""
    time = next((info[key] for key in _TIMES if info.get(key) is not None), None)
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    if isinstance(time, datetime):
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return float(time) if isinstance(time, (int, float)) else None


class StreamWriter(StoreWriter):
    """Appends to a stream, opened on first use. Fills gaps with zeros.

    If the stream cannot be truncated, `seal` rewrites the blob, or fails if more than `part_bytes`
    would remain. Closing the stream makes the blob durable; if the stream has a file descriptor,
    `seal` syncs it first.
    """

    _store: FileStore

    def __init__(self, store: FileStore, name: str) -> None:
        super().__init__(store, name)
        self._stream: Any = None
        self._position = 0

    def _take(self, request: WriteRequest, batch: Batch) -> None:
        del batch  # the stream owns the bytes when this returns
        if not request.length:
            return
        if request.offset < self._position:
            msg = (
                f"{self._where('write')}: offset {request.offset} comes too late: the stream is "
                f"at {self._position}; offsets must ascend from call to call"
            )
            raise StorageError(msg)
        self._open()
        with self._store.explained("write", self.name):
            self._advance(request.offset)
            for buffer in request.buffers:
                self._send(flat_view(buffer))

    def _finish(self, length: int) -> None:
        self._open()
        with self._store.explained("seal", self.name):
            self._advance(length)
            cut = length < self._position and not _truncate(self._stream, length)
            _flush(self._stream)
            self._stream.close()
        if cut:
            self._store.rewrite(self.name, length)

    def _give_up(self) -> None:
        if self._stream is None:
            return
        # If this process was suspended, another saver may have taken over the name. So the file is
        # removed only if it is known to be the open file, and before the stream is closed. `delete`
        # and `prune` remove all other files.
        if self._store.holds(self.name, self._stream):
            self._store.remove(self.name)
        with suppress(Exception):
            self._stream.discard()
        if _stores_on_close(self._stream):
            _disable_close(self._stream)
        with suppress(Exception):
            self._stream.close()

    def _open(self) -> None:
        if self._stream is None:
            self._stream = self._store.open_stream(self.name)
            # The `__del__` of an abandoned stream would store its bytes over a blob that another
            # saver may have put there since. The finalizer also keeps the stream alive as long as
            # the writer: otherwise, if both are garbage, the stream may be freed first.
            weakref.finalize(self, _disable_close, self._stream)

    def _advance(self, offset: int) -> None:
        while self._position < offset:
            self._send(_ZEROS[: offset - self._position])

    def _send(self, view: memoryview) -> None:
        while view.nbytes:
            count = self._stream.write(view)
            # Raw streams may write only a part of the bytes; some other streams return None.
            count = view.nbytes if count is None else count
            self._position += count
            view = view[count:]


def _disable_close(stream: Any) -> None:
    """Mark a stream as closed without calling the store, since such a call may hang.

    The store drops an unfinished upload automatically.
    """
    with suppress(Exception):
        stream.closed = True


def _stores_on_close(stream: Any) -> bool:
    """Return whether `close` stores the written bytes, replacing any blob of that name."""
    from fsspec.spec import AbstractBufferedFile  # noqa: PLC0415 - 80 ms; loaded with the stream

    return isinstance(stream, AbstractBufferedFile)


def _flush(stream: Any) -> None:
    """Flush a stream, and sync it if it has a file descriptor; `close` makes others durable."""
    stream.flush()
    try:
        number = stream.fileno()
    except (AttributeError, OSError):
        return
    os.fsync(number)


def _truncate(stream: Any, length: int) -> bool:
    try:
        stream.truncate(length)
    except (AttributeError, NotImplementedError, OSError, ValueError):
        return False
    return True


@cache
def _bounded_response() -> type[ClientResponse]:
    import aiohttp  # noqa: PLC0415 - an extra

    class BoundedResponse(aiohttp.ClientResponse):
        async def read(self) -> bytes:  # fsspec calls it for every body
            if self._body is None:
                try:
                    self._body = await self._read_bounded(_limit_bytes(self))
                except BaseException:
                    self.close()
                    raise
            return self._body

        async def _read_bounded(self, limit: int) -> bytes:
            pieces: list[bytes] = []
            size = 0
            while piece := await self.content.readany():
                size += len(piece)
                if size > limit:
                    msg = (
                        f"{self.url.host} sends more than the {limit:,} requested bytes: it does "
                        "not serve byte ranges, or is not a store. Check the URL, or copy the "
                        "run's files to a store that serves ranges, and read the run there"
                    )
                    raise RefusedAnswerError(msg)
                pieces.append(piece)
            return b"".join(pieces)

    return BoundedResponse


def _limit_bytes(answer: ClientResponse) -> int:
    """Return the maximum size of an answer's body for its status and the requested range."""
    if answer.status >= _ERROR:
        return _REFUSAL_BYTES
    bounds = _RANGE.fullmatch(answer.request_info.headers.get("Range", ""))
    if bounds is None:
        return _PAGE_BYTES
    return int(bounds[2]) - int(bounds[1]) + 1


async def _check_redirect(_session: object, _context: object, params: Any) -> None:
    target = params.url.join(type(params.url)(params.response.headers.get("Location", "")))
    if target.origin() != params.url.origin():
        params.response.close()
        msg = (
            f"{params.url.host} redirects to {target.host}, which would get the headers of "
            "`options`, and their secrets; give the URL of the target"
        )
        raise RefusedAnswerError(msg)
