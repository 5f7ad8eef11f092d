"""Fuzz targets for codecs.

Decoders get changed golden frames without a checksum check; `huffman` codes planes.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from tests.codecs import huffman_planes
from tests.codecs.golden_cases import CASES
from tests.core.forging import INTEGERS, Choices

from penstock.core.errors import CodecError
from penstock.core.plugins.registry import Registry

GOLDEN = Path(__file__).parent / "golden"
CODECS = ("cast", "delta", "factor", "floatsplit", "log8", "lz4", "zstd")
_LARGEST_BYTES = 200_000  # a larger chunk takes milliseconds, and finds nothing new
_MOST_CHANGES = 12
_HEAD_BYTES = 64
_GUARD = b"\xa5" * 64


@cache
def _seeds(name):
    """The frames of one codec alone, of every version: codec, context, chunk, frame."""
    found = []
    for path in sorted(GOLDEN.glob(f"{name}-*/*.json")):
        chain = json.loads(path.read_text())["chain"]
        if len(chain) == 1 and chain[0][0] == name:
            raw, context = CASES[path.stem].chunk()
            if len(raw) <= _LARGEST_BYTES:
                codec = Registry().codec_from_record(*chain[0])
                frame = path.with_suffix(".frame").read_bytes()
                found.append((codec, replace(context, version=chain[0][1]), raw, frame))
    return found


def _changed(frame, choices, others):
    """`frame` after some changes, most of them near its beginning, where the tables are."""
    frame = bytearray(frame)
    for _ in range(_MOST_CHANGES):
        if not choices.left:
            break
        head = choices.below(4) > 0
        at = choices.below(max(min(len(frame), _HEAD_BYTES) if head else len(frame), 1))
        match choices.below(10):
            case 0 | 1 | 2:
                frame[at : at + 1] = bytes([choices.below(256)])
            case 3 | 4:
                number = choices.of(INTEGERS[:17]) & 0xFFFFFFFF
                frame[at : at + 4] = number.to_bytes(4, "little")
            case 5 if frame:
                frame[min(at, len(frame) - 1)] ^= 1 << choices.below(8)
            case 6:
                del frame[at:]
            case 7:
                del frame[at : at + 1 + choices.below(9)]
            case 8:
                frame[at:at] = frame[at : at + 1 + choices.below(256)] or b"\0"
            case _:
                frame[at:] = choices.of(others)[3][at:]
    return bytes(frame)


def decode(name, data):
    """A changed frame of the codec `name`: refused by a CodecError, or decoded within bounds."""
    choices = Choices(data)
    seeds = _seeds(name)
    codec, context, raw, frame = choices.of(seeds)
    intact, size, unit = context, len(raw), context.itemsize
    if choices.below(8) == 0:
        size = max(0, size + choices.of((-unit, unit, -1, 1, -size, size, 8, -4096)))
    if choices.below(8) == 0:
        context = choices.of(seeds)[1]
    context = replace(context, raw_length=size)
    changed = _changed(frame, choices, seeds)
    memory = bytearray(_GUARD + b"\x5a" * size + _GUARD)
    out = memoryview(memory)[len(_GUARD) : len(_GUARD) + size]
    given = bytearray(changed)
    try:
        codec.decode(memoryview(given), out, context=context)
        outcome = "read"
        untouched = changed == frame and context == intact
        assert out == raw or not (untouched and codec.lossless)
    except CodecError as error:
        assert str(error)  # noqa: PT017 - it may be read
        outcome = re.sub(r"\d+", "n", str(error))[:60]
    assert memory.startswith(_GUARD)
    assert memory.endswith(_GUARD)
    assert given == changed
    return name, outcome


TARGETS = {name: partial(decode, name) for name in CODECS} | {"huffman": huffman_planes.code}
