"""Checks of a codec in use: a checkpoint that is saved through the codec can be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.core.abc import Codec, CodecContext, CodecOutput, PluginConfig
from penstock.core.checkpointer import Checkpointer
from penstock.core.errors import CodecError
from penstock.core.plugins.registry import Registry
from penstock.core.testing.codecs.calls import compressible, in_words, random_bytes
from penstock.core.testing.expectations import finding
from penstock.core.types import flat_view

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Arrays = Mapping[str, np.ndarray[Any, Any]]

_LARGE_BYTES = 5 << 18  # two chunks
_SMALL_BYTES = 4096


@in_words
def check_saved_and_loaded(codec: Codec) -> None:
    """Check that arrays saved through the codec are loaded again: large and small, of many dtypes.

    A lossy codec has to decode to the same bytes each time, and objects beside its own have to stay
    unchanged. A codec that needs a base gets none, as for the first checkpoint of a run.
    """
    _loaded(codec, [codec.name])


@in_words
def check_chains(codec: Codec) -> None:
    """Check that arrays are loaded that were saved through chains with the codec at any place.

    The codec before it, or behind it, puts out elements, or bytes of an odd number. A lossy codec
    stands first only, and so does one that needs a base.
    """
    alone = _loaded(codec, [codec.name])
    for chain in (
        [codec.name, _Marked.name],
        [_Turned.name, codec.name],
        [_Marked.name, codec.name],
        [_Turned.name, codec.name, _Marked.name],
    ):
        if chain[0] != codec.name and (codec.needs_base or not codec.lossless):
            continue  # such a chain is refused
        for name, found in _loaded(codec, chain).items():
            assert found.tobytes() == alone[name].tobytes(), (
                f"an array ({name}) that was saved through {' -> '.join(chain)} is not what "
                f"{codec.name} alone makes of it"
            )


def _loaded(codec: Codec, chain: Sequence[str]) -> Arrays:
    """Save arrays through a chain, check what is loaded, and return what the chain has encoded."""
    encoded = _arrays()
    beside = encoded["f4-small"].copy()
    state = {"encoded": encoded, "beside": beside, "value": "kept as it is"}
    rules = [{"match": "encoded/**", "codecs": list(chain)}]
    with (
        finding(f"a checkpoint that was written through {' -> '.join(chain)}"),
        Checkpointer(
            "memory://", registry=_WithCodec(codec), rules=rules, chunk_bytes=1 << 20
        ) as ckpt,
    ):
        ckpt.save(state, 1, mode="blocking")
        loaded, again = ckpt.load(1), ckpt.load(1)
        report = ckpt.verify(1)
    assert report.ok, f"a checkpoint that was written through it is damaged: {report.damaged[:3]}"
    assert loaded["value"] == state["value"], "a value beside what it encodes came back changed"
    assert loaded["beside"].tobytes() == beside.tobytes(), "an array beside it came back changed"
    found: Arrays = loaded["encoded"]
    for name, array in encoded.items():
        assert found[name].tobytes() == again["encoded"][name].tobytes(), (
            f"an array ({name}) is decoded to other bytes each time"
        )
        assert not codec.lossless or found[name].tobytes() == array.tobytes(), (
            f"an array ({name}) was saved through {' -> '.join(chain)}, and is loaded with other "
            "bytes"
        )
    return found


def _arrays() -> dict[str, np.ndarray[Any, Any]]:
    arrays = {}
    for dtype in ("f2", "f4", "u1", "i8"):
        for size, name in ((_SMALL_BYTES, "small"), (_LARGE_BYTES, "large")):
            data = compressible(size // 2) + random_bytes(size // 2)
            arrays[f"{dtype}-{name}"] = np.frombuffer(data, dtype)
    return arrays


class _Turned(Codec):
    """Turns every bit, and so keeps elements where they are."""

    name: ClassVar[str] = "penstock-testing-turned"
    lossless: ClassVar[bool] = True

    def max_encoded_size(self, raw_length: int, /) -> int:
        return raw_length

    def output(self, context: CodecContext, /) -> CodecOutput:
        return CodecOutput(context.dtype, context.itemsize, elementwise=True)

    def encode(self, chunk: memoryview, out: memoryview, /, *, context: CodecContext) -> int:
        source = np.frombuffer(flat_view(chunk), np.uint8)
        np.invert(source, out=np.frombuffer(flat_view(out), np.uint8)[: context.raw_length])
        return context.raw_length

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        if frame.nbytes != context.raw_length:
            msg = f"{frame.nbytes} bytes are not {context.raw_length}"
            raise CodecError(msg)
        np.invert(
            np.frombuffer(flat_view(frame), np.uint8), out=np.frombuffer(flat_view(out), np.uint8)
        )


class _Marked(_Turned):
    """Puts one byte before the chunk, so that no element is where it was."""

    name: ClassVar[str] = "penstock-testing-marked"

    def max_encoded_size(self, raw_length: int, /) -> int:
        return raw_length + 1

    def output(self, context: CodecContext, /) -> CodecOutput:
        del context
        return CodecOutput()

    def encode(self, chunk: memoryview, out: memoryview, /, *, context: CodecContext) -> int:
        out[0] = 1
        return 1 + super().encode(chunk, out[1:], context=context)

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        super().decode(frame[1:], out, context=context)


class _WithCodec(Registry):
    """The installed plugins, and a codec with its neighbours, which need not be installed."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        own = (codec, _Turned(PluginConfig()), _Marked(PluginConfig()))
        self._tried = {given.name: given for given in own}

    def codec(self, name: str, config: Mapping[str, Any], /) -> Codec:
        return self._tried[name] if name in self._tried else super().codec(name, config)

    def codec_from_record(self, name: str, version: int, config: Mapping[str, Any], /) -> Codec:
        if name in self._tried:
            return self._tried[name]
        return super().codec_from_record(name, version, config)
