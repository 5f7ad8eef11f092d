"""Two savers of one step: one wins, the other learns it; and lost responses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.integration.atomic.forked_savers import Forker, make
from tests.integration.support import checkpointer, holding, memory, same

from penstock import (
    BlobExistsError,
    CommitUnknownError,
    LostRaceError,
    StepExistsError,
    StorageError,
)
from penstock.core.catalog.catalog import Catalog
from penstock.core.format.commit_record import decode_commit, encode_commit
from penstock.core.format.records import CommitRecord
from penstock.testing.faults import FaultyBackend, WrapperBackend

# -- two real processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forker():
    with Forker() as forker:
        yield forker


@pytest.fixture
def url(kind, tmp_path):
    return f"{kind}://{tmp_path}/root"


@pytest.mark.parametrize("overwrite", [False, True], ids=["new step", "overwrite"])
def test_exactly_one_of_two_concurrent_publishers_wins(overwrite, url, forker):
    with checkpointer(url) as ckpt:
        ckpt.save(make(1), 1, mode="blocking")
        ckpt.save(make(2), 2, mode="blocking")
    step = 2 if overwrite else 3
    for _ in range(4):
        answers = forker.ask(
            "race", url=url, step=step, numbers=[10, 20], hold=True, overwrite=overwrite
        )
        (won,) = (a for a in answers if a["error"] is None)
        (lost,) = (a for a in answers if a["error"] is not None)
        assert lost["error"] == "LostRaceError"
        assert f"step {step}" in lost["text"]
        assert "overwrite=True" in lost["text"]
        with checkpointer(url) as ckpt:
            assert ckpt.steps() == [*range(1, step + 2)]
            assert same(ckpt.load(step), make(won["number"]))
            assert same(ckpt.load(step + 1), make(lost["number"]))  # it continued, and lost nothing
            for earlier in range(1, min(step, 3)):
                assert same(ckpt.load(earlier), make(earlier))
            assert all(ckpt.verify(s).ok for s in ckpt.steps())
        step = step if overwrite else step + 2


def test_exactly_one_of_two_concurrent_savers_wins(url, forker):
    for step in (2, 4, 6):
        answers = forker.ask(
            "race", url=url, step=step, numbers=[10, 20], hold=False, overwrite=False
        )
        (won,) = (a for a in answers if a["error"] is None)
        (lost,) = (a for a in answers if a["error"] is not None)
        assert lost["error"] in {"LostRaceError", "StepExistsError"}
        with checkpointer(url) as ckpt:
            assert same(ckpt.load(step), make(won["number"]))
            assert same(ckpt.load(step + 1), make(lost["number"]))


# -- two in one process, one after the other at the worst point ------------------------------------


@pytest.fixture
def store():
    return memory()


class Overtaken(WrapperBackend):
    """Right before this saver publishes the record with `at` in its name, `overtake` runs."""

    def __init__(self, inner, *, at="commits/"):
        super().__init__(inner)
        self.overtake = None
        self._at = at

    def publish(self, name, data, /, *, exclusive=False):
        overtake = self.overtake
        if self._at in name and overtake is not None:
            self.overtake = None
            overtake()
        super().publish(name, data, exclusive=exclusive)


class Appending(Overtaken):
    """A store without arbitration, like some object stores."""

    @property
    def capabilities(self):
        return replace(self.inner.capabilities, exclusive_publish=False)

    def publish(self, name, data, /, *, exclusive=False):
        assert not exclusive, "it never said it could"
        super().publish(name, data)


def save_step_two_to(store):
    with checkpointer(store) as other:
        report = other.save(make(20), 2, mode="blocking").result()
        assert report.exclusive is True


def test_an_overtaken_saver_keeps_its_steps_and_data(store):
    backend = Overtaken(store)
    with checkpointer(backend) as ckpt:
        ckpt.save(make(1), 1, mode="blocking")
        backend.overtake = lambda: save_step_two_to(store)
        handle = ckpt.save(make(10), 2)
        for _ in range(2):
            with pytest.raises(LostRaceError, match="another saver published step"):
                handle.result(300)
        ckpt.wait()
        assert same(ckpt.load(1), make(1))
        assert same(ckpt.load(2), make(20))
        ckpt._saver.job.released.wait()
        there = {i.name.split("/")[1] for i in store.list("data/")}
        assert there == {ckpt.info(1).uid, ckpt.info(2).uid}  # the loser's data is gone at once
        with pytest.raises(StepExistsError):
            ckpt.save(make(10), 2)
        ckpt.save(make(3), 3, mode="blocking")
        assert same(ckpt.load(), make(3))


def test_a_losing_solo_process_of_several_learns_why_it_lost(store, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    backend = Overtaken(store)

    def overtake():
        with checkpointer(store, ranks="alone") as other:
            other.save(make(20), 2, mode="blocking")

    backend.overtake = overtake
    with checkpointer(backend, ranks="alone") as ckpt, pytest.raises(LostRaceError) as raised:
        ckpt.save(make(10), 2).result(300)
    assert "has ranks='alone', and WORLD_SIZE is 4" in raised.value.__notes__[0]


def test_a_store_without_conditional_put_warns_and_refuses_visible_steps(store):
    backend = Appending(store, at="index")  # after the claim, before the check
    with checkpointer(backend) as ckpt:
        report = ckpt.save(make(1), 1, mode="blocking").result()
        assert report.exclusive is False
        assert same(ckpt.load(), make(1))
        backend.overtake = lambda: save_step_two_to(store)
        with pytest.raises(LostRaceError):
            ckpt.save(make(10), 2, mode="blocking")
        assert same(ckpt.load(2), make(20))


def test_a_store_without_conditional_put_reads_the_record_back(store):
    """Both saw the free name; the other's record came last, so the step is the other's."""
    record = None

    class Late(Appending):
        def publish(self, name, data, /, *, exclusive=False):
            nonlocal record
            super().publish(name, data, exclusive=exclusive)
            if name.startswith("commits/") and record is None:
                record = decode_commit(data, name)
                self.inner.publish(name, encode_commit(replace(record, uid="f" * 32, **parts())))

    def parts():
        as_other = {}
        as_other["index"] = replace(record.index, name=f"data/{'f' * 32}/index")
        as_other["parts"] = tuple(
            replace(part, name=part.name.replace(record.uid, "f" * 32)) for part in record.parts
        )
        return as_other

    with checkpointer(Late(store)) as ckpt, pytest.raises(LostRaceError):
        ckpt.save(make(1), 1, mode="blocking")
    assert isinstance(record, CommitRecord)


#
# -- lost responses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [StorageError("no answer"), BlobExistsError("a retry met itself")]
)
def test_a_lost_reply_to_a_completed_publish_resolves_to_success(error, store):
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt:
        faulty.fail("publish", error, match="commits/", late=True)
        report = ckpt.save(make(1), 1, mode="blocking").result()
        assert ckpt.info(1).uid == report.uid
        assert same(ckpt.load(), make(1))
        ckpt.save(make(2), 2, mode="blocking")


def test_data_stays_if_the_winning_record_cannot_be_read(store):
    """It may be our own: an earlier try of the store's client with a lost response."""
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt:
        faulty.fail("publish", BlobExistsError("a retry met itself"), match="commits/", late=True)
        faulty.fail("read", match="commits/", times=None)
        with pytest.raises(LostRaceError):
            ckpt.save(make(1), 1, mode="blocking")
        ckpt._saver.job.released.wait()
        faulty.clear()
        assert same(ckpt.load(1), make(1))


def test_a_publish_without_reply_or_trace_is_unknown_and_data_stays(store):
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt:
        ckpt.save(make(1), 1, mode="blocking")
        faulty.fail("publish", match="commits/")
        with pytest.raises(CommitUnknownError, match=r"steps\(\)"):
            ckpt.save(make(2), 2, mode="blocking")
        uid = ckpt._saver.job.uid
        kept = [info.name for info in store.list(f"data/{uid}/")]
        assert {name.rpartition("/")[2] for name in kept} >= {
            "intent.json", "index", "00000.json.zst", "00000-0.raw",
        }  # fmt: skip
        assert ckpt.steps() == [1]
        assert ckpt.prune().uids == ()
        ckpt.save(make(3), 2, mode="blocking")
        assert same(ckpt.load(), make(3))
    with checkpointer(store, grace_s=1e-6) as other:
        assert other.prune().uids == (uid,)
        assert same(other.load(), make(3))
        assert same(other.load(1), make(1))


def test_a_published_record_that_is_unreadable_stays_unknown(store):
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt:
        faulty.fail("publish", match="commits/", late=True)
        faulty.fail("read", match="commits/", times=None)
        with pytest.raises(CommitUnknownError):
            ckpt.save(make(1), 1, mode="blocking")
        faulty.clear()
        ckpt._saver.job.finished(None)
        assert ckpt.steps() == [1]  # it exists, and no data of it was deleted
        assert ckpt.verify(1).ok
        assert same(ckpt.load(1), make(1))


@pytest.mark.parametrize("by", ["prune", "overwrite"])
def test_an_overwrite_that_lands_after_its_data_was_pruned_leaves_the_older_generation(by, store):
    """It was delayed for more than the grace time between its last check and its record."""
    faulty = FaultyBackend(store)
    with checkpointer(store) as ckpt:
        ckpt.save(make(1), 1, mode="blocking")
    with (
        checkpointer(faulty) as sleeper,
        checkpointer(store, grace_s=1e-6) as other,
        holding(faulty, "publish", match="commits/") as publishing,
        holding(faulty, "stat", match="intent.json", nth=2) as looking,
    ):
        handle = sleeper.save(make(2), 1, overwrite=True)
        assert publishing.reached.wait(300)
        assert other.prune(everything=True).uids == (sleeper._saver.job.uid,)
        publishing.until.set()
        assert looking.reached.wait(300)
        assert len(store.list("commits/")) == 2
        if by == "prune":
            assert other.prune(everything=True).superseded == ()
        else:
            Catalog(store).delete_older_generations(1, 1)
        looking.until.set()
        with pytest.raises(CommitUnknownError, match="its data is no longer on"):
            handle.result(300)
        assert other.steps() == [1]
        assert same(other.load(1), make(1))


@pytest.mark.parametrize(("match", "is_left"), [("parts/", False), ("index", True)])
def test_a_save_that_fails_after_its_seal_deletes_its_data_or_leaves_it_to_prune(
    match, is_left, store
):
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt:
        faulty.fail("publish", match=match)
        with pytest.raises(StorageError):
            ckpt.save(make(1), 1, mode="blocking")
        ckpt._saver.job.finished(None)
        assert bool(store.list(f"data/{ckpt._saver.job.uid}/blobs/")) is is_left
        assert ckpt.steps() == []
        ckpt.save(make(2), 1, mode="blocking")
        assert same(ckpt.load(), make(2))
