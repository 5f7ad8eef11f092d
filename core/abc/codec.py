"""The contract of codecs: chunks into frames that decode alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.core.abc.plugin import API_VERSION, PluginConfig


@dataclass(frozen=True, slots=True)
class CodecContext:
    """What a codec may know of a chunk.

    Attributes:
        dtype: Dtype name of the elements; `"uint8"` for slabs, values and later chain links.
        itemsize: Bytes per element.
        shape: Shape of the region the chunk was cut from; `(raw_length,)` for slabs.
        start: Byte offset of the chunk in that region.
        raw_length: Bytes that go into `encode` and come out of `decode`.
        base: The same chunk of an earlier checkpoint, if the codec declared `needs_base`.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    start: int
    raw_length: int
    base: memoryview | None = None


class Codec(ABC):
    """Encodes chunks into frames that decode alone. Thread-safe; holds no per-chunk state.

    `name` is the entry-point name, `version` goes into the manifest and is checked on reading,
    as is `config`, which round-trips as JSON. Releases the GIL for anything longer than 1 ms.
    Never changes its input.
    """

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    version: ClassVar[int] = 1
    lossless: ClassVar[bool]
    needs_base: ClassVar[bool] = False
    Config: ClassVar[type[PluginConfig]] = PluginConfig

    def __init__(self, config: Any, /) -> None:
        """`config` is an instance of `Config`."""
        self.config: PluginConfig = config

    @abstractmethod
    def max_encoded_size(self, raw_length: int, /) -> int:
        """Bytes that `encode` may need at most for any chunk of `raw_length` bytes."""

    @abstractmethod
    def encode(self, chunk: memoryview, out: memoryview, /, *, context: CodecContext) -> int:
        """Encode `chunk` into `out` (at least `max_encoded_size` bytes) and return the length.

        Raises:
            CodecError: The chunk does not suit this codec.
        """

    @abstractmethod
    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """Fill `out` (exactly `context.raw_length` bytes) from `frame`; trusts nothing.

        Raises:
            CodecError: The frame is not what `encode` makes, or decodes to another length.
        """
