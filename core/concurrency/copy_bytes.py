"""The copy of bytes without the GIL."""

from __future__ import annotations


def copy_bytes(target: memoryview, source: memoryview, /) -> None:
    """Copy all of `source` to the beginning of `target` without holding the GIL.

    Both are flat views of bytes. The slice assignment of a memoryview would hold the GIL, and stop
    the training loop while 16 MiB are copied.

    Raises:
        ValueError: `target` is shorter than `source`, or is read-only; nothing was copied.
    """
    import numpy as np  # noqa: PLC0415 - the contracts, and so `penstock ls`, do not need it

    if source.nbytes:
        into = np.frombuffer(target, np.uint8)[: source.nbytes]
        np.copyto(into, np.frombuffer(source, np.uint8))
