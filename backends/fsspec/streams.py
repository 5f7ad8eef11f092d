"""One blob being written through a stream, which takes bytes in order."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from penstock.backends.fsspec.writer import StoreWriter
from penstock.core.errors import StorageError
from penstock.core.types import flat_view

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.backends.fsspec.waiting import Batch
    from penstock.core.concurrency.pool import Pool
    from penstock.core.types import BlobInfo, WriteRequest

_ZEROS = memoryview(bytes(1 << 20))


class Streams(Protocol):
    """What a writer needs of the file system."""

    url: str

    def open_stream(self, name: str, /) -> Any: ...

    def rewrite(self, name: str, length: int, /) -> None: ...

    def remove(self, name: str, /) -> None: ...

    def holds(self, name: str, stream: Any, /) -> bool: ...

    def stat(self, name: str, /) -> BlobInfo: ...

    def explained(self, what: str, name: str, /) -> AbstractContextManager[None]: ...


class StreamWriter(StoreWriter):
    """Appends to a stream, opened when the first bytes come; gaps are written as zeros.

    A blob of more than one part can be cut only where its stream can. It is as durable as the
    close of the stream is, and where there is a file below, that is synced.
    """

    def __init__(self, streams: Streams, name: str, *, feeds: Pool) -> None:
        super().__init__(name, streams.url, feeds=feeds)
        self._streams = streams
        self._stream: Any = None
        self._position = 0

    def _take(self, request: WriteRequest, batch: Batch) -> None:
        del batch  # nothing is in use after this
        if not request.length:
            return
        if request.offset < self._position:
            msg = (
                f"{self._where('write')}: offset {request.offset} comes too late, the stream is "
                f"at {self._position}; offsets must ascend from call to call"
            )
            raise StorageError(msg)
        self._open()
        with self._streams.explained("write", self.name):
            self._advance(request.offset)
            for buffer in request.buffers:
                self._send(flat_view(buffer))

    def _finish(self, length: int) -> None:
        self._open()
        with self._streams.explained("seal", self.name):
            self._advance(length)
            cut = length < self._position and not _truncate(self._stream, length)
            flush(self._stream)
            self._stream.close()
        if cut:
            self._streams.rewrite(self.name, length)
        size = self._streams.stat(self.name).size_bytes
        if size != length:
            msg = f"{self._where('seal')}: the store holds {size} bytes of {length}; do not use it"
            raise StorageError(msg)

    def _give_up(self) -> None:
        if self._stream is None:
            return
        # By now the name may be another's, who took over from this process while it slept. So it
        # is removed only where it is this very file, and before that is closed; what else is left
        # is for `delete` and `prune`.
        if self._streams.holds(self.name, self._stream):
            self._streams.remove(self.name)
        with suppress(Exception):
            self._stream.discard()
        if _stores_at_its_end(self._stream):
            _forget(self._stream)
        with suppress(Exception):
            self._stream.close()

    def _open(self) -> None:
        if self._stream is None:
            self._stream = self._streams.open_stream(self.name)
            # One that nobody ended is another's blob by now: the stream's own `__del__` would store
            # it. The finalizer keeps the stream, so that it never goes first, as it may otherwise
            # where both are garbage at once.
            weakref.finalize(self, _forget, self._stream)

    def _advance(self, offset: int) -> None:
        while self._position < offset:
            self._send(_ZEROS[: offset - self._position])

    def _send(self, view: memoryview) -> None:
        while view.nbytes:
            count = self._stream.write(view)
            # Raw streams may take less; some others return nothing.
            count = view.nbytes if count is None else count
            self._position += count
            view = view[count:]


def _forget(stream: Any) -> None:
    """Without asking the store, which may hang: what it has of it ends by itself."""
    with suppress(Exception):
        stream.closed = True


def _stores_at_its_end(stream: Any) -> bool:
    """Whether `close` makes a blob of what was written so far, whatever has that name by now."""
    from fsspec.spec import AbstractBufferedFile  # noqa: PLC0415 - 80 ms; loaded with the stream

    return isinstance(stream, AbstractBufferedFile)


def flush(stream: Any) -> None:
    """Make what a stream holds durable where it has a file below; else its close does."""
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
