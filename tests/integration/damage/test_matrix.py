"""Every kind of stored byte, under every kind of damage, to every reader: named, or harmless."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
from tests.integration.support import ENCODED, Run, blank, make_state, place_of, same

from penstock import CheckpointNotFoundError, DamagedError
from penstock.core.cli.commands.ls import list_run
from penstock.core.format.records import data_uid, intent_name
from penstock.core.storage.open import open_backend

STEP = 2
VALUES = frozenset({"restore", "load", "open", "region"})
BOTH = frozenset({"verify", "quick"})
READERS = sorted({*VALUES, *BOTH, "ls"})


class Stage:
    """Step 1, and step 2 in its second generation; the first one's data is kept aside."""

    def __init__(self, folder):
        self.run = Run(folder / "root")
        self.saved = make_state(STEP)
        with self.run.open(**ENCODED) as ckpt:
            ckpt.save(make_state(1), 1, mode="blocking")
            ckpt.save(make_state(7), STEP, mode="blocking")
            self.old = self.run.copy_to(folder / "old")
            ckpt.save(self.saved, STEP, mode="blocking", overwrite=True)
        self.ckpt = self.run.open()
        self.outside = folder / "outside"
        self.told = []  # texts of the errors
        self.pieces = pieces_of(self.run, self.ckpt.open(STEP), 2)
        self.of_step_1 = pieces_of(self.run, self.ckpt.open(1), 0)
        with self.old.open() as old:
            self.older = pieces_of(self.old, old.open(STEP), 0)

    def outcomes(self, path):
        """The findings of each reader: none, or the names of damaged objects."""
        ckpt, saved = self.ckpt, self.saved
        found = {}

        def attempt(reader, read, expected):
            try:
                got = read()
            except CheckpointNotFoundError as error:
                assert f"step {STEP}" in str(error) or "no checkpoint" in str(error)  # noqa: PT017 - it may be read
                found[reader] = None
            except DamagedError as error:
                assert error.damaged  # noqa: PT017 - it may be read
                assert any(name in str(error) for name in error.damaged)  # noqa: PT017 - it may be read
                self.told.append(str(error))
                found[reader] = set(error.damaged)
            else:
                assert same(got, expected), f"{reader} returned wrong values"
                found[reader] = set()

        def restore():
            tree = blank(saved)
            ckpt.restore(tree, STEP)
            return tree

        def report(deep):
            try:
                report = ckpt.verify(STEP, deep=deep)
            except CheckpointNotFoundError:
                return None
            except DamagedError as error:  # the commit record: nothing verifies it
                return set(error.damaged)
            assert report.ok is (not report.damaged)
            assert all(damage.detail for damage in report.damaged)
            if deep:
                self.links = [str(link) for link in report.links]
            return {damage.what for damage in report.damaged}

        def ls():
            with closing(open_backend(self.ckpt._backend.url, light=True)) as backend:
                listed = {one.step: one for one in list_run(backend)}
            assert listed[1].error is None
            if STEP not in listed:
                return None
            return {listed[STEP].error} if listed[STEP].error else set()

        value = saved
        for segment in path.split("/"):
            value = value[segment]
        attempt("restore", restore, saved)
        attempt("load", lambda: ckpt.load(STEP), saved)
        attempt("open", lambda: ckpt.open(STEP)[path], value)
        attempt("region", lambda: ckpt.open(STEP).read(path, (slice(1, 6),)), value[1:6])
        found["verify"], found["quick"], found["ls"] = report(deep=True), report(deep=False), ls()
        return found


@dataclass(frozen=True)
class Piece:
    """Bytes of one kind in one file.

    Attributes:
        name: The file.
        start: First byte.
        stop: After the last one.
        sees: Readers that must notice a change.
        path: The object read alone.
        twin: The place of others of the same kind in this file.
    """

    name: str
    start: int
    stop: int
    sees: frozenset[str]
    path: str = "model/weight"
    twin: tuple[int, int] | None = None


def pieces_of(run, checkpoint, generation):
    """One of each kind of stored bytes of a checkpoint."""
    uid = checkpoint.info.uid
    contents = checkpoint.contents
    intent, commit = intent_name(uid), run.commit(checkpoint.step, generation)
    part, index = f"data/{uid}/parts/00000.json.zst", f"data/{uid}/index"
    head = contents.manifest.head(0)
    index_head = contents.record.index.head_length
    shards, section = head.shards, head.sections[0]
    line = run.read(commit).index(b"\n")
    everyone = VALUES | BOTH
    numbers = [place_of(checkpoint, "model/weight", n) for n in (0, 1, 2)]
    encoded = [place_of(checkpoint, "optimizer/moment", n) for n in (0, 1)]
    slab, encoded_slab = (place_of(checkpoint, p) for p in ("model/bias", "optimizer/variance"))
    inside, gap = padding_of(checkpoint, slab), gap_of(checkpoint, slab.blob)
    deep = VALUES | {"verify"}

    def of(place, sees, path, twin=None):
        return Piece(place.blob, place.offset, place.offset + place.length, sees, path, twin)

    return {
        "intent header": Piece(intent, 0, run.read(intent).index(b"\n"), frozenset()),
        "intent body": Piece(
            intent, run.read(intent).index(b"\n") + 1, len(run.read(intent)), frozenset()
        ),
        "commit header": Piece(commit, 0, line, everyone | {"ls"}),
        "commit body": Piece(commit, line + 1, len(run.read(commit)), everyone | {"ls"}),
        "part head": Piece(part, 0, shards.offset, everyone),
        "shard table": Piece(part, shards.offset, section.offset, BOTH),
        "section": Piece(part, section.offset, section.offset + section.length, everyone),
        "index head": Piece(index, 0, index_head, BOTH | {"open", "region"}),
        "index block": Piece(index, index_head, len(run.read(index)), BOTH | {"open", "region"}),
        "raw frame": Piece(  # within the rows read as a region
            numbers[0].blob,
            numbers[0].offset + 700,
            numbers[0].offset + 1700,
            deep,
            twin=(numbers[1].offset, numbers[1].offset + 1000),
        ),
        "slab": of(slab, deep, "model/bias", (numbers[2].offset, numbers[2].offset + 512)),
        "slab padding": Piece(slab.blob, *inside, deep, "model/bias"),
        "gap": Piece(slab.blob, *gap, frozenset(), "model/bias"),
        "encoded frame": of(
            encoded[0], deep, "optimizer/moment", (encoded[1].offset, encoded[1].offset + 4096)
        ),
        "encoded slab": of(encoded_slab, deep, "optimizer/variance"),
    }  # fmt: skip


def padding_of(checkpoint, place):
    """Bytes of a slab outside its objects."""
    contents, used = checkpoint.contents, []
    section = contents.manifest.section(0, 0)
    for record in section.objects:
        for ref in (r for shard in record.shards for r in shard.chunks):
            frame = section.frames[ref.frame]
            blob = contents.manifest.head(0).blobs[frame.blob].name
            if (blob, frame.offset) == (place.blob, place.offset):
                used.append((place.offset + ref.at, place.offset + ref.at + ref.stop - ref.start))
    return next(
        (stop, start) for (_, stop), (start, _) in zip(sorted(used), sorted(used)[1:], strict=False)
        if stop < start
    )  # fmt: skip


def gap_of(checkpoint, name):
    """Bytes between two frames of a blob."""
    contents = checkpoint.contents
    spans = sorted(
        (f.offset, f.offset + f.length)
        for f in contents.manifest.section(0, 0).frames
        if contents.manifest.head(0).blobs[f.blob].name == name
    )
    return next((b, c) for (_, b), (c, _) in itertools.pairwise(spans) if b < c)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    stage = Stage(tmp_path_factory.mktemp("matrix"))
    yield stage
    stage.ckpt.close()


def moved(number):
    """A state whose optimizer changes a little, and whose table changes; the model does not."""
    state, drift = make_state(0), make_state(1)["optimizer"]
    for name, tensor in state["optimizer"].items():
        tensor.add_(drift[name], alpha=1e-6 * number)
    return {**state, "table": state["table"] + number, "epoch": number}


class Chained(Stage):
    """Step 2 is encoded against its older generation, which is gone, and that against step 1. It
    also borrows unchanged data from step 1. Step 0 shares no data with them.
    """

    def __init__(self, folder):
        self.run = Run(folder / "root")
        self.saved = moved(STEP)
        rules = [{"match": "optimizer/**", "codecs": ["delta", "zstd"]}]
        with self.run.open() as ckpt:
            ckpt.save(moved(0), 0, mode="blocking")
        for every, step, number in ((1, 1, 1), (9, STEP, 1.5), (9, STEP, STEP)):
            options = {"rules": rules, "share": True, "deltas": {"every": every}}
            with self.run.open(**options) as ckpt:
                ckpt.save(moved(number), step, mode="blocking", overwrite=step == STEP)
        self.ckpt = self.run.open()
        self.outside = folder / "outside"
        self.told = []
        self.pieces = pieces_of_chain(self.run, self.ckpt)


def pieces_of_chain(run, ckpt):
    """The parts of step 2 in the blobs of others, by owner; and the other parts of these blobs."""
    checkpoint, deep = ckpt.open(STEP), VALUES | {"verify"}
    uid, table = ckpt.open(1).info.uid, place_of(ckpt.open(1), "table")

    def of(path, link=0):
        place = place_of(checkpoint, path, link=link)
        return Piece(place.blob, place.offset, place.offset + place.length, deep, path)

    def unseen(name):
        return Piece(name, 0, len(run.read(name)), frozenset())

    whole = of("model/weight")  # a region reads the first block
    pieces = {
        "shared raw frame": replace(whole, start=whole.start + 700, stop=whole.start + 1700),
        "shared slab": of("model/bias"),
        "own differences": of("optimizer/moment"),
        "own slab of differences": of("optimizer/variance"),
        "link": of("optimizer/moment", 1),
        "link of a slab": of("optimizer/variance", 1),
        "last link": of("optimizer/moment", 2),
        "part of a lender": unseen(f"data/{uid}/parts/00000.json.zst"),
        "raw frame of a lender": replace(
            unseen(table.blob), start=table.offset, stop=table.offset + table.length
        ),
    }
    uids = {"own": checkpoint.info.uid, "step 1": uid, "nobody": uid}
    for kind, piece in pieces.items():
        owner = uids.setdefault(LENT[kind], data_uid(piece.name))
        assert data_uid(piece.name) == owner, kind
    assert len(set(uids.values())) == 3
    return pieces


@pytest.fixture(scope="module")
def chained(tmp_path_factory):
    stage = Chained(tmp_path_factory.mktemp("chained"))
    yield stage
    stage.ckpt.close()


@pytest.fixture(scope="module")
def cells():
    """Counts the cells by outcome, and prints them in the end."""
    counted = Counter()
    yield counted
    print(f"\ncells: {sum(counted.values())} {dict(counted)}")


def check(stage, cells, expected, path="model/weight", either=frozenset()):
    """Run every reader; exactly those of `expected` notice, all others return the saved state. The
    data of those in `either` may be elsewhere: they do one or the other.
    """
    found = stage.outcomes(path)
    assert sorted(found) == READERS
    noticed = {reader for reader, names in found.items() if names != set()}
    assert noticed - either == expected - either, found
    for names in found.values():
        cells["harmless" if names == set() else "absent" if names is None else "named"] += 1
    return found


# -- bytes within a file --------------------------------------------------------------------------

KINDS = [
    "intent header", "intent body", "commit header", "commit body", "part head", "shard table",
    "section", "index head", "index block", "raw frame", "slab", "slab padding", "gap",
    "encoded frame", "encoded slab",
]  # fmt: skip


def flip(at):
    def damage(stage, kind, data, piece):
        where = {"first": piece.start, "middle": (piece.start + piece.stop) // 2}.get(
            at, piece.stop - 1
        )
        return data[:where] + bytes([data[where] ^ 0x04]) + data[where + 1 :]

    damage.__name__ = f"flip_{at}"
    return damage


def zeroed(stage, kind, data, piece):
    return data[: piece.start] + bytes(piece.stop - piece.start) + data[piece.stop :]


def of_another_checkpoint(stage, kind, data, piece):
    return _spliced(stage.run, data, piece, stage.of_step_1[kind])


def of_an_older_generation(stage, kind, data, piece):
    return _spliced(stage.old, data, piece, stage.older[kind])


def _spliced(run, data, piece, other):
    new = run.read(other.name)[other.start : other.stop]
    if "blobs" in piece.name:  # the rest stays in place
        new = new[: piece.stop - piece.start].ljust(piece.stop - piece.start, b"\0")
    return data[: piece.start] + new + data[piece.stop :]


def of_another_object(stage, kind, data, piece):
    if piece.twin is None:
        return data
    new = data[piece.twin[0] : piece.twin[1]][: piece.stop - piece.start]
    return data[: piece.start] + new + data[piece.start + len(new) :]


WITHIN = [
    flip("first"), flip("middle"), flip("last"), zeroed, of_another_checkpoint,
    of_an_older_generation, of_another_object,
]  # fmt: skip


@pytest.mark.parametrize(
    "damages",
    [[flip("middle"), of_an_older_generation], pytest.param(WITHIN, marks=pytest.mark.slow)],
    ids=["two", "all"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_bytes_are_named_by_every_reader(kind, damages, stage, cells):
    piece = stage.pieces[kind]
    data = stage.run.read(piece.name)
    changed = 0
    for damage in damages:
        new = damage(stage, kind, data, piece)
        if new == data:
            continue
        stage.run.write(piece.name, new)
        try:
            check(stage, cells, piece.sees, piece.path)
            changed += 1
        finally:
            stage.run.write(piece.name, data)
    assert changed >= (3 if damages is WITHIN else 1)  # of zeros only the flips


# -- whole files ----------------------------------------------------------------------------------

FILES = {
    "intent": ("intent body", frozenset()),
    "commit": ("commit body", VALUES | BOTH | {"ls"}),
    "part": ("section", VALUES | BOTH),
    "index": ("index block", BOTH | {"open", "region"}),
    "raw blob": ("raw frame", VALUES | BOTH),
    "encoded blob": ("encoded frame", VALUES | BOTH),
}


def missing(stage, path, data):
    path.unlink()


def empty(stage, path, data):
    path.write_bytes(b"")


def half(stage, path, data):
    path.write_bytes(data[: len(data) // 2])


def appended(stage, path, data):
    path.write_bytes(data + b"rubbish")


def a_folder(stage, path, data):
    path.unlink()
    path.mkdir()
    (path / "inside").write_bytes(data)


# Links and pipes in place of files are those of `test_hostile`.
CUT = [empty, half]
REPLACED = [missing, a_folder]


def pairs(files, damages, quick):
    """All pairs; those with a damage that is not in `quick` are slow."""
    return [
        pytest.param(
            what, damage, id=f"{what}-{damage.__name__}",
            marks=() if damage in quick else pytest.mark.slow,
        )
        for what, damage in itertools.product(files, damages)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "damage"),
    pairs(FILES, [*CUT, appended, *REPLACED], quick=[missing, half, appended]),
)
def test_a_cut_or_replaced_file_is_named(what, damage, stage, cells):
    kind, expected = FILES[what]
    piece = stage.pieces[kind]
    path = stage.run.root / piece.name
    data = path.read_bytes()
    object_path = piece.path
    if damage is appended and what not in {"commit", "intent"}:
        expected = BOTH  # readers do not read past the recorded end
    cut_blob = damage in CUT and what.endswith("blob")
    either = {"open", "region"} if cut_blob else set()  # of an object that may come before the cut
    try:
        damage(stage, path, data)
        found = check(stage, cells, expected, object_path, either)
        if damage is missing and what == "commit":
            assert set(found.values()) == {None}  # without its name there is no checkpoint
    finally:
        if path.is_dir():
            shutil.rmtree(path)
        path.write_bytes(data)


# -- data of a checkpoint in the blobs of others ---------------------------------------------------

TOLD = {
    "own": "Restore an older step",
    "replaced": "in the blobs of step 2 (replaced), which step 2 is encoded against: its chain is "
    "step 2, step 2 (replaced), step 1. Restore step 1, the newest older one that does not need it",
    "step 1": "in the blobs of step 1, which step 2 is encoded against: its chain is "
    "step 2, step 2 (replaced), step 1. Restore step 0, the newest older one that does not need it",
    "nobody": "",
}
LENT = {  # by the owner of its blob, or whether the step needs it at all
    "own differences": "own", "own slab of differences": "own",
    "link": "replaced", "link of a slab": "replaced",
    "last link": "step 1", "shared raw frame": "step 1", "shared slab": "step 1",
    "part of a lender": "nobody", "raw frame of a lender": "nobody",
}  # fmt: skip
LINKS = {"own": [], "replaced": ["step 2 (replaced)"], "step 1": ["step 1"], "nobody": []}


def of_another_link(stage, kind, data, piece):
    other = stage.pieces["last link" if kind != "last link" else "link"]
    return _spliced(stage.run, data, piece, other)


def check_errors(chained, owner):
    """Every reader named the link, the chain and the step to fall back to; so did `verify`."""
    assert all(TOLD[owner] in text for text in chained.told), chained.told
    assert chained.links == LINKS[owner]
    chained.told.clear()


@pytest.mark.parametrize(
    "damages",
    [
        [flip("middle")],
        pytest.param(
            [flip("first"), flip("last"), zeroed, of_another_link], marks=pytest.mark.slow
        ),
    ],
    ids=["one", "others"],
)
@pytest.mark.parametrize("kind", LENT)
def test_changed_bytes_of_a_chain_are_named_with_the_link_and_the_step_to_restore(
    kind, damages, chained, cells
):
    piece, owner = chained.pieces[kind], LENT[kind]
    data = chained.run.read(piece.name)
    for damage in damages:
        chained.run.write(piece.name, damage(chained, kind, data, piece))
        assert chained.run.read(piece.name) != data
        try:
            check(chained, cells, piece.sees, piece.path)
        finally:
            chained.run.write(piece.name, data)
        check_errors(chained, owner)


@pytest.mark.parametrize(
    ("kind", "damage"),
    pairs(["shared raw frame", "link", "last link"], [missing, half, a_folder], quick=[half]),
)
def test_a_lost_or_cut_blob_of_a_chain_is_named_with_the_link(kind, damage, chained, cells):
    piece = chained.pieces[kind]
    path = chained.run.root / piece.name
    data = path.read_bytes()
    either = {"open", "region"} if damage is half else set()  # of data that may come before the cut
    try:
        damage(chained, path, data)
        check(chained, cells, VALUES | BOTH, piece.path, either)
    finally:
        if path.is_dir():
            shutil.rmtree(path)
        path.write_bytes(data)
    check_errors(chained, LENT[kind])


@pytest.mark.parametrize(
    ("kind", "fell_back"),
    [("own differences", (2,)), ("link", (2,)), ("last link", (2, 1)), ("shared slab", (2, 1))],
)
def test_fallback_takes_the_newest_step_without_the_damaged_link(kind, fell_back, chained):
    piece = chained.pieces[kind]
    at = (piece.start + piece.stop) // 2
    chained.run.flip(piece.name, at)
    tree = blank(chained.saved)
    try:
        report = chained.ckpt.restore(tree, on_damage="fallback")
    finally:
        chained.run.flip(piece.name, at)
    assert report.fell_back_from == fell_back
    assert report.step == fell_back[-1] - 1
    assert same(tree, moved(report.step))
    assert chained.ckpt.verify(STEP).ok


# -- names, and records of earlier times -----------------------------------------------------------


def test_the_record_of_an_older_generation_is_not_read(stage, cells):
    name = stage.older["commit body"].name
    stage.run.write(name, stage.old.read(name))
    try:
        check(stage, cells, set())
    finally:
        stage.run.remove(name)


@pytest.mark.parametrize(
    "name", [f"commits/{STEP:08d}-4.json", "commits/00000003-0.json"], ids=["generation", "step"]
)
def test_a_record_under_another_name_is_damage(name, stage, cells):
    stage.run.write(name, stage.run.read(stage.pieces["commit body"].name))
    try:
        if "-4" in name:
            check(stage, cells, VALUES | BOTH | {"ls"})
        else:
            with pytest.raises(DamagedError, match=name):
                stage.ckpt.load()
            check(stage, cells, set())
    finally:
        stage.run.remove(name)


def test_data_under_another_uid_is_missing(stage, cells):
    folder = (stage.run.root / stage.pieces["section"].name).parents[1]
    folder.rename(folder.with_name("0" * 32))
    try:
        check(stage, cells, VALUES | BOTH)
    finally:
        folder.with_name("0" * 32).rename(folder)


def test_a_restored_whole_older_generation_reads_as_before(stage):
    """Replay of a whole, old checkpoint is not detected: no digest can show it."""
    names = [n for n in stage.old.names("**/*") if (stage.old.root / n).is_file()]
    newest = stage.pieces["commit body"].name
    data = stage.run.read(newest)
    made = [n for n in names if not (stage.run.root / n).exists()]
    for name in made:
        (stage.run.root / name).parent.mkdir(parents=True, exist_ok=True)
        stage.run.write(name, stage.old.read(name))
    stage.run.remove(newest)
    try:
        assert same(stage.ckpt.load(STEP), make_state(7))
    finally:
        stage.run.write(newest, data)
        for name in made:
            stage.run.remove(name)


# -- several damages at once -----------------------------------------------------------------------


def test_verify_reports_damage_of_every_kind_at_once(stage):
    kinds = ["shard table", "index block", "raw frame", "slab", "encoded frame", "encoded slab"]
    before = {stage.pieces[kind].name: stage.run.read(stage.pieces[kind].name) for kind in kinds}
    try:
        for kind in kinds:
            stage.run.flip(stage.pieces[kind].name, stage.pieces[kind].start)
        found = {damage.what for damage in stage.ckpt.verify(STEP).damaged}
    finally:
        for name, data in before.items():
            stage.run.write(name, data)
    expected = {"model/weight", "model/bias", "optimizer/moment", "optimizer/variance"}
    assert expected <= found
    assert {stage.pieces["index block"].name, stage.pieces["shard table"].name} <= found


@pytest.mark.parametrize("kind", ["commit body", "section", "index block", "encoded slab"])
def test_fallback_takes_the_older_step_and_logs_it(kind, stage, caplog):
    piece = stage.pieces[kind]
    at = (piece.start + piece.stop) // 2
    stage.run.flip(piece.name, at)
    tree = blank(stage.saved)
    try:
        report = stage.ckpt.restore(tree, on_damage="fallback")
    finally:
        stage.run.flip(piece.name, at)
    if piece.sees >= {"restore"}:
        assert (report.step, report.fell_back_from) == (1, (STEP,))
        assert same(tree, make_state(1))
        assert f"step {STEP} is damaged" in caplog.text
    else:
        assert (report.step, report.fell_back_from) == (STEP, ())
        assert same(tree, stage.saved)
