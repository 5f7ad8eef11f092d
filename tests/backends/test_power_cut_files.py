"""Power cuts between any two effects on the file system: all promises hold."""

import os
import random
import shutil
import time
from contextlib import closing
from functools import partial

import pytest
from tests.backends.conftest import open_backend
from tests.backends.files_without_power import (
    ALL_KEPT,
    ALL_LOST,
    DATA_KEPT,
    NAMES_KEPT,
    Loss,
    Watched,
    lay_out,
)
from tests.integration.atomic.crash_scenarios import BOTH, DAY_S, contents, opened, save

from penstock.core.catalog.survey import survey_records
from penstock.core.types import WriteRequest
from penstock.testing.expectations import pattern

ROOT = "runs/gpt"  # neither exists before
LIMIT = 1 << 20
ANY = "anything"  # of a blob that is not sealed: any bytes, or nothing


@pytest.fixture
def base(tmp_path):
    base = tmp_path / "disk"
    base.mkdir()
    return base


def losses(number, *, seeds=0):
    """Outcomes of a cut at moment `number`."""
    chances = [Loss(chance=random.Random(f"{number} {seed}")) for seed in range(seeds)]
    return [ALL_LOST, ALL_KEPT, NAMES_KEPT, DATA_KEPT, *chances]


def each_survivor(moments, folder, losses=losses):
    """`(moment, root)` for all possible outcomes, each only once."""
    seen = set()
    for number, moment in enumerate(moments):
        for loss in losses(number):
            survivors = moment.survivors(loss)
            key = repr(moment.promised), frozenset(survivors.items())
            if key in seen:
                continue
            seen.add(key)
            lay_out(survivors, folder / "left")
            yield moment, folder / "left" / ROOT
            shutil.rmtree(folder / "left")


class Ledger:
    """Name -> allowed contents, unless a promise differs; None: absent."""

    def __init__(self, backend, watched):
        self.backend = backend
        self.watched = watched
        self.may_hold = {}

    def change(self, **allowed):
        self.may_hold = {**self.may_hold, **allowed}
        self.watched.promise(self.may_hold)

    def publish(self, name, data, **options):
        self.change(**{name: [*self.may_hold.get(name, [None]), data]})
        self.backend.publish(name, data, **options)
        self.change(**{name: [data]})

    def begin(self, name):
        self.change(**{name: [ANY]})
        return self.backend.create(name)

    def seal(self, writer, name, data):
        writer.write([WriteRequest(0, (memoryview(data),))])
        writer.seal(len(data))
        self.change(**{name: [data]})

    def delete(self, *names):
        self.change(**{name: [*self.may_hold[name], None] for name in names})
        self.backend.delete(names)
        self.change(**{name: [None] for name in names})


def do_everything(ledger):
    """The calls of engines; twice, since the second run finds the first's folders."""
    left_open = ledger.begin("data/1/other")  # it has created folders, and never syncs them
    for number in (1, 2):
        data = f"data/{number}"
        ledger.publish(f"{data}/intent", b"intent" * 200)
        writer = ledger.begin(f"{data}/blobs/0.raw")
        ledger.seal(writer, f"{data}/blobs/0.raw", pattern(9000, number))
        ledger.publish(f"{data}/intent", b"again!" * 100)
        ledger.begin(f"{data}/blobs/0.enc").abort()
        ledger.publish(f"{data}/parts/0", pattern(1500, number))
        ledger.publish(f"commits/{number}", b"commit" * 100, exclusive=True)
    left_open.abort()
    ledger.delete("commits/1")
    ledger.delete("data/1/intent", "data/1/blobs/0.raw", "data/1/parts/0")


def check(may_hold, root):
    with closing(open_backend("posix-off", root)) as backend:
        found = {
            info.name: backend.read_record(info.name, limit_bytes=LIMIT)
            for info in backend.list("")
        }
    for name, allowed in may_hold.items():
        if ANY not in allowed:
            assert found.get(name) in allowed, f"{name} is lost, torn or back"
    assert found.keys() <= may_hold.keys()


@pytest.mark.parametrize(
    ("kind", "root_is"),
    [
        ("posix-off", "missing"),
        ("posix-off", "made by another"),
        pytest.param("posix-auto", "missing", marks=pytest.mark.slow),
        ("uring-auto", "missing"),
    ],
)
@pytest.mark.parametrize("seeds", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_completed_calls_survive_a_cut_at_any_effect(kind, root_is, seeds, base, tmp_path):
    if root_is != "missing":
        (base / ROOT).parent.mkdir()
    watched = Watched(base)
    watched.promised = {}
    small = {"allocate_bytes": 16384}  # or each cut would leave the reserved space
    with watched.watching(), closing(open_backend(kind, base / ROOT, **small)) as backend:
        if root_is != "missing":
            (base / ROOT).mkdir()  # by a writer without syncs
        do_everything(Ledger(backend, watched))
    checked = 0
    for moment, root in each_survivor(watched.moments, tmp_path, partial(losses, seeds=seeds)):
        try:
            check(moment.promised, root)
        except AssertionError as error:
            error.add_note(f"the power went before {moment.before}")
            raise
        checked += 1
    print(f"{kind}: {checked} different outcomes of cuts at {len(watched.moments)} moments")


def use_a_run(kind, base):
    """Save, overwrite and delete; the moments promise a tuple of what the run may hold."""
    watched = Watched(base)
    watched.promised = ends = ({},)
    with watched.watching(), closing(open_backend(kind, base / ROOT)) as backend:

        def do(action, end):
            nonlocal ends
            watched.promise((*ends, end))
            action()
            watched.promise(ends := (end,))

        with opened(backend, **BOTH) as ckpt:
            do(lambda: save(ckpt, 1, 1, mode="blocking"), {1: 1})
            do(lambda: save(ckpt, 2, 2), {1: 1, 2: 2})
            do(lambda: save(ckpt, 2, 20, mode="blocking", overwrite=True), {1: 1, 2: 20})
            ckpt._saver.job.released.wait()  # the older generation is deleted after it
            do(lambda: ckpt.delete(1), {2: 20})
    return watched.moments


@pytest.mark.parametrize(("stride", "seeds"), [(5, 0), pytest.param(1, 4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["posix", "uring"])
def test_a_run_in_files_survives_a_cut_at_any_effect(kind, stride, seeds, base, tmp_path):
    moments = use_a_run(kind, base)[::stride]
    checked = 0
    for moment, root in each_survivor(moments, tmp_path, partial(losses, seeds=seeds)):
        with closing(open_backend("posix-off", root)) as left, opened(left) as ckpt:
            found = contents(ckpt)
            assert found in moment.promised, f"cut before {moment.before}"
        checked += 1
    print(f"{kind}: {checked} different outcomes of cuts at {len(moments)} moments")


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_later_prune_deletes_files_of_a_crash(stride, base, tmp_path):
    watched = Watched(base)
    with (
        watched.watching(),
        closing(open_backend("posix", base / ROOT)) as backend,
        opened(backend, **BOTH) as ckpt,
    ):
        save(ckpt, 1, 1, mode="blocking")
    stays = {}
    moments = watched.moments[::stride]
    for moment, root in each_survivor(moments, tmp_path, losses=lambda _: [ALL_KEPT]):
        old_s = time.time() - 2 * DAY_S
        for path in root.rglob("*"):
            os.utime(path, (old_s, old_s))
        with closing(open_backend("posix-off", root)) as backend, opened(backend) as ckpt:
            for step in (2, 3):
                save(ckpt, step, step)
            ckpt.delete(2)
            ckpt.prune()
            needed = survey_records(backend).needed
        for path in root.rglob("*"):
            if path.name.startswith("~") or (
                path.parent.name == "data" and path.name not in needed
            ):
                stays[str(path.relative_to(root))] = moment.before
    assert not stays
