"""Manifests with right digests and wrong content: the checks after the digest."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import interpreters
from tests.core import fuzz_targets
from tests.core.forging import forge, untouched
from tests.core.pipeline.test_fuzz_frames import corpus
from tests.effort import every, examples

from penstock.core.errors import DamagedError, FormatError, PenstockError, PluginError, RestoreError

ROOT = Path(__file__).parents[3]
STEP = fuzz_targets.STEP


@pytest.fixture
def stored():
    stored = fuzz_targets.stored()
    stored.put(stored.files)
    return stored


def test_an_unchanged_forgery_reads_as_original(stored):
    stored.put(forge(stored.files, untouched))
    outcomes = stored.read_every_way()
    assert {outcome for _, outcome in outcomes} <= {"read", "SelectionError", "KeyError"}


@given(st.binary(max_size=48))
@settings(max_examples=examples(40))
def test_a_forged_manifest_raises_only_our_errors(case):
    fuzz_targets.manifest(case)


def test_manifests_of_the_corpus_raise_only_our_errors():
    for case in corpus("manifest")[:: every(4)]:
        fuzz_targets.manifest(case)


@given(st.binary(max_size=48))
@settings(max_examples=examples(200))
def test_a_forged_record_is_read_or_refused(case):
    fuzz_targets.records(case)


def test_records_of_the_corpus_are_read_or_refused():
    outcomes = {fuzz_targets.records(case) for case in corpus("records")}
    assert len(outcomes) >= 12


# -- known shapes of malice ------------------------------------------------------------------------


def number(section, *path):
    return section["objects"]["path"].index(list(path))


def tie(section, path, other):
    section["objects"]["same_as"].append([number(section, *path), list(other)])
    section["objects"]["shards"][number(section, *path)] = []


def derive(section, path, other):
    section["objects"].setdefault("derived", []).append([number(section, *path), list(other)])
    section["objects"]["shards"][number(section, *path)] = []


def in_sections(*effects):
    """A forger that does this to each section."""

    def change(level, value):
        for effect in effects if level == "section" else ():
            effect(value)
        return value

    return change


def tied(path, *other):
    return lambda section: tie(section, (path,), other)


def derived(path, *other):
    return lambda section: derive(section, (path,), other)


def huge_and_empty(section):
    for path in ("big", "array"):
        section["objects"]["shape"][number(section, path)] = [0, (1 << 62) - 1, (1 << 62) - 1]
        section["objects"]["shards"][number(section, path)] = [[[]]]


def nodes_of_form(form):
    return in_sections(lambda section: [node.__setitem__(2, form) for node in section["nodes"]])


def leaves_of_form(form):
    return in_sections(lambda section: [row.__setitem__(4, form) for row in section["types"]])


def frame_of(section, *path):
    return section["objects"]["shards"][number(section, *path)][0][0][0]


def a_tebibyte_of_one_frame(level, value):
    """A blob declared large, with a frame of 1 GiB, and a tensor of 1024 such frames."""
    if level == "head":
        for blob in value["blobs"]:
            blob[1] = 1 << 60
        value["block_bytes"] = 1 << 30
    if level == "section":
        frames, place = value["frames"], frame_of(value, "big")
        for n, chain in enumerate(frames["chain"]):
            if not chain:
                count = -(-(frames["offset"][n] % 4096 + frames["length"][n]) // (1 << 30))
                frames["checksums"][n] = "0" * 16 * count
        frames["offset"][place], frames["checksums"][place] = 0, "0" * 16
        frames["length"][place] = frames["raw_length"][place] = 1 << 30
        value["objects"]["shape"][number(value, "big")] = [1 << 38]
        value["objects"]["shards"][number(value, "big")] = [[[place, 0, 1 << 30] * 1024]]
    return value


def a_tebibyte_as_a_value(level, value):
    value = a_tebibyte_of_one_frame(level, value)
    if level == "section":
        objects, big = value["objects"], number(value, "big")
        value["types"].append(["value", "uint8", 1, "other", "json"])
        objects["type"][big] = len(value["types"]) - 1
        objects["shape"][big] = [1 << 40]
    return value


def an_encoded_frame_of_a_pebibyte(level, value):
    if level == "head":
        for blob in value["blobs"]:
            blob[1] = 1 << 60
    if level == "section":
        value["frames"]["length"][frame_of(value, "chained")] = 1 << 50
    return value


a_path_of_a_million_segments = in_sections(
    lambda section: section["objects"]["path"].__setitem__(number(section, "big"), [""] * 1_000_000)
)


def a_head_of_thirty_million_lists(level, value):
    return b"[" + b"[]," * (30 << 20) + b"[]]" if level == "head" else value


MALICE = {
    "derived from nothing": in_sections(derived("big", "nothing")),
    "derived from another dtype": in_sections(derived("big", "chained")),
    "derived in a circle": in_sections(derived("big", "chained"), derived("chained", "big")),
    "tied and derived": in_sections(tied("big", "array"), derived("big", "array")),
    "dangling tie": in_sections(tied("big", "nothing")),
    "tied to each other": in_sections(tied("big", "chained"), tied("chained", "big")),
    "tied to a tied one": in_sections(tied("big", "chained"), tied("chained", "array")),
    "tied to another kind": in_sections(tied("big", "list", "1")),
    "tied to another shape": in_sections(tied("big", "chained")),
    "huge and empty": in_sections(huge_and_empty),
    "an encoded frame of a pebibyte": an_encoded_frame_of_a_pebibyte,
    "nodes of the form json": nodes_of_form("json"),
    "nodes of the form tensor": nodes_of_form("tensor"),
    "leaves of the form pickle": leaves_of_form("pickle"),
    "leaves of the form optimizer": leaves_of_form("optimizer"),
}


@pytest.mark.parametrize("name", MALICE)
def test_an_inconsistent_manifest_is_refused(name, stored):
    stored.put(forge(stored.files, MALICE[name]))
    with pytest.raises((DamagedError, RestoreError)):
        stored.ckpt.load(STEP)
    stored.read_every_way()


@pytest.mark.parametrize("form_of", [nodes_of_form, leaves_of_form])
def test_an_unknown_form_is_named(form_of, stored):
    stored.put(forge(stored.files, form_of("nothing")))
    with pytest.raises(PluginError, match="nothing"):
        stored.ckpt.load(STEP)
    stored.read_every_way()


def test_an_object_that_refers_only_to_itself_has_no_values(stored):
    stored.put(forge(stored.files, MALICE["tied to each other"]))
    for read in (stored.ckpt.load, lambda step: stored.ckpt.open(step)["big"]):
        with pytest.raises(FormatError, match="refers to another object itself"):
            read(STEP)
    report = stored.ckpt.verify(STEP)
    assert {"big", "chained"} <= {damage.what for damage in report.damaged}


def test_an_encoded_frame_is_within_its_codecs_bound(stored):
    stored.put(forge(stored.files, an_encoded_frame_of_a_pebibyte))
    with pytest.raises(DamagedError, match=r"codecs make at most \d+ bytes from"):
        stored.ckpt.load(STEP)


def test_a_piece_of_a_composite_is_read_as_stored(stored):
    piece = stored.ckpt.open(STEP)["opt/state/0.weight"]
    assert {"exp_avg", "exp_avg_sq", "step"} <= piece.keys()


def test_a_blob_outside_the_root_is_refused(stored):
    for name in ("../../etc/passwd", "/etc/passwd", "data/x/blobs/a", "a\0b", "data/" + "x" * 9999,
                 f"data/{'0' * 32}/blobs/00000-0.raw"):  # fmt: skip

        def change(level, value, name=name):
            if level == "head":
                value["blobs"][0][0] = name
            return value

        stored.put(forge(stored.files, change))
        with pytest.raises(FormatError, match=r"not the name of a blob|neither of this save"):
            stored.ckpt.load(STEP)


# -- bounded memory --------------------------------------------------------------------------------

LIMIT_BYTES = 1 << 30

_BOUNDED = """
import resource, sys
from tests.core import fuzz_targets
from tests.core.format import test_fuzz_manifest as malice
from tests.core.forging import forge
stored = fuzz_targets.stored()
for name in sys.argv[1:]:
    stored.put(forge(stored.files, getattr(malice, name)))
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + malice.LIMIT_BYTES, resource.RLIM_INFINITY))
    print(name, malice.stored_size(stored), stored.read_every_way())
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def stored_size(stored):
    return sum(map(len, stored.now().values()))


def test_claims_of_size_are_refused_within_bounded_memory():
    """No claim of a few stored kilobytes makes a reader use `LIMIT_BYTES`."""
    names = [
        "a_tebibyte_of_one_frame", "a_tebibyte_as_a_value", "an_encoded_frame_of_a_pebibyte",
        "a_path_of_a_million_segments", "a_head_of_thirty_million_lists",
    ]  # fmt: skip
    done = interpreters.run(
        "-c",
        _BOUNDED,
        *names,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == names
    for line in lines:
        assert "('load', 'read')" not in line
    assert issubclass(RestoreError, PenstockError)
