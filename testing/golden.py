"""Golden files: bytes that were written once, and must never change."""

from __future__ import annotations

import os
from pathlib import Path

REWRITE_VARIABLE = "PENSTOCK_REWRITE_GOLDEN"
"""This environment variable, set to `1`, makes `check_golden` write files."""

_SHOWN_BYTES = 16


def check_golden(path: str | os.PathLike[str], data: bytes, /) -> None:
    """Compare `data` with the file at `path`, byte by byte.

    If the environment variable `PENSTOCK_REWRITE_GOLDEN` is `1`, compares nothing: writes the file.

    Raises:
        AssertionError: The bytes differ, or the file is missing. The message gives the first
            difference, and how to write the file again.
    """
    file = Path(path)
    if rewriting():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        return
    how = f"if intended, run the test with {REWRITE_VARIABLE}=1, and review the change"
    if not file.is_file():
        msg = f"there is no golden file {file}; {how}"
        raise AssertionError(msg)
    golden = file.read_bytes()
    if data == golden:
        return
    at = _first_difference(data, golden)
    msg = (
        f"{len(data)} bytes are not the {len(golden)} of the golden file {file}: from byte {at} on "
        f"they are {_shown(data, at)}, not {_shown(golden, at)}; {how}"
    )
    raise AssertionError(msg)


def read_golden(path: str | os.PathLike[str], /) -> bytes:
    """Return the bytes of the golden file at `path`, for a test that still decodes them.

    Raises:
        AssertionError: The file is missing.
    """
    file = Path(path)
    if not file.is_file():
        msg = f"there is no golden file {file}; write it with {REWRITE_VARIABLE}=1"
        raise AssertionError(msg)
    return file.read_bytes()


def rewriting() -> bool:
    """Return whether to rewrite golden files.

    Raises:
        AssertionError: The environment variable is neither `0` nor `1`.
    """
    value = os.environ.get(REWRITE_VARIABLE, "0")
    if value not in {"0", "1"}:
        msg = f"{REWRITE_VARIABLE}={value!r} is neither 0 nor 1"
        raise AssertionError(msg)
    return value == "1"


def _first_difference(one: bytes, other: bytes) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _shown(data: bytes, at: int) -> str:
    return data[at : at + _SHOWN_BYTES].hex(" ") or "the end"
