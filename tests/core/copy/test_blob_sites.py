"""Copies of checkpoints that borrow blobs: each blob is copied once, and no other is touched."""

import threading
from contextlib import closing, suppress
from dataclasses import replace

import pytest
from tests.core.borrowing import TIME, borrow, files_of
from tests.effort import every
from tests.integration.support import ENCODED, checkpointer, holding, make_state, memory, same

from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.prune import GRACE_S
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.blob_sites import in_flight
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.confirmation import confirmed
from penstock.core.errors import BusyError, DamagedError, SaveAbortedError
from penstock.core.format.commit_record import decode_intent, encode_intent, seal, unseal
from penstock.core.format.records import (
    IntentRecord,
    commit_name,
    data_prefix,
    intent_name,
    lease_name,
)
from penstock.testing.faults import (
    EFFECTS,
    CrashAt,
    FaultyBackend,
    SimulatedCrashError,
    WrapperBackend,
)
from penstock.testing.hasty import FAST

DELTA, LATER = "d" * 32, "e" * 32
STATE = make_state(3)


@pytest.fixture(scope="module")
def workers():
    with closing(Workers(2, FAST)) as threads:
        yield threads


def made_chain():
    """A store with a base (1), one that borrows from it (2), and one that borrows from both (3)."""
    backend = memory()
    with checkpointer(backend, **ENCODED) as ckpt:
        ckpt.save(STATE, 1, mode="blocking")
    borrow(backend, 1, 2, uid=DELTA, lent="raw")
    borrow(backend, 2, 3, uid=LATER, lent="enc")
    return backend


@pytest.fixture(scope="module")
def chain():
    return made_chain()


def copy_of(source, target, workers, step, **options):
    record = Catalog(source).record(step)
    options = {"grace_s": GRACE_S, "buffer_bytes": 8 * 4096, **options}
    return CheckpointCopy(source, target, record, workers=workers, **options)


def files(folder):
    return PosixBackend(PosixConfig(path=str(folder), direct_io="off"))


def base_of(backend):
    return Catalog(backend).record(1).uid


def whole_at(target, *steps):
    with checkpointer(target) as ckpt:
        assert ckpt.steps() == list(steps)
        assert all(ckpt.verify(step).ok and same(ckpt.load(step), STATE) for step in steps)


def bury(target):
    """Make all lease holders there look killed."""
    for info in target.list("data/"):
        if info.name.endswith("copy.json"):
            lease = unseal(target.read_record(info.name, limit_bytes=1 << 20), info.name)
            lease["process"] = lease["process"].rpartition("-")[0] + "-0"
            target.publish(info.name, seal(lease))


def written(faulty):
    return {name for what, names in faulty.calls if what == "create" for name in names}


def test_a_copy_includes_exactly_the_blobs_the_checkpoint_borrows(chain, workers):
    target, moved = memory(), []
    report = copy_of(chain, target, workers, 3).run(on_progress=moved.append)
    whole_at(target, 3)
    assert files_of(target, base_of(chain)) == {"blobs/00000-0.raw"}
    assert files_of(target, DELTA) == {"blobs/00000-0.enc"}
    record = Catalog(target).record(3)
    assert report.blobs == 2
    assert sum(moved) == record.bytes_needed == report.bytes_copied
    intent = target.read_record(intent_name(LATER), limit_bytes=9999)
    assert decode_intent(intent, intent_name(LATER)).references == record.references


@pytest.mark.parametrize("steps", [(1, 2, 3), (3, 2, 1), (2, 3, 1), (3, 1, 2)])
def test_checkpoints_of_a_chain_are_copied_in_any_order_each_blob_once(chain, workers, steps):
    target = memory()
    faulty = FaultyBackend(target)
    for number, step in enumerate(steps):
        moved = []
        copy_of(chain, faulty, workers, step).run(on_progress=moved.append)
        assert sum(moved) == Catalog(chain).record(step).bytes_needed
        whole_at(target, *sorted(steps[: number + 1]))
    assert not [info.name for info in target.list("data/") if info.name.endswith("copy.json")]
    created = [name for what, names in faulty.calls if what == "create" for name in names]
    assert len(created) == len(set(created))
    assert {info.name for info in target.list("data/")} == {
        info.name for info in chain.list("data/")
    }


@pytest.mark.parametrize(
    "case",
    [
        ((1,), 2, True),
        pytest.param(((), 3, False), marks=pytest.mark.slow),
        pytest.param(((2,), 1, False), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_copy_that_is_killed_anywhere_is_resumed_and_never_listed_in_part(
    chain, workers, tmp_path, case
):
    there, step, after = case
    for at in range(1, 200, every(7)):
        with closing(files(tmp_path / str(at))) as target:
            for earlier in there:
                copy_of(chain, target, workers, earlier).run()
            crash = CrashAt(target, at, after=after, operations=EFFECTS)
            with suppress(SimulatedCrashError):
                copy_of(chain, crash, workers, step).run()
            whole_at(target, *Catalog(target).steps())
            bury(target)
            copy_of(chain, target, workers, step).run()
            whole_at(target, *sorted({*there, step}))
        if not crash.crashed:
            break
    assert at > 5


@pytest.mark.parametrize("killed", [1, 2])
def test_leftovers_of_a_killed_copy_block_no_other_copy(chain, workers, tmp_path, killed):
    """The first copy brings the blobs that two checkpoints need."""
    for at in range(1, 12, every(5)):
        with closing(files(tmp_path / str(at))) as target:
            with pytest.raises(SimulatedCrashError):
                copy_of(chain, CrashAt(target, at, operations=EFFECTS), workers, killed).run()
            bury(target)
            copy_of(chain, target, workers, 3).run()
            whole_at(target, *sorted({*Catalog(target).steps(), 3}))
            for step in (1, 2):
                copy_of(chain, target, workers, step).run()
            whole_at(target, 1, 2, 3)


def kill_and_free_the_base(chain, target, workers, at):
    """Kill a copy of step 2 at a publish; return whether its index exists. Then its base is copied
    and deleted there, so its blobs stay for the dead copy.
    """
    with suppress(SimulatedCrashError):
        copy_of(chain, CrashAt(target, at, operations=["publish"]), workers, 2).run()
    bury(target)
    copy_of(chain, target, workers, 1).run()
    Catalog(target).delete(1)
    return bool(target.list(Catalog(chain).record(2).index.name))


def test_data_of_a_copy_killed_after_its_index_is_left_alone(chain, workers, tmp_path):
    """Its commit record may still be in flight, and then needs the base."""
    for at in range(1, 40):
        with closing(files(tmp_path / str(at))) as target:
            if kill_and_free_the_base(chain, target, workers, at):
                with pytest.raises(BusyError, match="may belong to a save"):
                    copy_of(chain, target, workers, 1).run()
                for step in (2, 1):
                    copy_of(chain, target, workers, step).run()
                whole_at(target, 1, 2)
                break
    assert 5 < at < 39


def test_a_copy_spares_data_that_a_concurrent_copy_needs(chain, workers):
    target = memory()
    copy_of(chain, target, workers, 1).run()
    faulty = FaultyBackend(target)
    with holding(faulty, "create", match=DELTA) as held:
        thread = threading.Thread(target=copy_of(chain, faulty, workers, 2).run)
        thread.start()
        assert held.reached.wait(30)
        Catalog(target).delete(1)
        with pytest.raises(BusyError, match="may belong to a save"):
            copy_of(chain, target, workers, 1).run()
        held.until.set()
        thread.join()
    copy_of(chain, target, workers, 1).run()
    whole_at(target, 1, 2)


def test_two_copies_write_a_shared_blob_once(chain, workers):
    target = memory()
    faulty = FaultyBackend(target)
    with holding(faulty, "create", match="00000-0.raw") as held:
        first = copy_of(chain, faulty, workers, 2)
        thread = threading.Thread(target=first.run)
        thread.start()
        assert held.reached.wait(30)
        for step in (1, 3):
            with pytest.raises(BusyError):
                copy_of(chain, target, workers, step).run()
        held.until.set()
        thread.join()
    whole = Catalog(target).steps()
    assert whole == [2]
    for step in (1, 3):
        copy_of(chain, target, workers, step).run()
    whole_at(target, 1, 2, 3)


class Meanwhile(WrapperBackend):
    """Does something right before one call of the store."""

    def __init__(self, inner, name, act):
        super().__init__(inner)
        self._name, self._act = name, act

    def publish(self, name, data, /, *, exclusive=False):
        if name == self._name and self._act is not None:
            act, self._act = self._act, None
            act()
        super().publish(name, data, exclusive=exclusive)


@pytest.mark.parametrize("before", [intent_name(LATER), commit_name(3, 0)])
def test_a_base_deleted_during_a_copy_keeps_what_the_copy_needs(chain, workers, before):
    target = memory()
    for step in (1, 2):
        copy_of(chain, target, workers, step).run()

    def delete():
        for step in (2, 1):
            Catalog(target).delete(step)

    copy_of(chain, Meanwhile(target, before, delete), workers, 3).run()
    whole_at(target, 3)


@pytest.mark.parametrize(
    "doomed",
    [*(pytest.param(d, marks=pytest.mark.slow) for d in [(1,), (2,), (3,), (2, 1)]), (3, 2, 1)],
    ids=str,
)
@pytest.mark.parametrize("after", [False, True])
def test_leftovers_of_a_killed_deletion_block_no_copy(chain, workers, doomed, after):
    for at in range(1, 30, every(3)):
        target = memory()
        for step in (1, 2, 3):
            copy_of(chain, target, workers, step).run()
        crash = CrashAt(target, at, after=after, operations=EFFECTS)
        with suppress(SimulatedCrashError):
            for step in doomed:
                Catalog(crash).delete(step)
        for step in (1, 2, 3):
            copy_of(chain, target, workers, step).run()
        whole_at(target, 1, 2, 3)
        if not crash.crashed:
            break
    assert at > 3


@pytest.mark.parametrize("what", ["good", "other bytes", "cut off"])
def test_blobs_of_unknown_durability_are_copied_again(chain, workers, what):
    target = memory()
    name = f"{data_prefix(base_of(chain))}blobs/00000-0.raw"
    data = chain.read_record(name, limit_bytes=1 << 30)
    left = {"good": data, "other bytes": bytes(len(data)), "cut off": data[:-1]}
    target.publish(name, left[what])
    faulty = FaultyBackend(target)
    copy_of(chain, faulty, workers, 2).run()
    assert name in written(faulty)
    whole_at(target, 2)
    # The others of that uid are no more durable than this was.
    assert [i.name for i in target.list("data/") if "copy.json" in i.name] == [
        lease_name(base_of(chain))
    ]


@pytest.mark.parametrize("of", [1, 2])
def test_a_copy_waits_for_a_deletion_in_progress(chain, workers, of):
    """Or it would keep, or copy, blobs that are deleted after its commit."""
    target = memory()
    copy_of(chain, target, workers, 1).run()
    faulty = FaultyBackend(target)
    with holding(faulty, "delete", match="00000-0.raw") as held:
        thread = threading.Thread(target=Catalog(faulty).delete, args=[1])
        thread.start()
        assert held.reached.wait(30)

        def end_deletion(size_bytes):
            if not size_bytes:  # while the copy waits
                held.until.set()
                thread.join()

        copy_of(chain, target, workers, of).run(on_progress=end_deletion)
        held.until.set()
        thread.join()
    whole_at(target, of)


def test_a_copy_cancelled_while_waiting_leaves_no_trace(chain, workers):
    """With a trace the next copy would take data of a running deletion for a copy's."""
    target = memory()
    name = f"{data_prefix(base_of(chain))}blobs/00000-0.raw"
    target.publish(name, chain.read_record(name, limit_bytes=1 << 30))
    with closing(Workers(2, replace(FAST, deletion_s=1000.0))) as patient:
        copy = copy_of(chain, target, patient, 1)
        with pytest.raises(SaveAbortedError):
            copy.run(on_progress=lambda _: copy.cancel())
    assert [info.name for info in target.list("")] == [name]
    copy_of(chain, target, workers, 1).run()
    whole_at(target, 1)


def test_orphans_that_may_be_the_last_copy_are_kept_if_the_source_is_damaged(workers):
    source, target = made_chain(), memory()
    name = f"{data_prefix(base_of(source))}blobs/00000-0.raw"
    data = source.read_record(name, limit_bytes=1 << 30)
    target.publish(name, data)
    source.delete([name])
    source.publish(name, bytes(len(data)))
    with pytest.raises(DamagedError):
        copy_of(source, target, workers, 2).run()
    assert target.read_record(name, limit_bytes=1 << 30) == data


@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_blobs_that_a_save_in_flight_may_need_stay(chain, workers, whose):
    target, base = memory(), base_of(chain)
    name = f"{data_prefix(base)}blobs/00000-0.raw"
    target.publish(name, b"of a save")
    saver = base if whose == "its own" else "a" * 32
    references = () if whose == "its own" else (base,)
    intent = IntentRecord(saver, 9, references, "host", 1, TIME, TIME)
    target.publish(intent_name(saver), encode_intent(intent))
    for step in (1, 2):
        with pytest.raises(BusyError):
            copy_of(chain, target, workers, step).run()
    assert target.read_record(name, limit_bytes=100) == b"of a save"
    assert Catalog(target).steps() == []


def test_no_lease_is_taken_beside_the_intent_of_a_save_without_blobs(chain, workers):
    """Beside a lease that save would look like a finished copy, and its needed data unused. Then a
    third copy would replace what the save is about to borrow.
    """
    target, base, other = memory(), base_of(chain), "a" * 32
    intent = IntentRecord(base, 9, (other,), "host", 1, TIME, TIME)
    target.publish(intent_name(base), encode_intent(intent))
    with pytest.raises(BusyError, match="a save under way may need") as caught:
        copy_of(chain, target, workers, 2).run()
    assert intent_name(base) in str(caught.value)
    assert files_of(target, base) == {"intent.json"}
    assert in_flight(target, [base], FAST) == [base]


@pytest.mark.parametrize("lent", ["cut off", "other bytes"])
def test_a_copy_never_replaces_a_blob_that_others_need(chain, workers, lent):
    """Or a forged record could take a uid of the target, and destroy borrowed data."""
    target = memory()
    copy_of(chain, target, workers, 2).run()
    name = f"{data_prefix(base_of(chain))}blobs/00000-0.raw"
    data = target.read_record(name, limit_bytes=1 << 30)
    bad = data[:-1] if lent == "cut off" else bytes(len(data))
    target.delete([name])
    target.publish(name, bad)
    with pytest.raises(BusyError, match="needed by other checkpoints there"):
        copy_of(chain, target, workers, 1).run()
    assert target.read_record(name, limit_bytes=1 << 30) == bad
    assert Catalog(target).steps() == [2]


def test_a_repair_replaces_a_damaged_borrowed_blob_and_reads_what_it_keeps(chain, workers):
    target = memory()
    for step in (1, 2, 3):
        copy_of(chain, target, workers, step).run()
    name = f"{data_prefix(base_of(chain))}blobs/00000-0.raw"
    data = target.read_record(name, limit_bytes=1 << 30)
    target.delete([name])
    target.publish(name, bytes(len(data)))
    Catalog(target).delete(2)
    faulty = FaultyBackend(target)
    copy_of(chain, faulty, workers, 2, repair=True).run()
    assert name in written(faulty)
    whole_at(target, 1, 2, 3)


def test_a_repair_of_a_base_spares_the_blobs_that_others_borrow(chain, workers):
    target = memory()
    for step in (1, 2):
        copy_of(chain, target, workers, step).run()
    Catalog(target).delete(1)
    name = f"{data_prefix(base_of(chain))}blobs/00000-0.raw"
    faulty = FaultyBackend(target)
    copy_of(chain, faulty, workers, 1, repair=True).run()
    assert name not in written(faulty)
    whole_at(target, 1, 2)


def test_a_target_without_a_borrowed_blob_lacks_the_checkpoint(chain, workers):
    target = memory()
    copy_of(chain, target, workers, 2).run()
    assert confirmed(target, Catalog(chain).record(2))
    target.delete([f"{data_prefix(base_of(chain))}blobs/00000-0.raw"])
    assert not confirmed(target, Catalog(chain).record(2))
    copy_of(chain, target, workers, 2).run()
    whole_at(target, 2)


def test_a_borrowed_blob_that_vanishes_before_the_commit_prevents_it(chain, workers):
    target = memory()
    name = f"{data_prefix(base_of(chain))}blobs/00000-0.raw"
    index = Catalog(chain).record(2).index.name
    lossy = Meanwhile(target, index, lambda: target.delete([name]))
    with pytest.raises(SaveAbortedError, match="vanished"):
        copy_of(chain, lossy, workers, 2).run()
    assert Catalog(target).steps() == []
    copy_of(chain, target, workers, 2).run()
    whole_at(target, 2)


def test_a_copy_that_lost_a_borrowed_lease_commits_nothing(chain, workers):
    target = memory()
    lease, index = lease_name(base_of(chain)), Catalog(chain).record(2).index.name
    losing = Meanwhile(target, index, lambda: target.delete([lease]))
    with pytest.raises(BusyError):
        copy_of(chain, losing, workers, 2).run()
    assert Catalog(target).steps() == []


class Noting(WrapperBackend):
    """Keeps every version of the records that are published."""

    def __init__(self, inner):
        super().__init__(inner)
        self.versions = []

    def publish(self, name, data, /, *, exclusive=False):
        self.versions.append((name, bytes(data)))
        super().publish(name, data, exclusive=exclusive)


def test_a_lease_lists_data_of_others_as_durable_at_once(chain, workers):
    """A later copy deletes what a lease does not list, even if a third one relies on it."""
    target = memory()
    for step in (1, 2):
        copy_of(chain, target, workers, step).run()
    base = base_of(chain)
    raw, enc = (f"{data_prefix(base)}blobs/00000-0.{kind}" for kind in ("raw", "enc"))
    target.delete([raw])  # lost: the copy of step 3 must include it
    noting = Noting(target)
    copy_of(chain, noting, workers, 3).run()
    sealed = [unseal(d, n)["sealed"] for n, d in noting.versions if n == lease_name(base)]
    assert sealed == [[enc], [enc, raw]]
    whole_at(target, 1, 2, 3)


def test_blobs_of_a_deleted_base_are_copied_too(workers):
    source, target = made_chain(), memory()
    for step in (1, 2):
        Catalog(source).delete(step)
    copy_of(source, target, workers, 3).run()
    whole_at(target, 3)
    Catalog(target).delete(3)
    assert target.list("") == []


def test_a_damaged_borrowed_blob_is_not_copied(workers):
    source, target = made_chain(), memory()
    name = f"{data_prefix(base_of(source))}blobs/00000-0.raw"
    data = bytearray(source.read_record(name, limit_bytes=1 << 30))
    data[:4096] = bytes(4096)
    source.delete([name])
    source.publish(name, bytes(data))
    with pytest.raises(DamagedError, match=name):
        copy_of(source, target, workers, 2).run()
    assert Catalog(target).steps() == []
