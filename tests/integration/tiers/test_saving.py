"""Saving to a fast tier that is copied to a durable one, only by configuration."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from tests.integration.support import FlyingClock, blank, checkpointer, make_state, same
from tests.integration.tiers.places import Places

import penstock
from penstock import NotDrainedError, SaveSkippedError, StorageError
from penstock.core.catalog.catalog import Catalog
from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.format.commit_record import encode_intent
from penstock.core.format.records import IntentRecord, intent_name
from penstock.core.tiers.whereabouts import pending
from penstock.testing.faults import Fault, FaultyBackend, WrapperBackend
from penstock.testing.hasty import FAST


@pytest.fixture(autouse=True)
def hasty(waits):
    waits(FAST, drain_failing_s=0.2)


@pytest.fixture
def places():
    return Places()


def until(condition):
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s, "it does not come to that"
        time.sleep(0.01)


def away(backend):
    """`backend`, which does not answer until it is cleared."""
    faulty = FaultyBackend(backend)
    for operation in ("list", "publish", "create", "read", "stat", "delete"):
        faulty.add(Fault(operation, times=None, error=StorageError("no route to host")))
    return faulty


@pytest.mark.parametrize("mode", ["blocking", "async", "lazy"])
def test_a_save_is_committed_in_the_fast_tier_and_durable_in_the_other(mode, places):
    with places.open() as ckpt:
        handle = ckpt.save(make_state(1), 1, mode=mode)
        committed = handle.committed.result(300)
        report = handle.result(300)
        assert (committed.tiers, report.tiers) == ((), ("fast", "durable"))
        assert handle.progress().phase == "durable"
        assert report.engine == "memory"
        assert Catalog(places.fast).record(1).engine == "memory"
    assert places.steps() == ([1], [1])
    assert pending(places.fast) == []
    for backend in (places.fast, places.durable):
        with checkpointer(backend) as alone:
            assert same(alone.load(1), make_state(1))


def test_training_continues_without_the_durable_tier_and_copies_follow(places, caplog):
    durable = away(places.durable)
    with places.open(durable=durable) as ckpt:
        handles = [ckpt.save(make_state(n), n) for n in range(1, 6)]
        for handle in handles:
            handle.committed.result(300)
            assert not handle.durable.done()
        assert caplog.text.count("tier durable does not answer") == 1  # not once per save
        assert handles[-1].progress().phase == "drain"
        ckpt.wait()  # for saves, not for an absent tier
        ckpt.fence()
        durable.clear()
        for handle in handles:
            assert handle.result(300).tiers == ("fast", "durable")
    assert places.steps() == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert "no route to host" in caplog.text


def test_closing_without_the_durable_tier_leaves_copies_to_the_next_process(places):
    durable = away(places.durable)
    with places.open(durable=durable) as ckpt:
        handle = ckpt.save(make_state(1), 1)
        handle.committed.result(300)
    with pytest.raises(NotDrainedError, match="penstock drain"):
        handle.result(300)
    assert places.steps() == ([1], [])
    with places.open() as ckpt:
        ckpt.save(make_state(2), 2).result(300)
    assert places.steps() == ([1, 2], [1, 2])


def test_a_blocking_save_does_not_wait_forever_for_an_absent_tier(places):
    with places.open(durable=away(places.durable)) as ckpt:
        with pytest.raises(NotDrainedError, match="no route to host"):
            ckpt.save(make_state(1), 1, mode="blocking")
        assert places.steps()[0] == [1]


def test_every_nth_save_is_copied_and_others_are_durable_as_configured(places):
    with places.open(options={"drain_every": 2}) as ckpt:
        tiers = [ckpt.save(make_state(n), n).result(300).tiers for n in range(1, 5)]
    assert tiers == [("fast", "durable"), ("fast",)] * 2
    assert places.steps() == ([1, 2, 3, 4], [1, 3])


def test_the_fast_tier_may_be_durable(places):
    durable = away(places.durable)
    with places.open(durable=durable, options={"durable_means": "fast"}) as ckpt:
        assert ckpt.save(make_state(1), 1, mode="blocking").result(300).tiers == ("fast",)


def test_a_full_fast_tier_is_bypassed_and_keeps_its_only_copies(places, caplog):
    class Full(WrapperBackend):
        def free_bytes(self):
            return 0

    with places.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    fast = Full(places.other_fast())
    with places.open(fast=fast) as ckpt:
        for step in (2, 3):
            assert ckpt.save(make_state(step), step).result(300).tiers == ("durable",)
    assert places.steps() == ([], [1, 2, 3])  # the first was evicted in vain
    assert caplog.text.count("is saved straight to tier durable: tier fast") == 1


def test_without_any_room_a_save_is_skipped_and_training_continues(places, caplog):
    class Full(WrapperBackend):
        def free_bytes(self):
            return 0

    fast = Full(places.other_fast())
    options = {"on_full": "skip"}
    with places.open(fast=fast, durable=away(places.durable), options=options) as ckpt:
        handle = ckpt.save(make_state(1), 1)
        assert handle.skipped
        with pytest.raises(SaveSkippedError, match="no tier has room"):
            handle.result()
    assert "step 1 is not saved" in caplog.text


def test_a_restore_takes_the_fastest_tier_and_falls_back_to_the_other(places):
    with places.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    reads = []

    class Noting(WrapperBackend):
        def _around(self, operation, names, call):
            if operation == "read" and any("/blobs/" in name for name in names):
                reads.append(self.url)
            return super()._around(operation, names, call)

    def opened(**kept):
        return places.open(
            fast=Noting(places.other_fast()),
            durable=Noting(places.other()),
        )

    with opened() as ckpt:
        assert same(ckpt.load(1), make_state(1))
        assert set(reads) == {places.fast.url}
        reads.clear()
        Catalog(places.fast).delete(1)
        assert same(ckpt.load(1), make_state(1))
        assert places.durable.url in reads


def blob_of(backend, suffix):
    (name,) = (i.name for i in backend.list("data/") if i.name.endswith(suffix))
    return name


def damage(backend, name, how):
    blobs = backend._store.blobs
    data = bytearray(blobs[name].data)
    if how == "flip":
        data[len(data) // 2] ^= 1
    elif how == "cut":
        del data[len(data) // 2 :]
    if how == "missing":
        del blobs[name]
    else:
        blobs[name] = replace(blobs[name], data=bytes(data))


@pytest.mark.parametrize(
    ("what", "how"),
    [
        *((what, "flip") for what in (".raw", ".enc", ".json.zst", "commit")),
        ("index", "cut"),
        *((what, "missing") for what in (".raw", ".json.zst", "commit")),
    ],
)
def test_a_damaged_copy_is_repaired_by_the_other_tier(what, how, places, caplog):
    caplog.set_level("INFO", "penstock")
    rules = {"rules": [{"match": "optimizer/**", "codecs": ["zstd"]}]}
    with places.open(**rules) as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    name = "commits/00000001-0.json" if what == "commit" else blob_of(places.fast, what)
    good = places.fast._store.blobs[name].data
    damage(places.fast, name, how)
    with places.open(**rules) as ckpt:
        tree = blank(make_state(1))
        report = ckpt.restore(tree)
        assert report.fell_back_from == ()
        for key in ("model", "optimizer", "table"):
            assert same(tree[key], make_state(1)[key])
        view = ckpt.open(1)
        assert same(view["model/weight"], make_state(1)["model"]["weight"])
    if (what, how) == ("commit", "missing"):  # it was evicted
        assert report.rescued == ()
        assert places.steps() == ([], [1])
        return
    unread = how == "missing" or (what, how) == ("index", "cut")
    warning = (
        "tier fast lists it, but has lost"
        if unread
        else "the good copy in tier durable was read instead"
    )
    assert warning in caplog.text
    ((found, tier),) = report.rescued
    assert (found.partition(", section")[0], tier) == (name, "durable")
    assert places.fast._store.blobs[name].data == good
    assert "repaired in tier fast from durable" in caplog.text
    with checkpointer(places.fast) as alone:
        assert alone.verify(1).ok


def test_a_hung_repair_blocks_no_caller_forever(places, waits):
    with places.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    damage(places.fast, blob_of(places.fast, ".raw"), "flip")
    fast = FaultyBackend(places.other_fast())
    event = threading.Event()
    held = fast.block("create", event)
    clock = FlyingClock()
    waits(clock=clock)
    try:
        with places.open(fast=fast) as ckpt:
            assert same(ckpt.load(1), make_state(1))
            assert held.reached.wait(300)
            clock.flies = lambda: not event.is_set()
        assert not event.is_set()  # it was closed anyway
    finally:
        event.set()
    assert places.steps()[1] == [1]


def test_damage_in_both_tiers_is_damage(places):
    with places.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
        ckpt.save(make_state(2), 2).result(300)
        uid = ckpt.info(2).uid
    for backend in (places.fast, places.durable):
        damage(backend, f"data/{uid}/blobs/00000-0.raw", "flip")
    with places.open() as ckpt:
        with pytest.raises(penstock.DamagedError, match="checksum"):
            ckpt.load(2)
        tree = blank(make_state(1))
        assert ckpt.restore(tree, on_damage="fallback").step == 1


def test_a_deleted_step_is_deleted_everywhere_for_good(places):
    with places.open() as ckpt:
        for step in (1, 2, 3):
            ckpt.save(make_state(step), step).result(300)
        ckpt.delete(2)
        assert places.steps() == ([1, 3], [1, 3])
        ckpt.rewind(1)
        assert places.steps() == ([1], [1])
        ckpt.save(make_state(2), 2).result(300)
    assert places.steps() == ([1, 2], [1, 2])


def test_retention_counts_all_tiers_and_the_fast_one_may_keep_less(places):
    options = {"keep_fast": 1}
    with places.open(options=options, retention={"keep_last": 3}) as ckpt:
        for step in range(1, 6):
            ckpt.save(make_state(step), step).result(300)
            ckpt.wait()
    assert places.steps() == ([5], [3, 4, 5])


def test_a_step_of_another_tier_exists(places):
    with checkpointer(places.durable) as alone:
        alone.save(make_state(5), 5, mode="blocking")
    with places.open() as ckpt:
        with pytest.raises(penstock.StepExistsError):
            ckpt.save(make_state(4), 4)
        assert ckpt.latest() == 5
        report = ckpt.save(make_state(55), 5, overwrite=True).result(300)
        assert report.generation == 2
        ckpt.wait()
        assert ckpt.load(5)["epoch"] == 55
    assert places.steps() == ([5], [5])


def test_prune_checks_each_tier_separately(places):
    with places.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    for backend in (places.fast, places.durable):
        backend.publish(f"data/{'d' * 32}/index", b"left behind")
    # Leftovers of an interrupted eviction: the durable tier's record does not need them.
    with checkpointer(places.fast) as alone:
        uid = alone.info(1).uid
    places.fast.delete(["commits/00000001-0.json"])
    with places.open(grace_s=1e-6) as ckpt:
        time.sleep(0.01)  # until the data is older than that
        report = ckpt.prune()
        assert set(report.uids) == {"d" * 32, uid}
        assert same(ckpt.load(1), make_state(1))
    assert list(places.fast.list("data/")) == []


def test_data_of_one_tiers_orphans_is_deleted_in_all_at_once(places):
    with places.open() as ckpt:
        ckpt.save(make_state(2), 2).result(300)
    uids = [digit * 32 for digit in "def"]
    for place, uid, lender in zip((places.fast, places.durable), uids, uids[1:], strict=False):
        then = "2026-01-31T23:59:59Z"
        intent = IntentRecord(uid, 1, references=(lender,), started=then, refreshed=then)
        place.publish(intent_name(uid), encode_intent(intent))
    for backend in (places.fast, places.durable):
        backend.publish(f"data/{uids[2]}/blobs/00000-0.enc", b"lent")
    with places.open(grace_s=1e-6) as ckpt:
        time.sleep(0.01)  # until the data is older than that
        assert set(ckpt.prune().uids) == {*uids}
        assert same(ckpt.load(2), make_state(2))


def test_a_partial_copy_is_never_listed(places):
    """While a copy is held halfway, the durable tier does not have the step."""
    durable = FaultyBackend(places.other())
    event = threading.Event()
    held = durable.block("publish", event, match="commits/")
    with places.open(durable=durable) as ckpt:
        handle = ckpt.save(make_state(1), 1)
        assert held.reached.wait(300)
        assert Catalog(places.durable).steps() == []
        assert any("/blobs/" in i.name for i in places.durable.list("data/"))
        event.set()
        handle.result(300)
    assert places.steps() == ([1], [1])


class Hanging(WrapperBackend):
    """Holds calls until `released`, and moves the clock past the deadline of each caller."""

    def __init__(self, inner, waits, *operations):
        super().__init__(inner)
        self._operations = operations
        self.clock = FlyingClock()
        self._late_s = current_timing().tier_answer_s + 1
        self.released = threading.Event()
        self.asked = 0
        waits(clock=self.clock)

    def _around(self, operation, names, call):
        if operation in self._operations and not self.released.is_set():
            self.asked += 1
            self.clock.jumped_s += self._late_s
            self.released.wait()
        return super()._around(operation, names, call)


def test_a_hung_durable_tier_blocks_no_save(places, waits, caplog):
    durable = Hanging(places.other(), waits, "list", "stat", "read", "publish")
    try:
        with places.open(durable=durable) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(make_state(step), step).committed.result(300)
            assert "no answer for" in caplog.text
            durable.clock.flies = lambda: not durable.released.is_set()
    finally:
        durable.released.set()
    assert places.steps()[0] == [1, 2, 3]


def test_a_hung_tier_is_skipped_for_a_while_by_saves_and_clean_up(places, waits):
    durable = Hanging(places.other(), waits, "list")
    with places.open(durable=durable, retention={"keep_last": 2}) as ckpt:
        try:
            ckpt.save(make_state(1), 1).committed.result(300)
            # The save calls it, then the comparison of the tiers, then the copy.
            until(lambda: durable.asked == 3)
            for step in (2, 3, 4):
                ckpt.save(make_state(step), step).committed.result(300)
                ckpt.wait()
            assert durable.asked == 3
        finally:
            durable.released.set()
    with places.open(durable=places.other(), retention={"keep_last": 2}) as ckpt:
        for step in (5, 6):
            ckpt.save(make_state(step), step).result(300)
        until(lambda: ckpt.steps() == [5, 6])  # retention deletes the steps that it skipped


def test_a_skipped_tier_gets_copies_as_soon_as_it_is_back(places, waits, caplog):
    waits(tier_quick_error_s=0.0)  # each error counts as a slow one
    durable = away(places.durable)
    with places.open(durable=durable) as ckpt:
        handle = ckpt.save(make_state(1), 1)
        handle.committed.result(300)
        durable.clear()
        assert handle.result(300).tiers == ("fast", "durable")
    assert "cannot create a root record" not in caplog.text


def test_an_overwrite_still_queries_a_hung_tier(places, waits):
    durable = Hanging(places.other(), waits, "list")
    with places.open(durable=durable) as ckpt:
        try:
            ckpt.save(make_state(1), 1).committed.result(300)  # from now on it is paused
            with pytest.raises(penstock.StorageTimeoutError, match="no answer for 10 s"):
                ckpt.save(make_state(10), 1, overwrite=True)
        finally:
            durable.released.set()
        ckpt.save(make_state(10), 1, overwrite=True).result(300)
        assert same(ckpt.load(1), make_state(10))


@pytest.mark.parametrize("at", ["blobs/", "/index", "commits/"])
def test_a_step_deleted_during_its_copy_stays_deleted(at, places):
    durable = FaultyBackend(places.other())
    event = threading.Event()
    held = durable.block("create" if at == "blobs/" else "publish", event, match=at)
    with places.open(durable=durable) as ckpt:
        handle = ckpt.save(make_state(1), 1)
        assert held.reached.wait(300)
        deleting = threading.Thread(target=ckpt.delete, args=(1,))
        deleting.start()
        deleting.join(0.2)
        assert deleting.is_alive()  # it waits until the copy ends
        event.set()
        deleting.join(300)
        error = handle.durable.exception(300)  # none: it was durable for a moment, which is enough
        assert error is None or isinstance(error, penstock.CheckpointGoneError)
        ckpt.save(make_state(10), 1).result(300)
        assert same(ckpt.load(1), make_state(10))
    assert places.steps() == ([1], [1])
    for backend in (places.fast, places.durable):
        with checkpointer(backend) as alone:
            assert same(alone.load(1), make_state(10))


def test_by_configuration_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("FAST", str(tmp_path / "fast"))
    config = tmp_path / "penstock.toml"
    config.write_text(
        '[backend]\ntype = "tiered"\nfast = "${FAST}"\n'
        f'durable = {{ type = "posix", path = "{tmp_path}/durable" }}\nkeep_fast = 1\n'
    )
    model = torch.nn.Linear(8, 8)
    with penstock.Checkpointer.from_config(config) as ckpt:
        for step in (1, 2):
            ckpt.save({"model": model, "epoch": step}, step).result(300)
    assert len(list((tmp_path / "durable/commits").iterdir())) == 2
    assert len(list((tmp_path / "fast/commits").iterdir())) == 1
    with penstock.Checkpointer.from_config(config) as ckpt:
        assert same(ckpt.load(1)["model"]["weight"], model.weight.detach())


def test_retention_keeps_the_newest_durable_step_although_it_is_overwritten(places):
    durable = FaultyBackend(places.durable)
    durable.fail("create", times=None)
    with places.open(durable=durable, retention={"keep_last": 1}) as ckpt:

        def save(step, **options):
            ckpt.save({"x": step}, step, **options).committed.result(300)
            ckpt.wait()

        save(1)  # waits for its copy, and stays until then
        save(2)
        record = Catalog(places.fast).record(2)
        CheckpointCopy(places.fast, places.durable, record, workers=Workers(1), grace_s=60).run()
        save(2, overwrite=True)
        save(3)
        save(4)
        assert ckpt.steps() == [1, 2, 4]
        assert places.steps()[1] == [2]
        durable.clear()
