"""Frames once written decode forever; writing the same bytes again is not promised."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tests.codecs.golden_cases import CASES

from penstock.codecs.floatsplit import read_head
from penstock.codecs.floatsplit.entropy import Method
from penstock.codecs.plain import Halves
from penstock.core.pipeline.codec_chain import CodecChain, checksum
from penstock.core.plugins.registry import default_registry
from penstock.testing.golden import read_golden, rewriting

GOLDEN = Path(__file__).parent / "golden"


def folder_of(case):
    """The folder of frames of the first codec's current version."""
    name = CASES[case].codecs[0][0]
    return GOLDEN / f"{name}-{default_registry().codec_class(name).version}"


def write(case):
    given = CASES[case]
    raw, context = given.chunk()
    registry = default_registry()
    codecs = [registry.codec(name, options) for name, options in given.codecs]
    chain = CodecChain(codecs)
    out = memoryview(bytearray(chain.max_encoded_size(len(raw))))
    frame = chain.encode(memoryview(raw), out, context=context)
    assert frame.declined == given.declined
    left = [codec for number, codec in enumerate(codecs) if number not in frame.declined]
    record = {
        "chain": [[c.name, c.version, c.config.model_dump(mode="json")] for c in left],
        "lengths": list(frame.lengths),
        "raw_checksum": frame.raw_checksum,
    }
    folder = folder_of(case)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{case}.frame").write_bytes(out[: frame.length])
    (folder / f"{case}.json").write_text(json.dumps(record) + "\n")


def test_every_case_has_a_frame_of_the_current_version():
    for case in CASES:
        path = folder_of(case) / f"{case}.frame"
        if rewriting() and not path.is_file():  # existing frames never change
            write(case)
        assert read_golden(path), case


def test_a_golden_frame_decodes_to_its_chunk(loops):
    # Codecs other than these have one way.
    for path in sorted(GOLDEN.glob("[df]*-*/*.json" if loops == "numpy" else "*/*.json")):
        expect_decodes(path)


def expect_decodes(path):
    raw, context = CASES[path.stem].chunk()
    record = json.loads(path.read_text())
    registry = default_registry()
    chain = CodecChain(
        [registry.codec_from_record(*link) for link in record["chain"]],
        versions=[version for _, version, _ in record["chain"]],
    )
    out = bytearray(b"\xaa" * len(raw))
    chain.decode(
        memoryview(read_golden(path.with_suffix(".frame"))),
        memoryview(out),
        context=context,
        lengths=record["lengths"],
    )
    assert checksum(out) == record["raw_checksum"], path
    assert not chain.lossless or out == raw, path


def test_golden_frames_of_floatsplit_have_every_kind_and_method():
    found = set()
    for path in GOLDEN.glob("floatsplit-*/*.json"):
        if [link[0] for link in json.loads(path.read_text())["chain"]] == ["floatsplit"]:
            raw, _ = CASES[path.stem].chunk()
            frame = np.frombuffer(read_golden(path.with_suffix(".frame")), np.uint8)
            layout, at = read_head(frame, len(raw))
            count = len(layout.bounds(len(raw) // layout.itemsize))
            ways = frame[at + count :][: 4 * count * len(layout.widths())].tobytes()
            methods = {Method(top >> 4) for top in ways[3::4]}
            kinds = {Halves(kind) for kind in frame[at : at + count]}
            found |= {(layout.itemsize, layout.prediction is not None, kind) for kind in kinds}
            found |= {(layout.itemsize, layout.apart)} | methods
    predicted = {Halves.NEAR, Halves.UNSIGNED, Halves.SIGNED}
    assert found >= set(Method)
    for size in (2, 4):
        assert {(size, True, kind) for kind in predicted} <= found
    for size in (2, 4, 8):
        assert {(size, False, kind) for kind in set(Halves) - {Halves.NEAR}} <= found
    assert {(4, True), (4, False), (8, True), (8, False)} <= found


def test_no_golden_frame_is_left_out():
    frames, records = (
        {p.with_suffix("") for p in GOLDEN.glob(f"*/*.{end}")} for end in ("frame", "json")
    )
    assert frames == records
    assert {p.name for p in records} == set(CASES)
