"""Each host copies its own blobs to the next tier, and rank 0 commits them there."""

import pytest
from tests.integration.ranks.test_hosts import Hosts, posix, restored, saved, state_of
from tests.integration.training import Gate

from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.checkpointer import Checkpointer
from penstock.core.errors import PenstockError
from penstock.testing.faults import FaultyBackend


class Tiered(Hosts):
    """Hosts in front of a durable tier, which each host opens in a way that can fail."""

    def __init__(self, folder, **options):
        super().__init__(folder, **options)
        self._seen = {}

    def durable(self, host, folder="durable"):
        """The durable tier as a host opens it; at the first call, the folder that it finds."""
        return self._seen.setdefault(host, FaultyBackend(posix(self._folder / folder)))

    def store(self, host):
        config = TieredConfig(fast="memory://", durable="memory://")
        fast = self.roots(host, posix(self.root(host)))
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


def test_deletion_ends_the_copy_of_another_host(tiers):
    gate = Gate()
    held = tiers.durable("b").block("write", gate, match="blobs/")

    def work(ckpt, rank, count):
        handle = ckpt.save(state_of(1, rank, count), 1)
        if rank == 0:
            assert held.reached.wait(300)
            ckpt.delete(1)
            gate.set()
        with pytest.raises(PenstockError):
            handle.result(300)
        saved(ckpt, rank, count, 2)

    tiers.run("ab", work)
    with Checkpointer(tiers.root("durable")) as ckpt:
        assert ckpt.steps() == [2]
    tiers.check(2, ranks=2)
