"""`verify(repair=True)` of tiers in folders: bad copies are replaced, good ones never go."""

import shutil
import threading

import pytest
from tests.core.cli.command import caller
from tests.integration.support import TINY, FlyingClock, checkpointer, make_state, same
from tests.integration.tiers.places import Folders, Places

from penstock import (
    Checkpointer,
    CheckpointGoneError,
    StorageError,
    StorageTimeoutError,
)
from penstock.core.abc import Tier
from penstock.core.catalog.catalog import Catalog
from penstock.core.storage.open import open_backend
from penstock.core.tiers.eviction import Eviction
from penstock.core.tiers.whereabouts import is_marked, mark
from penstock.testing.faults import Fault, FaultyBackend, WrapperBackend


@pytest.fixture(scope="module")
def saved_folders(tmp_path_factory):
    made = Folders(tmp_path_factory.mktemp("saved"))
    with made.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    return made


@pytest.fixture
def folders(saved_folders, tmp_path):
    return saved_folders.copy_to(tmp_path)


@pytest.fixture
def call(capsys, monkeypatch):
    return caller(capsys, monkeypatch)


def blob_in(place):
    (found,) = place.glob("data/*/blobs/*.raw")
    return found


def damage(place, how):
    target = next(place.glob("commits/*")) if how == "record" else blob_in(place)
    data = bytearray(target.read_bytes())
    if how == "missing":
        target.unlink()
    elif how == "cut":
        target.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        target.write_bytes(data)


def whole(place):
    with Checkpointer(f"posix://{place}") as alone:
        return alone.steps() == [1] and alone.verify(1).ok


def every_file(*places):
    return {p: p.read_bytes() for place in places for p in place.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("bad", "how"),
    [("fast", "flip"), ("durable", "missing"), ("durable", "record")],
)
def test_a_bad_copy_is_replaced_from_the_good_one(folders, bad, how):
    other = {"fast": "durable", "durable": "fast"}[bad]
    damage(getattr(folders, bad), how)
    events = []
    with folders.open(on_event=events.append) as ckpt:
        assert not ckpt.verify(1).ok
        report = ckpt.verify(1, repair=True)
        assert report.ok
        assert report.damaged
        assert all(f"in tier {bad}" in one.detail for one in report.damaged)
        ((repair),) = report.repairs
        assert (repair.tier, repair.source, repair.error) == (bad, other, None)
        again = ckpt.verify(1, repair=True)
        assert (again.ok, again.damaged, again.repairs) == (True, (), ())
    assert [event.as_dict()["repairs"] for event in events] == [0, 1, 0]
    assert whole(folders.fast)
    assert whole(folders.durable)


@pytest.mark.parametrize("deep", [True, False])
def test_nothing_is_deleted_without_a_good_copy(folders, deep):
    damage(folders.fast, "missing")
    damage(folders.durable, "flip")  # not visible in sizes: found on reading
    before = every_file(folders.fast, folders.durable)
    with folders.open() as ckpt:
        report = ckpt.verify(1, deep=deep, repair=True)
    assert not report.ok
    assert {repair.source for repair in report.repairs} == {None}
    assert all(repair.error for repair in report.repairs)
    assert {d.detail.partition(":")[0] for d in report.damaged} == {
        "in tier fast",
        "in tier durable",
    }
    assert every_file(folders.fast, folders.durable) == before


def test_evicted_steps_are_not_copied_back(folders):
    Catalog(open_backend(f"posix://{folders.fast}")).delete(1)
    with folders.open() as ckpt:
        report = ckpt.verify(1, repair=True)
    assert (report.ok, report.repairs) == (True, ())
    assert not list(folders.fast.glob("data/*/*"))


def test_another_save_of_the_step_is_untouched(folders, tmp_path):
    with Checkpointer(f"posix://{tmp_path}/other") as ckpt:
        ckpt.save(make_state(9), 1).result(300)
    shutil.rmtree(folders.durable)
    shutil.move(tmp_path / "other", folders.durable)
    damage(folders.durable, "flip")
    before = every_file(folders.durable)
    with folders.open() as ckpt:
        report = ckpt.verify(1, repair=True)
        assert not report.ok
        ((repair),) = report.repairs
        assert (repair.tier, repair.source) == ("durable", None)
        assert "another save" in repair.error
        assert same(ckpt.load(1), make_state(1))
    assert every_file(folders.durable) == before


def test_a_repaired_step_stays_in_the_copy_queue(tmp_path):
    inner = {
        "type": "tiered",
        "fast": f"posix://{tmp_path}/memory",
        "durable": f"posix://{tmp_path}/nvme",
    }
    tiers = {
        "type": "tiered",
        "fast": inner,
        "durable": f"posix://{tmp_path}/store",
        "drain_every": 0,
    }
    with Checkpointer(tiers, **TINY) as ckpt:
        ckpt.save(make_state(1), 1).result(300)
        ckpt.wait()
    nvme = open_backend(f"posix://{tmp_path}/nvme")
    uid = Catalog(nvme).record(1).uid
    mark(nvme, uid, 1)
    damage(tmp_path / "nvme", "missing")
    with Checkpointer(tiers, **TINY) as ckpt:
        assert ckpt.verify(1, repair=True).ok
    assert is_marked(nvme, uid)
    assert not is_marked(open_backend(f"posix://{tmp_path}/memory"), uid)


def test_an_interrupted_repair_is_finished_by_the_next_process():
    places = Places()
    with places.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    name = next(i.name for i in places.durable.list("data/") if i.name.endswith(".raw"))
    places.durable.delete([name])
    refusing = FaultyBackend(places.other())
    refusing.add(Fault("create", times=None, error=StorageError("no route to host")))
    with places.open(durable=refusing) as ckpt:
        ((repair),) = ckpt.verify(1, repair=True).repairs
        assert (repair.source, "no route to host" in repair.error) == (None, True)
    assert places.steps() == ([1], [])
    assert [i.name for i in places.fast.list("data/") if i.name.endswith("/drain.json")]
    with places.open() as ckpt:
        ckpt.save(make_state(2), 2).result(300)
        assert ckpt.verify(1).ok
    assert places.steps() == ([1, 2], [1, 2])


def url_of(folders):
    return f"tiered://?fast=posix://{folders.fast}&durable=posix://{folders.durable}"


def test_the_command_repairs_reports_it_and_exits_with_zero(call, folders):
    damage(folders.fast, "flip")
    assert call("verify", url_of(folders)).code == 1
    done = call("verify", url_of(folders), "--repair")
    assert done.code == 0
    assert "replaced in tier fast, from durable" in done.out
    assert "step 1 is whole now" in done.out
    assert whole(folders.fast)
    assert call("verify", url_of(folders), "--repair", "--all", "--quick").code == 0


class Meanwhile(WrapperBackend):
    """Runs an action once the last of some blobs was read."""

    def __init__(self, inner, what):
        super().__init__(inner)
        self._what = what

    def submit_read(self, requests, /):
        future = self.inner.submit_read(requests)
        what, self._what = self._what, None
        if what is not None:
            future.result(300)
            what()
        return future


def test_the_good_copy_is_not_evicted_during_verification():
    places = Places()
    with places.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    spoil(places.durable)
    other = (Tier("fast", places.other_fast(), keep_last=0), Tier("durable", places.other()))
    fast = Meanwhile(places.other_fast(), lambda: Eviction(other).trim(0, verify=lambda *_: False))
    with places.open(fast=fast, options={"keep_fast": 0}) as ckpt:
        report = ckpt.verify(1, deep=False, repair=True)
        assert report.ok
    assert places.steps()[1] == [1]
    with checkpointer(places.durable) as alone:
        assert same(alone.load(1), make_state(1))


def test_a_copy_vanishing_during_verification_leaves_the_other():
    places = Places()
    with places.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    spoil(places.durable)
    fast = Meanwhile(places.other_fast(), lambda: Catalog(places.fast).delete(1))
    with places.open(fast=fast) as ckpt:
        report = ckpt.verify(1, deep=False, repair=True)
        assert not report.ok
    assert places.steps()[1] == [1]


class Briefly(WrapperBackend):
    """Runs actions before and after the size of a blob is returned."""

    def __init__(self, inner, before, after=lambda: None):
        super().__init__(inner)
        self._hooks = [before, after]

    def stat(self, name, /):
        if not name.endswith(".raw") or not self._hooks:
            return super().stat(name)
        (before, after), self._hooks = self._hooks, []
        before()
        try:
            return super().stat(name)
        finally:
            after()


@pytest.fixture
def both():
    """A run with step 1 in both tiers."""
    places = Places()
    with places.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    return places


def test_a_copy_lost_during_verification_is_not_a_deleted_copy(both):
    fast = Briefly(both.other_fast(), lambda: Catalog(both.fast).delete(1))
    with both.open(fast=fast) as ckpt:
        report = ckpt.verify(1)
    assert (report.ok, report.tiers) == (True, ("durable",))


def test_a_copy_replaced_during_verification_is_verified_again(both):
    def bring():
        ckpt._drains.repairs.replace_copy(Catalog(both.durable).record(1), 1, 0)

    fast = Briefly(both.other_fast(), lambda: Catalog(both.fast).delete(1), bring)
    with both.open(fast=fast) as ckpt:
        report = ckpt.verify(1)
    assert (report.ok, report.tiers) == (True, ("fast", "durable"))


@pytest.mark.parametrize("repair", [False, True])
def test_a_checkpoint_deleted_during_verification_is_gone(both, repair):
    def delete():
        for place in (both.fast, both.durable):
            Catalog(place).delete(1)

    with (
        both.open(fast=Briefly(both.other_fast(), delete)) as ckpt,
        pytest.raises(CheckpointGoneError, match=r"step 1 .* was deleted while it was read"),
    ):
        ckpt.verify(1, repair=repair)


def test_two_repairs_of_one_step_do_not_delete_each_others_work():
    places, results = Places(), []
    with places.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    spoil(places.durable)
    fast = Meanwhile(places.other_fast(), lambda: results.append(ckpt.verify(1, repair=True)))
    with places.open(fast=fast) as ckpt:
        assert ckpt.verify(1, deep=False, repair=True).ok
        assert "already being replaced" in results[0].repairs[0].error
        assert ckpt.verify(1).ok
    assert not is_marked(places.fast, Catalog(places.fast).record(1).uid)


def spoil(backend):
    """Cut the end off a blob."""
    name = next(i.name for i in backend.list("data/") if i.name.endswith(".raw"))
    data = backend.read_record(name, limit_bytes=1 << 30)
    backend.delete([name])
    backend.publish(name, data[:-1])


@pytest.mark.parametrize("repair", [False, True])
def test_verifying_tiers_ends_even_if_one_hangs(waits, repair):
    clock = FlyingClock()
    waits(clock=clock, interrupt_s=0.01, poll_s=0.05)
    places, event = Places(), threading.Event()
    hanging = FaultyBackend(places.other())
    with places.open(durable=hanging) as ckpt:
        ckpt.save(make_state(1), 1).result(300)
        held = hanging.block("read", event, match="blobs/")
        clock.flies = lambda: held.reached.is_set() and not event.is_set()
        try:
            with pytest.raises(StorageTimeoutError, match="io_timeout_s=600"):
                ckpt.verify(1, repair=repair)
            assert held.reached.is_set()
        finally:
            event.set()
