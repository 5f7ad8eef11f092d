"""The contract of codecs, which turn chunks into frames that decode alone.

Tested in `tests/codecs/test_conformance.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final

from penstock.core.abc.plugin import API_VERSION, PluginConfig


class Declined(Enum):
    """The type of `DECLINED`. It is not a number, so that no wrong length can equal it."""

    DECLINED = "declined"


DECLINED: Final = Declined.DECLINED
"""The result of `Codec.encode` for a chunk that it leaves to the rest of the chain."""


@dataclass(frozen=True, slots=True)
class CodecContext:
    """The facts about a chunk that a codec may use.

    A later codec of a chain gets the previous codec's output as its chunk, with the facts that the
    previous codec reports about it (`Codec.output`).

    Attributes:
        dtype: Dtype name of the elements; `"uint8"` for values.
        itemsize: Bytes per element.
        shape: Shape of the region that the chunk was cut from. For a slab, which holds several
            small objects of one dtype with zeros between them, and for an output that is not
            elementwise: `(raw_length // itemsize,)`.
        start: Byte offset of the chunk in that region.
        raw_length: Bytes that go into `encode` and come out of `decode`.
        base: The same chunk of an earlier checkpoint, if the codec declared `needs_base` and there
            is one; else None.
        version: For `decode` and its `output`, the version of the codec that wrote the frame; for
            `encode`, that of the codec itself.
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
    """The elements that a codec outputs, described for the next codec of a chain.

    Attributes:
        dtype: Dtype name of the elements.
        itemsize: Bytes per element.
        elementwise: Whether the output has one element for each element of the chunk, in the same
            order, and nothing else. The next codec then sees the shape and place of the chunk;
            otherwise it sees one row of elements.
        tail: Whether further elements may follow in an elementwise output. The next codec then
            sees a region with as many more rows as they need.
    """

    dtype: str = "uint8"
    itemsize: int = 1
    elementwise: bool = False
    tail: bool = False


class Codec(ABC):
    """Encodes chunks into frames that decode alone. Thread-safe; holds no per-chunk state.

    `name` is the entry-point name. `version` goes into the manifest: `decode` gets frames of the
    versions `oldest_readable` to `version`; core refuses all others before it reads any data.
    `config` round-trips through the manifest as JSON. A codec releases the GIL for anything longer
    than 1 ms, and never changes its input. With `lossless = False` it may decode to other bytes
    than it encoded, but to the same bytes each time; it then never gets a value (a number, a text).
    A codec that declares `needs_base` is first in its chain.
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
        """Load what `encode` needs, if that takes long: libraries, compiled code.

        Called in the background of each save before its first chunk, so it must be quick once all
        is loaded. A long wait in `encode` counts as a save without progress.
        """

    @abstractmethod
    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return the most bytes that `encode` needs for any chunk of `raw_length` bytes."""

    def output(self, context: CodecContext, /) -> CodecOutput:
        """Return the elements that `encode` makes of an accepted chunk; by default bytes.

        Depends on the options and on `context` alone, which never has a base here: readers call it
        without the chunk.
        """
        del context
        return CodecOutput()

    @abstractmethod
    def encode(
        self, chunk: memoryview, out: memoryview, /, *, context: CodecContext
    ) -> int | Declined:
        """Encode `chunk` into `out` (`max_encoded_size` bytes) and return the length.

        Return `DECLINED` for a chunk that this codec cannot use (another dtype, no gain, no base
        although it needs one); the contents of `out` do not matter then. The rest of the chain
        stores the chunk, and decodes it alone.

        Raises:
            CodecError: The chunk cannot be encoded; the save fails.
        """

    @abstractmethod
    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """Fill `out` (exactly `context.raw_length` bytes) from `frame`, which is untrusted.

        Raises:
            CodecError: The frame is not what `encode` makes, or decodes to another length.
        """
