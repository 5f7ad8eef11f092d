"""The bytes of tensors, piece by piece: the next piece is read while the last one is written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from concurrent.futures import Future

PIECE_BYTES = 16 << 20
"""The most bytes of a tensor that are read and written at once."""


def read_ahead(
    tensors: Iterable[tuple[Callable[[int, memoryview], object], int]],
) -> Generator[memoryview]:
    """Yield the bytes of tensors in pieces, each valid until the next one is asked for.

    Close the iterator, which ends the thread that reads.

    Args:
        tensors: A function as for `Streamed`, and the number of bytes, of each tensor.
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
