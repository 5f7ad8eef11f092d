"""The `cast` codec rounds floats to a narrower format. Lossy, so used only if a rule names it.

A frame has one narrow element for each element of the chunk, in order, and nothing else. Decoding
widens each element exactly.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from penstock.core.abc import (
    DECLINED,
    FLOAT_DTYPES,
    Codec,
    CodecContext,
    CodecOutput,
    Declined,
    PluginConfig,
    convert_floats,
)
from penstock.core.errors import CodecError
from penstock.core.types import flat_view

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("penstock")

_PIECE = 256 << 10  # elements that are checked for overflow at once

# By format: the largest number, and the bits of a larger one, without the sign.
_LARGEST = {
    "float32": ((2 - 2.0**-23) * 2.0**127, 0x7F80_0000),
    "bfloat16": ((2 - 2.0**-7) * 2.0**127, 0x7F80),
    "float16": (65504.0, 0x7C00),
    "float8_e4m3fn": (448.0, 0x7E),
    "float8_e5m2": (57344.0, 0x7C),
    "float8_e4m3fnuz": (240.0, 0x80),
    "float8_e5m2fnuz": (57344.0, 0x80),
}
_E4M3FN_ROUNDED = 464.0  # numbers up to this round to 448; larger ones get its bits too
_INFINITE = {"float32", "bfloat16", "float16", "float8_e5m2"}
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class CastConfig(PluginConfig):
    """Options of the `cast` codec.

    Attributes:
        to: The stored format. Only formats with more bytes per element are cast.
        saturate: Whether a number that overflows `to` becomes its largest number. Otherwise a chunk
            with such a number is stored without the cast.
    """

    to: Literal[
        "float32",
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    ] = "bfloat16"
    saturate: bool = False


class CastCodec(Codec):
    """Rounds floats to a narrower format, to nearest even.

    A finite number never becomes infinite. With `saturate`, a number that overflows becomes the
    largest of the format; otherwise its chunk is stored without the cast. NaN stays NaN. An
    infinity stays if the format has one, else it overflows.
    """

    name: ClassVar[str] = "cast"
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = False
    Config: ClassVar[type[PluginConfig]] = CastConfig

    def __init__(self, config: CastConfig, /) -> None:
        """Create the codec from its options."""
        super().__init__(config)
        self._to = config.to
        self._width = FLOAT_DTYPES[config.to]
        self._saturate = config.saturate
        self._warned = False

    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return half of the raw length, since a cast at least halves an element."""
        return raw_length // 2

    def output(self, context: CodecContext, /) -> CodecOutput:
        """Describe the narrow elements, one for each element of the chunk."""
        del context
        return CodecOutput(self._to, self._width, elementwise=True)

    def encode(
        self, chunk: memoryview, out: memoryview, /, *, context: CodecContext
    ) -> int | Declined:
        """See `Codec.encode`. Declines other dtypes and, without `saturate`, overflows."""
        source = flat_view(chunk)
        if not self._takes(context) or source.nbytes % context.itemsize:
            return DECLINED
        length = source.nbytes // context.itemsize * self._width
        if length > out.nbytes:
            msg = f"cast: {length} bytes do not fit into an output of {out.nbytes}"
            raise CodecError(msg)
        target = flat_view(out)[:length]
        convert_floats(source, context.dtype, target, self._to)
        count = self._count_overflows(source, context.dtype, target)
        if count and not self._saturate:
            self._warn(count, length // self._width)
            return DECLINED
        return length

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """See `Codec.decode`."""
        source, target = flat_view(frame), flat_view(out)
        if not self._takes(context):
            msg = f"cast: a frame of {self._to} cannot hold {context.dtype}"
            raise CodecError(msg)
        if source.nbytes * context.itemsize != target.nbytes * self._width:
            msg = (
                f"cast: {source.nbytes} bytes of {self._to} do not decode to "
                f"{target.nbytes} bytes of {context.dtype}"
            )
            raise CodecError(msg)
        convert_floats(source, self._to, target, context.dtype)

    def _takes(self, context: CodecContext) -> bool:
        known = FLOAT_DTYPES.get(context.dtype)
        return known is not None and known == context.itemsize and known > self._width

    def _count_overflows(self, source: memoryview, dtype: str, target: memoryview) -> int:
        """Return how many numbers overflow; with `saturate`, replace them in `target`."""
        largest, code = _LARGEST[self._to]
        size, magnitude = FLOAT_DTYPES[dtype], (1 << 8 * self._width - 1) - 1
        codes: NDArray[Any] = np.frombuffer(target, _WORDS[self._width])
        count = 0
        for start in range(0, len(codes), _PIECE):
            piece = codes[start : start + _PIECE]
            suspect = (piece & (magnitude | code)) == code
            if not suspect.any():  # nearly always, so the rest may be slow
                continue
            wide = np.empty(len(piece))
            part = source[start * size : (start + len(piece)) * size]
            convert_floats(part, dtype, wide.view(np.uint8).data, "float64")
            large = suspect & self._is_too_large(wide)
            count += int(np.count_nonzero(large))
            if self._saturate:
                edge = np.copysign(largest, wide[large])
                fixed = np.empty(len(edge), codes.dtype)
                convert_floats(
                    edge.view(np.uint8).data, "float64", fixed.view(np.uint8).data, self._to
                )
                piece[large] = fixed
        return count

    def _is_too_large(self, wide: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which numbers overflow; valid where the rounded bits look like an overflow."""
        if self._to == "float8_e4m3fn":
            return np.abs(wide) > _E4M3FN_ROUNDED
        if self._to in _INFINITE:
            return np.isfinite(wide)
        return ~np.isnan(wide)

    def _warn(self, count: int, elements: int) -> None:
        if not self._warned:
            self._warned = True  # two threads may both log it, which is harmless
            log.warning(
                "%d of %d numbers of a chunk are too large for %s. Such chunks are stored without "
                "the codec cast (logged once); with saturate=true the numbers would become the "
                "largest number of that format",
                count,
                elements,
                self._to,
            )
