"""The float formats that Penstock converts."""

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
