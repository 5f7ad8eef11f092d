"""The `sqlite` backend: a run in one SQLite file.

Every call is one transaction, so a crash leaves all of it or nothing. Bytes are in rows of
`PIECE_BYTES`, which are filled in place: no call holds more than a piece of a blob in memory.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from penstock.core.abc import Backend, BlobWriter, PluginConfig, check_blob_name
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    FormatError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
)
from penstock.core.types import BlobInfo, Capabilities, flat_view
from pydantic import Field

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.types import ReadRequest, WriteRequest

PIECE_BYTES = 1 << 20

# Large pages: fewer links to follow inside a piece.
# AUTOINCREMENT, so that no number is reused: a late `abort` removes its own blob by number, and not
# the blob of the process that took over the name.
_SCHEMA = """
PRAGMA page_size = 65536;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS blobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    size INTEGER NOT NULL,
    modified REAL NOT NULL,
    sealed INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS pieces (
    id INTEGER PRIMARY KEY,
    blob INTEGER NOT NULL,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (blob, number)
);
"""


class SqliteConfig(PluginConfig):
    """Options of the `sqlite` backend.

    Attributes:
        path: The file; created, with its folders, if it is missing.
        timeout_s: How long a call waits for another process to finish writing.
    """

    path: str = Field(min_length=1)
    timeout_s: float = Field(default=60.0, gt=0)


class SqliteBackend(Backend):
    """Blobs and records in one SQLite file.

    `publish` and `seal` are durable: the write-ahead log is synced with each transaction.
    """

    api_version: ClassVar[int] = 1
    name: ClassVar[str] = "sqlite"
    Config: ClassVar[type[PluginConfig]] = SqliteConfig

    def __init__(self, config: SqliteConfig, /) -> None:
        """Open the file, or create it."""
        self._path = Path(config.path).absolute()
        self._lock = threading.RLock()  # guards `_db`: one connection serves one call at a time
        self._db: sqlite3.Connection | None = None
        with self._mapped("open", str(self._path)):
            _make_folder(self._path.parent)
            self._db = sqlite3.connect(
                self._path,
                timeout=config.timeout_s,
                isolation_level=None,  # we begin transactions ourselves
                check_same_thread=False,
            )
            try:
                self._prepare(config.timeout_s)
                # SQLite syncs the folder after it creates a log, but not after the file.
                _sync_folder(self._path.parent)
            except BaseException:
                self._db.close()
                raise

    def _prepare(self, timeout_s: float) -> None:
        """Create the tables, with retries: SQLite's timeout does not cover `journal_mode`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self._db.executescript(_SCHEMA)
            except sqlite3.OperationalError as error:
                code = error.sqlite_errorcode & 0xFF
                if code != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline_s:
                    raise
                time.sleep(0.02)
            else:
                return

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Options for `sqlite:///absolute/run.db` or `sqlite://relative/run.db`."""
        return cls.Config.model_validate({**options, "path": url.partition("://")[2]})

    @property
    def url(self) -> str:
        return f"sqlite://{self._path}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(preferred_io_bytes=PIECE_BYTES, preferred_parallel=1, local=True)

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        del size_hint
        check_blob_name(name)
        with self.transaction("create", name) as db:
            return _SqliteWriter(self, name, _insert(db, name, 0, sealed=False))

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        for request in requests:
            check_blob_name(request.name)
        with self.transaction("read", "a batch", writing=False) as db:
            for request in requests:
                target = flat_view(request.target)
                blob, size, _ = self._find(db, request.name)
                if request.offset + target.nbytes > size:
                    msg = (
                        f"cannot read {target.nbytes} bytes at {request.offset} of "
                        f"{request.name} on {self.url}: it ends at {size}"
                    )
                    raise BlobTruncatedError(msg)
                _read_pieces(db, blob, request.offset, target)

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        check_blob_name(name)
        # One transaction: between two, another process may replace the record.
        with self.transaction("read", name, writing=False) as db:
            blob, size, _ = self._find(db, name)
            if size > limit_bytes:
                msg = f"{name} on {self.url} has {size} bytes, more than {limit_bytes} allowed"
                raise FormatError(msg, [name])
            data = bytearray(size)
            _read_pieces(db, blob, 0, memoryview(data))
            return bytes(data)

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        check_blob_name(name)
        with self.transaction("publish", name) as db:
            if not exclusive:
                _remove(db, name)
            blob = _insert(db, name, len(data), sealed=True)
            for number, start in enumerate(range(0, len(data), PIECE_BYTES)):
                # As long as the data: whole pieces would cost a megabyte for each record.
                row = (blob, number, data[start : start + PIECE_BYTES])
                db.execute("INSERT INTO pieces (blob, number, data) VALUES (?, ?, ?)", row)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        check_blob_name(prefix, prefix=True)
        # Unfinished blobs too: a crash leaves them behind, and `prune` deletes only listed blobs.
        query = "SELECT name, size, modified FROM blobs WHERE name >= ? AND name < ? ORDER BY name"
        with self.transaction("list", prefix, writing=False) as db:
            rows = db.execute(query, (prefix, prefix + "\x7f"))  # above any character of a name
            return [BlobInfo(*row) for row in rows]

    def stat(self, name: str, /) -> BlobInfo:
        check_blob_name(name)
        with self.transaction("stat", name, writing=False) as db:
            _, size, modified = self._find(db, name)
            return BlobInfo(name, size, modified)

    def delete(self, names: Sequence[str], /) -> None:
        for name in names:
            check_blob_name(name)
        # All or none, so any order is kept.
        with self.transaction("delete", ", ".join(names[:3])) as db:
            for name in names:
                _remove(db, name)

    def store_time_s(self) -> float:
        """Return the time by this machine's clock, which also sets `modified`."""
        self._check_open()
        return time.time()

    def close(self) -> None:
        super().close()
        with self._lock:
            db, self._db = self._db, None
            if db is not None:
                db.close()

    @contextmanager
    def transaction(
        self, what: str, name: str, *, writing: bool = True
    ) -> Iterator[sqlite3.Connection]:
        """Run one transaction: durable when the block ends, rolled back if it raises."""
        with self._lock:
            db = self._check_open()
            with self._mapped(what, name):
                db.execute("BEGIN IMMEDIATE" if writing else "BEGIN")
                try:
                    yield db
                    db.execute("COMMIT")
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")

    def _check_open(self) -> sqlite3.Connection:
        if self._db is None:
            msg = f"the backend {self.url} is closed"
            raise StorageError(msg)
        return self._db

    def _find(self, db: sqlite3.Connection, name: str) -> tuple[int, int, float]:
        query = "SELECT id, size, modified FROM blobs WHERE name = ? AND sealed"
        row: tuple[int, int, float] | None = db.execute(query, (name,)).fetchone()
        if row is None:
            msg = f"{name} is not on {self.url}"
            raise BlobNotFoundError(msg)
        return row

    @contextmanager
    def _mapped(self, what: str, name: str) -> Iterator[None]:
        """Map SQLite's errors to ours, in one place."""
        try:
            yield
        except OSError as error:
            msg = f"cannot {what} {name} on {self.url}: {error.strerror}"
            raise StorageError(msg) from error
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            msg = f"cannot {what} {name} on {self.url}: {error}"
            if code == sqlite3.SQLITE_CONSTRAINT:
                msg = f"cannot {what} {name} on {self.url}: the name is taken"
                raise BlobExistsError(msg) from error
            if code == sqlite3.SQLITE_FULL:
                msg = f"{msg}; free some space and save again"
                raise StorageFullError(msg) from error
            if code == sqlite3.SQLITE_BUSY:
                msg = f"{msg}; another process holds it: raise timeout_s"
                raise StorageTimeoutError(msg) from error
            raise StorageError(msg) from error


class _SqliteWriter(BlobWriter):
    def __init__(self, backend: SqliteBackend, name: str, blob: int) -> None:
        self._backend = backend
        self._name = name
        self._blob = blob
        self._open = True  # guarded by the backend's lock, inside its transactions

    def write(self, requests: Sequence[WriteRequest], /) -> None:
        with self._backend.transaction("write", self._name) as db:
            self._check_open("write")
            stop = 0
            for request in requests:
                stop = request.offset
                for buffer in request.buffers:
                    stop = _write_pieces(db, self._blob, stop, flat_view(buffer))
            self._update(db, "size = max(size, ?)", stop)

    def seal(self, length: int, /) -> None:
        with self._backend.transaction("seal", self._name) as db:
            self._check_open("seal")
            last, rest = divmod(length, PIECE_BYTES)
            db.execute("DELETE FROM pieces WHERE blob = ? AND number > ?", (self._blob, last))
            db.execute(
                "UPDATE pieces SET data = substr(data, 1, ?) WHERE blob = ? AND number = ?",
                (rest, self._blob, last),
            )
            self._update(db, "sealed = 1, size = ?", length)
        self._open = False

    def abort(self) -> None:
        if not self._open:
            return
        # Never raises: a blob that cannot be removed stays listed, and is deleted with its save.
        with suppress(StorageError), self._backend.transaction("abort", self._name) as db:
            self._open = False
            db.execute("DELETE FROM blobs WHERE id = ? AND NOT sealed", (self._blob,))
            db.execute("DELETE FROM pieces WHERE blob = ?", (self._blob,))
        self._open = False

    def _check_open(self, what: str) -> None:
        if not self._open:
            msg = f"cannot {what} {self._name} on {self._backend.url}: it is already finished"
            raise StorageError(msg)

    def _update(self, db: sqlite3.Connection, change: str, value: int) -> None:
        cursor = db.execute(
            f"UPDATE blobs SET {change}, modified = ? WHERE id = ?",
            (value, time.time(), self._blob),
        )
        if not cursor.rowcount:
            msg = f"{self._name} was deleted from {self._backend.url} while it was written"
            raise StorageError(msg)


def _insert(db: sqlite3.Connection, name: str, size: int, *, sealed: bool) -> int:
    """Insert a new row; the unique name makes `create` and exclusive publish exclusive."""
    row = db.execute(
        "INSERT INTO blobs (name, size, modified, sealed) VALUES (?, ?, ?, ?)",
        (name, size, time.time(), sealed),
    )
    assert row.lastrowid is not None
    return row.lastrowid


def _remove(db: sqlite3.Connection, name: str) -> None:
    of_name = "(SELECT id FROM blobs WHERE name = ?)"
    db.execute(f"DELETE FROM pieces WHERE blob IN {of_name}", (name,))
    db.execute("DELETE FROM blobs WHERE name = ?", (name,))


def _write_pieces(db: sqlite3.Connection, blob: int, offset: int, data: memoryview) -> int:
    """Write `data` at `offset`; return where it ends."""
    while data:
        number, start = divmod(offset, PIECE_BYTES)
        part, data = data[: PIECE_BYTES - start], data[PIECE_BYTES - start :]
        query = "SELECT id FROM pieces WHERE blob = ? AND number = ?"
        row = db.execute(query, (blob, number)).fetchone()
        if row is None:
            row = (
                db.execute(
                    "INSERT INTO pieces (blob, number, data) VALUES (?, ?, zeroblob(?))",
                    (blob, number, PIECE_BYTES),
                ).lastrowid,
            )
        with db.blobopen("pieces", "data", row[0]) as piece:
            piece.seek(start)
            piece.write(part)
        offset += part.nbytes
    return offset


def _read_pieces(db: sqlite3.Connection, blob: int, offset: int, target: memoryview) -> None:
    while target:
        number, start = divmod(offset, PIECE_BYTES)
        part, target = target[: PIECE_BYTES - start], target[PIECE_BYTES - start :]
        query = "SELECT id FROM pieces WHERE blob = ? AND number = ?"
        row = db.execute(query, (blob, number)).fetchone()
        data = b""
        if row is not None:
            with db.blobopen("pieces", "data", row[0], readonly=True) as piece:
                piece.seek(start)
                data = piece.read(part.nbytes)
        part[: len(data)] = data
        part[len(data) :] = bytes(part.nbytes - len(data))  # never written
        offset += part.nbytes


def _make_folder(folder: Path) -> None:
    """Make `folder`, and sync the parent of every new folder."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
