"""The check of a codec in use: a checkpoint that is saved through the codec can be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.checkpointer import Checkpointer
from penstock.core.plugins.registry import Registry
from penstock.core.testing.codecs.calls import compressible, in_words, random_bytes
from penstock.core.testing.expectations import finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.abc import Codec

_LARGE_BYTES = 5 << 18  # two chunks
_SMALL_BYTES = 4096


@in_words
def check_saved_and_loaded(codec: Codec) -> None:
    """Check that arrays saved through the codec are loaded again: large and small, of many dtypes.

    A lossy codec has to decode to the same bytes each time, and objects beside its own have to stay
    unchanged. A codec that needs a base is skipped.
    """
    if codec.needs_base:
        return  # core has no base for the first checkpoint of a run
    encoded = dict(_arrays())
    beside = encoded["f4-small"].copy()
    state = {"encoded": encoded, "beside": beside, "value": "kept as it is"}
    rules = [{"match": "encoded/**", "codecs": [codec.name]}]
    with (
        finding("a checkpoint that was written through it"),
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
    for name, array in encoded.items():
        found = loaded["encoded"][name]
        assert found.tobytes() == again["encoded"][name].tobytes(), (
            f"an array ({name}) is decoded to other bytes each time"
        )
        assert not codec.lossless or found.tobytes() == array.tobytes(), (
            f"an array ({name}) was saved through it, and is loaded with other bytes"
        )


def _arrays() -> Mapping[str, np.ndarray[Any, Any]]:
    arrays = {}
    for dtype in ("f2", "f4", "u1", "i8"):
        for size, name in ((_SMALL_BYTES, "small"), (_LARGE_BYTES, "large")):
            data = compressible(size // 2) + random_bytes(size // 2)
            arrays[f"{dtype}-{name}"] = np.frombuffer(data, dtype)
    return arrays


class _WithCodec(Registry):
    """The installed plugins, and one codec, which need not be installed."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self._tried = codec

    def codec(self, name: str, config: Mapping[str, Any], /) -> Codec:
        return self._tried if name == self._tried.name else super().codec(name, config)

    def codec_from_record(self, name: str, version: int, config: Mapping[str, Any], /) -> Codec:
        if name == self._tried.name:
            return self._tried
        return super().codec_from_record(name, version, config)
