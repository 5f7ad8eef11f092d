"""Damage to any file of a chain is found and named, and never becomes a value."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
import torch
from tests.core.forging import forge
from tests.integration.support import memory, place_of, same

from penstock import Checkpointer, CheckpointNotFoundError, DamagedError
from penstock.core.errors import PluginError
from penstock.core.limits import MAX_LINKS
from penstock.testing.faults import FaultyBackend

OPTIONS = {"chunk_bytes": 8192, "block_bytes": 4096, "workers": 1}
RULES = [{"match": "model/**", "codecs": ["delta", "zstd"]}]
STEPS = (0, 1, 2)
TENSOR = "model/large"


def state(step):
    chance = torch.Generator().manual_seed(8)
    start, drift = (torch.randn(5, 2048, generator=chance) for _ in range(2))
    moved = start + 1e-6 * step * drift
    first = {"another": moved[4, :1000].clone(), "large": moved[:4].clone()}
    return {"model": first, "plain": torch.arange(1000.0) + step}


@pytest.fixture(scope="module")
def saved():
    """Files of steps 0 to 2, each but the first encoded against the previous one."""
    store = memory()
    with Checkpointer(store, rules=RULES, **OPTIONS) as ckpt:
        for step in STEPS:
            ckpt.save(state(step), step, mode="blocking")
        assert [len(ckpt._catalog.record(step).references) for step in STEPS] == [0, 1, 2]
    return files_of(store)


@pytest.fixture
def store(saved):
    store = memory()
    put(store, saved)
    return store


def files_of(store):
    return {name: bytes(blob.data) for name, blob in store._store.blobs.items()}


def put(store, files):
    store.delete(list(store._store.blobs))
    for name, data in files.items():
        store.publish(name, data)


def kinds(ckpt, step):
    """The files of a step, by kind."""
    uid = ckpt._catalog.record(step).uid
    return {
        "record": f"commits/{step:08d}-0.json",
        "index": f"data/{uid}/index",
        "part": f"data/{uid}/parts/00000.json.zst",
        "encoded": f"data/{uid}/blobs/00000-0.enc",
        "raw": f"data/{uid}/blobs/00000-0.raw",
    }


def flip(files, name, _other, at):
    data = bytearray(files[name])
    data[at] ^= 0x10
    files[name] = bytes(data)


def cut(files, name, _other, at):
    files[name] = files[name][:at]


def remove(files, name, _other, _at):
    del files[name]


def swap(files, name, other, _at):
    files[name], files[other] = files[other], files[name]


@pytest.mark.parametrize("kind", ["record", "index", "part", "encoded", "raw"])
@pytest.mark.parametrize(
    "step", [pytest.param(s, marks=() if s == 1 else pytest.mark.slow) for s in STEPS]
)
def test_damage_in_any_file_of_any_link_is_found_by_its_readers(step, kind, store, saved):
    for damage in (flip, cut, remove, swap):
        put(store, saved)
        check_damage(step, kind, damage, store)


def check_damage(step, kind, damage, store):
    with Checkpointer(store, **OPTIONS) as ckpt:
        name = kinds(ckpt, step)[kind]
        other = kinds(ckpt, (step + 1) % 3)[kind]
        files = files_of(store)
        at = len(files[name]) // 2
        if kind in {"encoded", "raw"}:
            place = place_of(ckpt.open(step), TENSOR if kind == "encoded" else "plain")
            assert place.blob == name
            at = place.offset + place.length // 2
        needing = {step}
        if kind == "encoded":  # only their own step needs manifests and raw blobs
            needing = {s for s in STEPS if s >= step}
        if damage is swap:
            needing |= {s for s in STEPS if kind == "encoded" and s >= (step + 1) % 3}
            needing |= {(step + 1) % 3}
            if files[name] == files[other]:
                needing = set()  # an index has only hashes of paths
        damage(files, name, other, at)
        put(store, files)
        for one in STEPS:
            try:
                tree = ckpt.load(one)
            except CheckpointNotFoundError:
                assert (kind, damage, one) == ("record", remove, step)
            except DamagedError as error:
                assert one in needing
                assert error.damaged  # noqa: PT017 - `load` may also return the saved state
                assert all(what in str(error) for what in error.damaged)  # noqa: PT017
            else:
                assert same(tree, state(one))
                assert one not in needing or kind == "index"  # `load` reads all parts instead
            try:
                assert ckpt.verify(one).ok is (one not in needing)
            except (CheckpointNotFoundError, DamagedError):
                assert kind == "record"
                assert one in needing


def test_damaged_link_restores_the_newest_whole_checkpoint(store):
    with Checkpointer(store, **OPTIONS) as ckpt:
        place = place_of(ckpt.open(1), TENSOR)
        files = files_of(store)
        flip(files, place.blob, None, place.offset)
        put(store, files)
        target = state(9)
        assert ckpt.restore(target, on_damage="fallback").step == 0
        assert same(target, state(0))


# -- lying records with right digests --------------------------------------------------------------


def forged(store, change, step=2):
    put(store, forge(files_of(store), change, number=step))


def refused(store, step=2, match=None):
    """No byte of the forged step is read as a value, and no blob for it; the others are whole."""
    faulty = FaultyBackend(store)
    with Checkpointer(faulty, **OPTIONS) as ckpt:
        for read in (ckpt.load, lambda s: ckpt.open(s)[TENSOR]):
            with pytest.raises(DamagedError, match=match):
                read(step)
        assert not [n for op, names in faulty.calls if op == "read" for n in names if "blobs/" in n]
        target = state(9)
        with pytest.raises(DamagedError, match=match):
            ckpt.restore(target, step)
        with suppress(DamagedError):  # of the commit record
            assert not ckpt.verify(step).ok
        for one in set(STEPS) - {step}:
            assert same(ckpt.load(one), state(one))


def bases(change):
    """Changes the column of bases of the section."""

    def changed(level, value):
        if level == "section":
            frames = value["frames"]
            frames["base"] = change(list(frames["base"]), frames)
        return value

    return changed


def encoded(frames):
    return [n for n, chain in enumerate(frames["chain"]) if chain]


def set_base(number, value):
    def change(column, frames):
        column[number(column, frames)] = value(column, frames)
        return column

    return bases(change)


def last(column, _frames):
    return max(n for n, base in enumerate(column) if base is not None)


def first(frames, *, length):
    return frames["raw_length"].index(length)


def is_raw(frames, number, length):
    return not frames["chain"][number] and length == 4000


FORGED_BASES = {
    "itself": set_base(last, last),
    "a later one": set_base(lambda *_: 0, lambda column, _: len(column) - 1),
    "none there is": set_base(last, lambda column, _: len(column)),
    "negative": set_base(last, lambda *_: -1),
    "a text": set_base(last, lambda *_: "0"),
    "true": set_base(last, lambda *_: True),
    "huge": set_base(last, lambda *_: 1 << 70),
    "another length": set_base(last, lambda column, frames: first(frames, length=4000)),
    "of a raw frame": set_base(
        lambda _, frames: next(
            n for n, length in enumerate(frames["raw_length"]) if is_raw(frames, n, length)
        ),
        lambda _, frames: first(frames, length=4000),
    ),
    "too few": bases(lambda column, _: column[:-1]),
    "no list": bases(lambda *_: {"0": 0}),
}


def test_an_impossible_base_is_refused(store, saved):
    for change in FORGED_BASES.values():
        put(store, saved)
        forged(store, change)
        refused(store)


def test_a_base_beyond_its_codecs_bound_is_refused_unread(store):
    """Its memory is allocated before it is read."""

    def change(level, value):
        if level == "section":
            frames = value["frames"]
            deepest = [b for b in frames["base"] if b is not None and frames["base"][b] is None]
            for number in deepest:
                frames["offset"][number] = 0
                frames["length"][number] = 20_000
        return value

    forged(store, change)
    refused(store, match="its codecs make at most")


def test_a_chain_above_the_limit_is_refused():
    store = memory()
    count = MAX_LINKS + 1
    tensor = torch.randn(count, 2048, generator=torch.Generator().manual_seed(1))
    with Checkpointer(store, rules=RULES, **OPTIONS) as ckpt:
        for step in range(2):
            ckpt.save({"model": tensor + 1e-6 * step * tensor.sign()}, step, mode="blocking")

    def chained(links):
        def change(column, frames):
            same_length = [n for n in encoded(frames) if frames["raw_length"][n] == 8192][:links]
            column = [None] * len(column)
            for before, number in itertools.pairwise(same_length):
                column[number] = before
            return column

        return bases(change)

    good = files_of(store)
    put(store, forge(good, chained(MAX_LINKS + 1), number=1))
    with Checkpointer(store, **OPTIONS) as ckpt:
        with pytest.raises(DamagedError, match=f"decodes with more than {MAX_LINKS} frames"):
            ckpt.load(1)
        assert torch.equal(ckpt.load(0)["model"], tensor)
    put(store, forge(good, chained(MAX_LINKS), number=1))
    with Checkpointer(store, **OPTIONS) as ckpt:
        assert ckpt.open(1).contents.manifest.section(0, 0)


def borrowed(change):
    """Changes the blobs of other saves in the record, not in the head that it binds."""

    def changed(level, value):
        if level == "body":
            value["borrowed"] = change(value["borrowed"])
        return value

    return changed


def with_first(rows, name=lambda n: n, length=lambda n: n):
    return [[name(rows[0][0]), length(rows[0][1])], *rows[1:]]


FORGED_LOANS = {
    "twice": lambda rows: [rows[0], *rows],
    "descending": lambda rows: rows[::-1],
    "no uid": lambda rows: with_first(rows, name=lambda n: n.replace("data/", "data/x")),
    "longer": lambda rows: with_first(rows, length=lambda n: n + 1),
    "negative": lambda rows: with_first(rows, length=lambda _: -1),
    "a text": lambda rows: with_first(rows, length=str),
    "left out": lambda rows: rows[1:],
    "none": lambda _: [],
    "no list": lambda _: {"0": 0},
}


def test_impossible_borrowed_blobs_are_refused(store, saved):
    for change in FORGED_LOANS.values():
        put(store, saved)
        forged(store, borrowed(change))
        refused(store)


@pytest.mark.parametrize("lie", ["longer", "elsewhere"])
def test_consistent_lies_about_borrowed_blobs_are_found(lie, store):
    with Checkpointer(store, **OPTIONS) as ckpt:
        uid = ckpt._catalog.record(0).uid

    def tell(rows):
        changed = []
        for name, length in rows:
            if uid not in name:
                changed.append([name, length])
            elif lie == "longer":
                changed.append([name, length + 4096])
            else:
                changed.append([name.replace(uid, "0" * 32), length])
        return sorted(changed)

    def change(level, value):
        if level == "head":
            value["blobs"] = [tell([row])[0] for row in value["blobs"]]
        if level == "body":
            value["borrowed"] = tell(value["borrowed"])
        return value

    forged(store, change)
    with Checkpointer(store, **OPTIONS) as ckpt:
        report = ckpt.verify(2)
        assert not report.ok
        assert any((uid if lie == "longer" else "0" * 32) in d.what for d in report.damaged)
        try:
            assert same(ckpt.load(2), state(2))
            assert lie == "longer"  # the needed bytes are there, and are right
        except DamagedError:
            assert lie == "elsewhere"
        assert same(ckpt.load(1), state(1))


def test_a_missing_codec_of_a_base_fails_before_data_is_read(store):
    def change(level, value):
        if level == "head":
            # The base of all was encoded without `delta`, by another chain.
            (chain,) = [c for c in value["chains"] if [link[0] for link in c] == ["zstd"]]
            chain[0][0] = "acme"
        return value

    forged(store, change)
    faulty = FaultyBackend(store)
    with Checkpointer(faulty, **OPTIONS) as ckpt:
        for read in (
            ckpt.load,
            lambda s: ckpt.open(s)[TENSOR],
            lambda s: ckpt.restore(state(9), s),
        ):
            with pytest.raises(PluginError, match="acme"):
                read(2)
        assert not [n for op, names in faulty.calls if op == "read" for n in names if "blobs/" in n]
        report = ckpt.verify(2)
        assert report.not_decoded
        assert report.ok
