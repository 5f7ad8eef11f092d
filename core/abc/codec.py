"""The contract of codecs, which encode chunks into frames and decode them.

Tested in `tests/codecs/test_conformance.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final

from penstock.core.abc.plugin import API_VERSION, PluginConfig


class Declined(Enum):
    """The type of `DECLINED`. It is not an integer, so no wrong length can equal it."""

    DECLINED = "declined"


DECLINED: Final = Declined.DECLINED
"""The result of `Codec.encode` for a chunk that it leaves to the rest of the chain."""


@dataclass(frozen=True, slots=True)
class CodecContext:
    """Describes a chunk to a codec.

    In a chain, the chunk of each later codec is the previous codec's output, as that codec's
    `Codec.output` describes it.

    Attributes:
        dtype: Dtype name of the elements; `"uint8"` for values.
        itemsize: Bytes per element.
        shape: Shape of the region that contains the chunk. It is `(raw_length // itemsize,)` for
            an output that is not elementwise, and for a slab, which holds several small objects of
            one dtype with zeros between them.
        start: Byte offset of the chunk in that region.
        raw_length: Bytes that `encode` takes and `decode` produces.
        base: The same chunk of an earlier checkpoint; None if the codec did not declare
            `needs_base` or no such chunk exists.
        version: For `encode`, the codec's own version. For `decode`, and for `output` when a
            frame is decoded, the version that wrote the frame.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    start: int
    raw_length: int
    base: memoryview | None = None
    version: int = 1


@dataclass(frozen=True, slots=True)
class CodecOutput:
    """Describes a codec's output to the next codec of a chain.

    Attributes:
        dtype: Dtype name of the elements.
        itemsize: Bytes per element.
        elementwise: Whether the output has one element for each element of the chunk, in the same
            order, and nothing else unless `tail` is set. The next codec then gets the chunk's
            shape and start; otherwise it gets a one-dimensional shape.
        tail: Whether an elementwise output may have further elements after these. The next codec
            then gets a shape with additional rows for them.
    """

    dtype: str = "uint8"
    itemsize: int = 1
    elementwise: bool = False
    tail: bool = False


class Codec(ABC):
    """Encodes each chunk into a frame, and decodes it. Thread-safe; has no per-chunk state.

    A frame is decoded without other frames, but with its base if it has one. `name` is the
    entry-point name. The manifest records `version`: `decode` gets frames of the versions
    `oldest_readable` to `version`; core refuses all others before it reads any data.
    `config` round-trips through the manifest as JSON. A codec releases the GIL for anything longer
    than 1 ms, and never changes its input. With `lossless = False` the decoded bytes may differ
    from the input, but each decode returns the same bytes. Such a codec gets tensors only, no
    values (numbers, text). A codec that declares `needs_base` is first in its chain.
    """

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    version: ClassVar[int] = 1
    oldest_readable: ClassVar[int] = 1
    lossless: ClassVar[bool]
    needs_base: ClassVar[bool] = False
    Config: ClassVar[type[PluginConfig]] = PluginConfig

    def __init__(self, config: Any, /) -> None:
        """Keep `config`, an instance of `Config`."""
        self.config: PluginConfig = config

    def load(self) -> None:  # noqa: B027 - most have nothing to load
        """Load the libraries or compiled code that `encode` needs, if that takes long.

        Each save calls this in the background before its first chunk, so repeated calls must be
        quick. If `encode` loads them instead, a slow load counts as a save without progress.
        """

    @abstractmethod
    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return the maximum bytes that `encode` needs for any chunk of `raw_length` bytes."""

    def output(self, context: CodecContext, /) -> CodecOutput:
        """Describe what `encode` outputs for an accepted chunk; the default is plain bytes.

        Depends only on the options and on `context`, since readers call this without the chunk.
        `context` has no base here.
        """
        del context
        return CodecOutput()

    @abstractmethod
    def encode(
        self, chunk: memoryview, out: memoryview, /, *, context: CodecContext
    ) -> int | Declined:
        """Encode `chunk` into `out` (`max_encoded_size` bytes) and return the length.

        Returns `DECLINED` for a chunk that this codec does not encode: another dtype, no gain, or a
        missing base. The contents of `out` are then ignored. The rest of the chain encodes and
        decodes the chunk without this codec.

        Raises:
            CodecError: The chunk cannot be encoded; the save fails.
        """

    @abstractmethod
    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """Fill `out` (exactly `context.raw_length` bytes) from `frame`, which is untrusted.

        Raises:
            CodecError: The frame is malformed, or decodes to another length.
        """
