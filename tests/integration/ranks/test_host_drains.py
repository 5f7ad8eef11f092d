"""Each host copies its own blobs to the next tier, and rank 0 commits them there."""

import threading
import time
from dataclasses import replace

import pytest
from tests.integration.ranks.test_deltas import RULES, in_rows, weights
from tests.integration.ranks.test_host_copies import alone
from tests.integration.ranks.test_hosts import Hosts, posix, restored, saved, state_of
from tests.integration.support import memory, same
from tests.integration.training import Gate

from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.survey import sizes_of
from penstock.core.checkpointer import Checkpointer
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.lease import SILENT_S, Lease
from penstock.core.errors import PenstockError, StorageError
from penstock.core.format.records import commit_name
from penstock.core.tiers.host_orders import HostOrders, Order
from penstock.testing.faults import FaultyBackend
from penstock.testing.hasty import FAST, ShiftedClock


class Tiered(Hosts):
    """Hosts in front of a durable tier, which each host opens in a way that can fail."""

    def __init__(self, folder, drain_every=1, **options):
        super().__init__(folder, **options)
        self._drain_every = drain_every
        self._seen = {}

    def durable(self, host, folder="durable"):
        """The durable tier as a host opens it; at the first call, the folder that it finds."""
        return self._seen.setdefault(host, FaultyBackend(posix(self._folder / folder)))

    def store(self, host):
        every = self._drain_every
        config = TieredConfig(fast="memory://", durable="memory://", drain_every=every)
        fast = self.roots(host, self._faulty.get(host) or posix(self.root(host)))
        return TieredBackend(config, fast=fast, durable=self.durable(host))

    def written(self, host):
        """The ranks whose blobs a host has written to the durable tier."""
        calls = self.durable(host).calls
        return {names[0].split("/")[-1][:5] for name, names in calls if name == "create"}

    def check(self, step, ranks):
        """Restore a step from the durable tier alone, bit for bit."""
        with Checkpointer(self._folder / "durable") as ckpt:
            for rank in range(ranks):
                assert restored(ckpt, rank, ranks, step) == step


@pytest.fixture
def tiers(tmp_path):
    return Tiered(tmp_path)


def test_each_host_copies_its_own_blobs(tiers):
    tiers.save("abc", 1)
    assert [tiers.written(host) for host in "abc"] == [{"00000"}, {"00001"}, {"00002"}]
    tiers.check(1, ranks=3)


@pytest.mark.parametrize("operation", ["create", "write", "seal"])
def test_rank_0_copies_the_files_of_a_host_that_cannot(tiers, caplog, operation):
    tiers.durable("b").fail(operation, times=None, match="blobs/")
    tiers.save("ab", 1)
    assert tiers.written("a") == {"00000", "00001"}
    assert "host b cannot copy its files" in caplog.text
    tiers.check(1, ranks=2)


def test_unfinished_file_of_a_host_is_replaced(tiers, caplog):
    # It has created the file, as before a kill.
    tiers.durable("b").fail("create", times=None, match="blobs/", late=True)
    tiers.save("ab", 1)
    assert "cannot be copied" not in caplog.text  # the first try has succeeded
    tiers.check(1, ranks=2)


def test_host_without_the_mount_writes_nothing(tiers, tmp_path, caplog):
    tiers.durable("b", "not-mounted")
    tiers.save("ab", 1)
    assert "is it mounted?" in caplog.text
    assert not [*(tmp_path / "not-mounted").glob("data/*")]
    tiers.check(1, ranks=2)


def replicated_without_the_durable_tier(tmp_path, hosts):
    def work(ckpt, rank, count):
        saved(ckpt, rank, count, 1)
        assert ckpt._saver.job.handle.replicated.result(300)

    Hosts(tmp_path, copies=1).run(hosts, work)
    return Tiered(tmp_path, copies=1)


def test_holder_of_a_copy_copies_the_files_of_a_lost_host(tmp_path):
    tiers = replicated_without_the_durable_tier(tmp_path, "abc")
    tiers.lose("b")
    tiers.save("ac", 2)
    assert tiers.written("a") | tiers.written("c") == {"00000", "00001", "00002"}
    tiers.check(1, ranks=3)


def test_damaged_file_is_copied_from_another_host(tmp_path, caplog):
    tiers = replicated_without_the_durable_tier(tmp_path, "ab")
    for blob in tiers.root("b").glob("data/*/blobs/*"):
        blob.write_bytes(bytes(blob.stat().st_size))
    tiers.save("ab", 2)
    assert "host b cannot copy its files" in caplog.text
    assert "cannot be copied" not in caplog.text  # the first try has succeeded
    tiers.check(1, ranks=2)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("kind", ["blobs/*", "parts/*", "index"])
@pytest.mark.parametrize("spoil", [zero, truncate])
def test_damage_on_rank_0_does_not_keep_a_step_from_the_next_tier(tmp_path, caplog, kind, spoil):
    tiers = replicated_without_the_durable_tier(tmp_path, "ab")
    for path in tiers.root("a").glob(f"data/*/{kind}"):
        spoil(path)
    tiers.save("ab", 2)
    assert "cannot be copied" not in caplog.text  # the first try has succeeded
    tiers.check(1, ranks=2)


def overwrite_2(ckpt, rank, count):
    ckpt.save(state_of(2, rank, count), 2, overwrite=True).committed.result(300)


CHANGES = {
    "delete": lambda ckpt, rank, _: rank or ckpt.delete(2),
    "rewind": lambda ckpt, rank, _: rank or ckpt.rewind(1),
    "overwrite": overwrite_2,
}


@pytest.mark.parametrize("how", CHANGES)
def test_step_that_is_deleted_or_replaced_meanwhile_leaves_nothing(tiers, how):
    gate, ready = Gate(), threading.Barrier(2)
    held = tiers.durable("b").block("write", gate, nth=2, match="blobs/")

    def work(ckpt, rank, count):
        saved(ckpt, rank, count, 1)
        handle = ckpt.save(state_of(7, rank, count), 2)
        alone(ready, rank, lambda: held.reached.wait(300))
        CHANGES[how](ckpt, rank, count)
        alone(ready, rank, gate.set)
        with pytest.raises(PenstockError, match="replaced" if how == "overwrite" else "deleted"):
            handle.result(300)
        saved(ckpt, rank, count, 3)

    tiers.run("ab", work)
    steps = [1, 2, 3] if how == "overwrite" else [1, 3]
    with Checkpointer(tiers.root("durable")) as ckpt:
        assert ckpt.steps() == steps
    for step in steps:
        tiers.check(step, ranks=2)
    if how != "overwrite":  # its blobs are left to prune
        assert len([*tiers.root("durable").glob("data/*/blobs/*")]) == 2 * len(steps)


def test_hosts_copy_every_nth_save(tmp_path):
    tiers = Tiered(tmp_path, drain_every=2)
    tiers.save("ab", 1, 2, 3)
    with Checkpointer(tiers.root("durable")) as ckpt:
        assert ckpt.steps() == [1, 3]
    assert [tiers.written(host) for host in "ab"] == [{"00000"}, {"00001"}]
    tiers.check(3, ranks=2)


@pytest.mark.parametrize("drain_every", [1, 2])
def test_each_host_copies_the_blobs_that_its_deltas_borrow(tmp_path, drain_every):
    with Checkpointer(memory(), rules=RULES) as ckpt:  # compiles the codec
        ckpt.save(weights(0), 0, mode="blocking")
    tiers = Tiered(tmp_path, drain_every)

    def work(ckpt, rank, count):
        for step in (1, 2, 3):
            ckpt.save(in_rows(step, rank, count), step).result(300)

    tiers.run("ab", work, rules=RULES)
    assert [tiers.written(host) for host in "ab"] == [{"00000"}, {"00001"}]
    created = [
        names for host in "ab" for name, names in tiers.durable(host).calls if name == "create"
    ]
    assert len(created) == len({*created})
    with Checkpointer(tiers.root("durable")) as ckpt:
        assert ckpt.steps() == [*range(1, 4, drain_every)]
        assert Catalog(ckpt._backend).record(3).references
        for step in ckpt.steps():
            assert same(ckpt.load(step), weights(step))


def test_step_reaches_the_next_tier_after_the_loss_of_a_host(tmp_path):
    tiers = replicated_without_the_durable_tier(tmp_path, "ab")
    pin = Hosts(tmp_path, copies=1)
    pin.run("ab", lambda ckpt, rank, _: (ckpt.steps(), rank or ckpt.pin(1, "good")))
    root, gate, ready = tiers.faulty("b"), Gate(), threading.Barrier(2)
    tiers.durable("a").block("create", gate, match="blobs/")
    commit = tiers.root("durable") / commit_name(1, 0)

    def work(ckpt, rank, count):
        ckpt.save(state_of(2, rank, count), 2).committed.result(300)
        alone(ready, rank, lambda: root.fail("list", times=None, match="notes/"))
        gate.set()
        until = time.monotonic() + 20
        while rank == 0 and not commit.exists() and time.monotonic() < until:
            time.sleep(0.01)

    tiers.run("ab", work)
    tiers.check(1, ranks=2)
    with Checkpointer(tiers.root("durable")) as ckpt:
        assert ckpt.info(1).tags == ("good",)


def test_push_that_a_host_gave_up_fails_when_rank_0_asks_again(tmp_path):
    Hosts(tmp_path).save("a", 1)
    clock, gate, tiers = ShiftedClock(), Gate(), Tiered(tmp_path)
    timing = replace(FAST, clock=clock)
    store, durable = tiers.store("a"), tiers.durable("a")
    held = durable.block("write", gate)
    record = Catalog(store).record(1)
    lease = Lease(durable, record.uid, timing)
    lease.take()
    blobs = {n: size for n, size in sizes_of(store, record).items() if "/blobs/" in n}
    order = Order(commit_name(1, 0), blobs, lease.token).encoded()
    orders = HostOrders(store, Workers(1, timing=timing))
    orders.execute(0, "push", order)
    assert held.reached.wait(300)
    clock.ahead_s = SILENT_S
    gate.set()
    orders._tasks[0, "push"]._thread.join(300)
    with pytest.raises(StorageError, match="no longer asks"):
        orders.execute(0, "push", order)
    orders.close()
