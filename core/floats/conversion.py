"""The conversion of floats from one buffer to another."""

from __future__ import annotations

from typing import Final

FLOAT_DTYPES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}
"""Bytes per element of the floats that `convert_floats` knows, by dtype name."""


def convert_floats(
    source: memoryview, source_dtype: str, target: memoryview, target_dtype: str, /
) -> None:
    """Fill `target` with the elements of `source`, each rounded to nearest even.

    The result equals that of torch's `.to()` on a CPU, bit for bit. float64 goes through float32 to
    narrower formats, NaN stays NaN, and -0.0 stays -0.0 (`fnuz` formats have none). Numbers that
    overflow become infinite; in `fnuz` formats they become NaN, and in float8_e4m3fn the largest
    number. Where versions of torch or processors disagree (the bits of a NaN, overflow in
    float8_e4m3fn), this result is always the same. Uses only its thread's scratch memory, and holds
    the GIL for some microseconds at a time.

    Args:
        source: A flat byte view of whole elements.
        source_dtype: One of `FLOAT_DTYPES`.
        target: A flat, writable byte view for these elements, which does not overlap `source`.
        target_dtype: One of `FLOAT_DTYPES`.

    Raises:
        ValueError: A dtype is not in `FLOAT_DTYPES`, `source` does not hold whole elements, or
            `target` has another number of elements or is read-only. `target` is unchanged.
    """
    # Imported late: the contracts, and so `penstock ls`, do not need numpy.
    from penstock.core.floats.arithmetic import convert  # noqa: PLC0415

    for dtype in (source_dtype, target_dtype):
        if dtype not in FLOAT_DTYPES:
            msg = f"Penstock does not convert {dtype}, only {', '.join(FLOAT_DTYPES)}"
            raise ValueError(msg)
    count, rest = divmod(source.nbytes, FLOAT_DTYPES[source_dtype])
    if rest or target.nbytes != count * FLOAT_DTYPES[target_dtype] or target.readonly:
        msg = (
            f"{source.nbytes} bytes of {source_dtype} cannot be converted into {target.nbytes} "
            f"{'read-only ' if target.readonly else ''}bytes of {target_dtype}"
        )
        raise ValueError(msg)
    convert(source, source_dtype, target, target_dtype)
