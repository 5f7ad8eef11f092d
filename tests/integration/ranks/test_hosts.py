"""Ranks whose hosts have separate roots save and restore one checkpoint together."""

import logging
import os
import shutil
import signal
import threading
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from tests.integration.ranks.saving import Job
from tests.integration.ranks.test_processes import JOIN, LIMIT_S, end, start
from tests.integration.training import Gate

from penstock import Checkpointer, ConfigError, Shard
from penstock.backends.hosts import HostsBackend, HostsConfig
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.abc import HOST_NAME, HostRecord, HostRoot, encode_host, read_host
from penstock.core.catalog.catalog import Catalog
from penstock.core.cli.commands.ls import list_run
from penstock.core.errors import (
    DamagedError,
    FormatError,
    PenstockError,
    StorageError,
)
from penstock.core.storage.open import open_backend
from penstock.testing.faults import FaultyBackend


class Hosts:
    """The roots of several hosts, and the jobs that run on them.

    Args:
        durable: The durable tier behind the roots; None: there is none.
        options: Of the backend `hosts`; functions are called with the host.
    """

    def __init__(self, folder, durable=None, **options):
        self._folder = folder
        self._durable = durable
        self._options = options
        self._faulty = {}
        self._opened = []

    def root(self, host):
        return self._folder / host

    def faulty(self, host):
        """From now on, open the root of a host in a way that can fail; return that backend."""
        self._faulty[host] = FaultyBackend(posix(self.root(host)))
        return self._faulty[host]

    def lose(self, host):
        shutil.rmtree(self.root(host))

    def copy(self, host):
        """Copy the root of a host as it is now; return the function that brings it back."""
        copied = self._folder / f"copy-of-{host}"
        shutil.copytree(self.root(host), copied)

        def bring_back():
            shutil.rmtree(self.root(host), ignore_errors=True)
            copied.rename(self.root(host))

        return bring_back

    def store(self, host):
        """The backend of the rank on a host."""
        options = {k: v(host) if callable(v) else v for k, v in self._options.items()}
        fast = {"type": "hosts", "path": str(self.root(host)), **options}
        if host in self._faulty:
            return self.roots(host, self._faulty[host])
        if self._durable is None:
            return fast
        return {"type": "tiered", "fast": fast, "durable": self._durable}

    def roots(self, host, root):
        """The roots of all hosts, as the rank on `host` with this root opens them."""
        options = {k: v(host) if callable(v) else v for k, v in self._options.items()}
        store = HostsBackend(HostsConfig(path="", **options), root=root)
        self._opened.append(store)
        return store

    def job(self, hosts, **options):
        """A job with one rank on each of these hosts, such as `ab`."""
        options = {"host": hosts.__getitem__, **options}
        return Job(len(hosts), lambda rank: self.store(hosts[rank]), **options)

    def run(self, hosts, work, **options):
        """Return the results of `work(ckpt, rank, count)`, which must not raise."""
        found = self.job(hosts, **options).run(lambda ckpt, rank: work(ckpt, rank, len(hosts)))
        for root in [root for store in self._opened for root in store.roots[1:]]:
            root.backend.close()
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found

    def save(self, hosts, *steps, **options):
        self.run(hosts, lambda *of: [saved(*of, step=step) for step in steps], **options)

    def restore(self, hosts, step="latest", **options):
        """Restore on all hosts bit for bit; return the step."""
        found = self.run(hosts, lambda *of: restored(*of, step=step, **options))
        assert len(set(found)) == 1
        return found[0]


def whole(step):
    return torch.arange(48.0).reshape(12, 4) * step


def state_of(step, rank, count):
    """Rows of a tensor that all ranks hold together."""
    size = 12 // count
    rows = whole(step)[rank * size : (rank + 1) * size].clone()
    return {"w": Shard(rows, (12, 4), (rank * size, 0)), "step": step}


def saved(ckpt, rank, count, step):
    return ckpt.save(state_of(step, rank, count), step).result(300)


def restored(ckpt, rank, count, step, **options):
    state = state_of(0, rank, count)
    report = ckpt.restore(state, step, **options)
    assert torch.equal(state["w"].tensor, state_of(report.step, rank, count)["w"].tensor)
    assert state["step"] == report.step
    return report.step


def rewind_to_1(ckpt, rank, _):
    ckpt.steps()  # all ranks join their roots
    return ckpt.rewind(1) if rank == 0 else None


def delete_1(ckpt, rank, _):
    ckpt.steps()
    return ckpt.delete(1) if rank == 0 else None


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path)


@pytest.mark.parametrize("later", ["ab", "ba", "abc", "cab", "bcda"])
def test_job_restarts_on_the_same_hosts_in_any_order_and_more(hosts, later):
    hosts.save("ab", 1, 2)
    assert {path.name[:5] for path in hosts.root("a").glob("data/*/parts/*")} == {"00000"}
    assert hosts.restore(later) == 2
    assert hosts.restore(later, 1) == 1


def test_ranks_on_fewer_hosts_restore_if_the_hosts_have_all(hosts):
    hosts.save("abc", 1)

    def work(ckpt, rank, count):
        return restored(ckpt, rank, count, step="latest")

    # Two ranks on one host, and one rank on each of the other two.
    assert hosts.run("aabc", work) == [1] * 4


def test_host_without_its_root_leaves_the_step_incomplete(hosts):
    hosts.save("a", 1)
    hosts.save("ab", 2)
    hosts.lose("b")
    assert hosts.restore("ab") == 1

    def look(ckpt, rank, count):
        with pytest.raises(DamagedError, match=r"step 2 .* is incomplete"):
            ckpt.restore(state_of(0, rank, count), 2)
        return ckpt.steps(), ckpt.latest()

    assert hosts.run("ab", look) == [([1], 1)] * 2


def test_absent_host_is_named(hosts):
    hosts.save("ab", 2)

    def look(ckpt, rank, count):
        for call in (lambda: ckpt.info(2), ckpt.latest):
            with pytest.raises(DamagedError, match=r"\(absent: b\)"):
                call()

    hosts.run("ac", look)
    assert hosts.restore("ab") == 2  # nothing was changed


def test_job_with_incomplete_steps_alone_does_not_start_from_scratch(hosts):
    hosts.save("ab", 2, 3)
    whys = [
        r"\(absent: b\).*start again with them.*first delete 2, 3 on rank 0",
        "all checkpoints are incomplete",
    ]

    def start(ckpt, rank, count):
        state = state_of(0, rank, count)
        for attempt in (ckpt.resume, ckpt.restore):
            with pytest.raises(DamagedError, match=whys[rank]):
                attempt(state)

    hosts.run("ac", start)
    assert hosts.restore("ab") == 3  # nothing was changed

    def delete(ckpt, rank, count):
        ckpt.steps()  # all ranks join their roots
        for step in () if rank else (2, 3):
            ckpt.delete(step)

    hosts.run("ac", delete)
    assert hosts.run("ac", lambda ckpt, *of: ckpt.resume(state_of(0, *of))) == [0, 0]


def test_prune_keeps_incomplete_steps(hosts):
    hosts.save("ab", 2)
    hosts.run("a", lambda ckpt, *_: ckpt.prune(), grace_s=0.001)
    assert hosts.restore("ab") == 2


def test_job_that_lost_a_host_saves_the_incomplete_step_again(hosts):
    hosts.save("a", 1)
    hosts.save("ab", 2, 3)
    bring_back = hosts.copy("b")
    hosts.lose("b")
    assert hosts.restore("ab") == 1
    hosts.save("ab", 2)
    assert hosts.restore("ab") == 2
    bring_back()
    # Step 2 lacks what the new root of b had. The old steps 2 and 3 do not come back.
    assert hosts.restore("ab") == 1


def test_returning_root_never_wins(hosts):
    hosts.save("ab", 1, 2, 3)
    bring_back = hosts.copy("b")
    hosts.run("ab", rewind_to_1)
    hosts.save("ab", 2)
    bring_back()
    assert hosts.restore("ba") == 1  # step 2 needs what the old root of b lacks
    hosts.save("ab", 2)
    assert hosts.restore("ba") == 2


def test_old_root_does_not_bring_back_what_a_job_without_it_deleted(hosts):
    hosts.save("a", 1, 2)
    hosts.run("ab", lambda ckpt, rank, _: saved(ckpt, rank, 2, 3))
    bring_back = hosts.copy("a")
    hosts.run("ab", rewind_to_1)
    bring_back()
    assert hosts.run("ab", lambda ckpt, *_: ckpt.steps()) == [[1], [1]]


def test_job_on_far_fewer_hosts_continues_from_an_older_step_only_by_its_number(hosts):
    hosts.save("a", 1)
    hosts.save("abc", 2)

    def continued(ckpt, *of):
        for call in (ckpt.latest, lambda: ckpt.resume(state_of(0, *of))):
            with pytest.raises(DamagedError, match="fewer hosts than the last one"):
                call()
        return restored(ckpt, *of, step=1)

    assert hosts.run("a", continued) == [1]
    assert hosts.restore("axy") == 1  # as many hosts as before


def test_only_rank_0_deletes_so_that_an_absent_root_brings_nothing_back(hosts):
    hosts.save("a", 1)
    hosts.save("abc", 2)

    def change(ckpt, rank, _):
        ckpt.steps()
        for call in (ckpt.delete, ckpt.rewind) if rank else ():
            with pytest.raises(StorageError, match="only rank 0 may delete"):
                call(1)

    hosts.run("ab", change)
    assert hosts.run("abc", lambda ckpt, *_: ckpt.steps()) == [[1, 2]] * 3


def test_note_on_a_host_that_was_away_changes_nothing_on_others(hosts):
    hosts.save("abc", 1)
    hosts.save("ab", 2)
    with Checkpointer(hosts.store("c")) as ckpt:
        ckpt.pin(1, "good")
    assert hosts.run("abc", lambda ckpt, *_: ckpt.steps()) == [[1, 2]] * 3


@pytest.mark.parametrize("later", ["xab", "abx"])
def test_note_before_the_first_save_of_a_job_with_a_new_host(hosts, later):
    hosts.save("a", 1)
    hosts.save("ab", 2)
    hosts.run(later, lambda ckpt, *_: ckpt.pin(1, "good"))
    hosts.save(later, 3)
    hosts.lose("b")
    tags = hosts.run(later.replace("b", ""), lambda ckpt, *_: ckpt.info(1).tags)
    assert tags == [("good",)] * 2


def test_new_root_without_its_records_does_not_lead_the_run(hosts):
    """A crash may leave such a root, and the next job may begin without the other hosts."""
    hosts.save("ab", 1, 2)
    hosts.faulty("c").fail("publish", times=None, match="commits/")
    with pytest.raises(PenstockError):
        hosts.save("abc", 3)
    assert [*hosts.root("c").glob("**/*.json")] == [hosts.root("c") / HOST_NAME]
    hosts._faulty.clear()
    hosts.save("c", 1)
    with pytest.raises(ConfigError, match="belong to different runs"):
        hosts.save("abc", 3)
    assert hosts.restore("ab") == 2


def test_records_of_an_old_root_are_gone_when_it_joins_the_epoch(hosts):
    hosts.save("b", 5)
    bring_back = hosts.copy("b")
    hosts.run("ab", lambda ckpt, rank, _: (ckpt.steps(), rank or ckpt.delete(5)))
    bring_back()
    hosts.save("ab", 1)
    assert hosts.run("ab", lambda ckpt, *_: ckpt.steps()) == [[1], [1]]


def test_every_host_gets_every_commit_record(hosts):
    hosts.save("a", 1)
    hosts.save("ab", 2)
    for host in "ab":
        assert len([*hosts.root(host).glob("commits/*")]) == 2


def test_command_line_shows_what_one_host_lacks(hosts):
    hosts.save("a", 1)
    hosts.save("ab", 2)
    with closing(open_backend(f"hosts://{hosts.root('a')}")) as backend:
        assert [one.incomplete for one in list_run(backend)] == [False, True]


def test_blobs_of_an_old_root_count(hosts):
    hosts.save("ab", 1)
    hosts.save("a", 2)  # b is away
    assert hosts.restore("ab", 1) == 1


def test_roots_of_different_runs_are_refused(hosts):
    hosts.save("a", 7)
    hosts.save("bc", 1)
    with pytest.raises(ConfigError, match="hosts a and b belong to different runs"):
        hosts.save("abc", 8)
    assert hosts.restore("a") == 7
    assert hosts.restore("cb") == 1


def test_jobs_without_a_common_host_are_ordered_by_time(tmp_path):
    tiers = Hosts(tmp_path, durable=str(tmp_path / "durable"))
    tiers.save("a", 1, 7)
    tiers.run("b", rewind_to(1))
    tiers.save("b", 2)
    assert tiers.restore("ab") == 2


def test_delete_reaches_all_hosts(hosts):
    hosts.save("ab", 1, 2)
    hosts.run("ab", delete_1)
    assert hosts.restore("ba") == 2
    for host in "ab":
        assert len([*hosts.root(host).glob("data/*")]) == 1
        assert len([*hosts.root(host).glob("commits/*")]) == 1


def test_copies_reach_the_durable_tier_and_restore_without_a_host(hosts, tmp_path):
    tiers = Hosts(tmp_path, durable=str(tmp_path / "durable"))
    tiers.save("ab", 1, 2)
    assert len([*(tmp_path / "durable").glob("commits/*")]) == 2
    tiers.lose("b")
    assert tiers.restore("ab") == 2
    tiers.save("ab", 3)
    assert tiers.restore("ba") == 3


def rewind_to(step):
    def work(ckpt, rank, _):
        ckpt.steps()
        return ckpt.rewind(step) if rank == 0 else None

    return work


def posix(path):
    return PosixBackend(PosixConfig(path=str(path)))


def opened(hosts, host):
    return closing(open_backend(f"hosts://{hosts.root(host)}"))


def test_damaged_host_record_is_refused_and_deletes_nothing(hosts):
    hosts.save("ab", 1)
    hosts.save("a", 2)
    (hosts.root("a") / "tier/host.json").write_text("{")
    with pytest.raises(PenstockError, match=r"host\.json .* cannot be read.* move its root away"):
        hosts.save("ab", 3)
    with opened(hosts, "a") as backend, pytest.raises(FormatError, match=r"host\.json"):
        Catalog(backend).delete(1)
    assert len([*hosts.root("a").glob("commits/*")]) == 2


def test_incomplete_overwrite_falls_back_to_the_whole_generation(tmp_path, caplog):
    tiers = Hosts(tmp_path, durable=str(tmp_path / "durable"))
    tiers.save("ab", 1, 2)

    def overwrite(ckpt, rank, count):
        return ckpt.save(state_of(2, rank, count), 2, overwrite=True).committed.result(300)

    durable, before = tmp_path / "durable", tmp_path / "before"
    shutil.copytree(durable, before)
    tiers.run("ab", overwrite)
    shutil.rmtree(durable)
    before.rename(durable)  # as if the hosts had died before the copy
    tiers.lose("b")
    assert tiers.restore("ab") == 2
    assert "an older generation is used" in caplog.text
    tiers.save("ab", 3)
    assert tiers.restore("ab", 2) == 2
    assert tiers.restore("ab") == 3


def test_rewind_to_an_incomplete_step_is_refused(hosts):
    hosts.save("ab", 1)
    hosts.save("a", 2, 3)
    hosts.lose("b")
    with pytest.raises(DamagedError, match="later steps were not deleted"):
        hosts.run("a", rewind_to(1))
    assert hosts.restore("a") == 3


def test_command_line_deletes_nothing_of_one_host_alone(hosts):
    hosts.save("ab", 1, 2)
    min((hosts.root("a") / "commits").iterdir()).unlink()
    with opened(hosts, "a") as backend:
        catalog = Catalog(backend)
        with pytest.raises(StorageError, match="the hosts b of the last job are absent"):
            catalog.delete(2)
        report = catalog.prune(grace_s=0, everything=True)
        assert "the hosts b of the last job are absent" in report.refused[0]
    hosts.save("ab", 3)
    assert hosts.restore("ab", 1) == 1
    assert hosts.restore("ab", 2) == 2


@pytest.mark.parametrize("is_damaged", [False, True])
def test_root_of_one_of_several_hosts_is_not_changed_by_its_path(hosts, is_damaged):
    hosts.save("ab", 1, 2)
    why = "is the root of a, one of 2 hosts"
    if is_damaged:
        record, why = hosts.root("a") / "tier/host.json", "may be the root of one of several hosts"
        record.write_bytes(record.read_bytes()[1:])
    before = files(hosts, "a")
    with Checkpointer(hosts.root("a"), grace_s=0.001) as ckpt:
        assert ckpt.steps() == [1, 2]
        for change in (
            lambda: ckpt.save({"x": 1}, 3, mode="blocking"),
            lambda: ckpt.save({"x": 1}, 2, overwrite=True, mode="blocking"),
            lambda: ckpt.delete(1),
            lambda: ckpt.rewind(1),
            lambda: ckpt.prune(everything=True),
            lambda: ckpt.pin(1, "good"),
        ):
            with pytest.raises(PenstockError, match=why):
                change()
    assert files(hosts, "a") == before
    if not is_damaged:
        assert hosts.restore("ab") == 2


def test_fast_tier_that_is_the_root_of_one_of_several_hosts_is_not_changed(hosts, tmp_path):
    hosts.save("ab", 1)
    before = files(hosts, "a")
    tiers = {"type": "tiered", "fast": str(hosts.root("a")), "durable": str(tmp_path / "durable")}
    with Checkpointer(tiers) as ckpt, pytest.raises(StorageError, match="one of 2 hosts"):
        ckpt.save({"x": 2}, 2, mode="blocking")
    assert files(hosts, "a") == before


def test_root_of_the_only_host_is_a_run(hosts):
    hosts.save("a", 1)
    with Checkpointer(hosts.root("a")) as ckpt:
        ckpt.delete(1)
        assert ckpt.steps() == []


def files(hosts, host):
    root = hosts.root(host)
    return {path: path.is_file() and path.read_bytes() for path in root.rglob("*")}


def test_incomplete_steps_are_looked_for_without_an_absent_durable_tier(tmp_path):
    fast, durable = (FaultyBackend(posix(tmp_path / name)) for name in ("fast", "durable"))
    roots = HostsBackend(HostsConfig(path=""), root=fast)
    config = TieredConfig(fast="memory://", durable="memory://")
    tiered = TieredBackend(config, fast=roots, durable=durable)
    with Checkpointer(tiered) as ckpt:
        ckpt.save({"x": 1}, 1, mode="blocking")
        durable.fail("list", times=None)
        assert ckpt.save({"x": 2}, 2).committed.result(300).step == 2
        durable.clear()


def test_incomplete_step_is_copied_to_the_next_tier_once_its_hosts_are_back(tmp_path, caplog):
    Hosts(tmp_path).save("ab", 1)
    tiers = Hosts(tmp_path, durable=str(tmp_path / "durable"))
    tiers.save("ac", 2)
    assert [r for r in caplog.records if r.levelno > logging.WARNING] == []
    assert (
        "step 1 cannot be copied from tier fast to durable yet, but by the next job" in caplog.text
    )
    with Checkpointer(tmp_path / "durable") as ckpt:
        assert ckpt.steps() == [2]
    tiers.save("abc", 3)
    with Checkpointer(tmp_path / "durable") as ckpt:
        assert ckpt.steps() == [1, 2, 3]


def test_hosts_that_share_a_root_are_refused_before_a_record_is_changed(hosts):
    hosts.root("shared").mkdir()
    for host in "bc":
        hosts.root(host).symlink_to(hosts.root("shared"))
    with pytest.raises(ConfigError, match="hosts b, c share a root"):
        hosts.save("abc", 1)
    hosts.save("b", 2)
    assert not [*hosts.root("a").glob("*")]
    with pytest.raises(ConfigError, match="hosts b, c share a root"):
        hosts.save("bc", 3)
    with Checkpointer(hosts.root("b")) as ckpt:
        assert ckpt.steps() == [2]
        assert not [*hosts.root("b").glob("clock/*")]


def test_root_from_before_its_use_with_hosts_is_not_emptied(hosts):
    with Checkpointer(hosts.root("a")) as ckpt:
        ckpt.save({"x": 1}, 9)
    hosts.save("b", 1)
    with pytest.raises(StorageError, match="from before it was used with hosts"):
        hosts.save("ab", 10)
    assert len([*hosts.root("a").glob("commits/*")]) == 1


def test_old_root_keeps_its_records_until_it_has_the_new_ones(tmp_path):
    newer, older = posix(tmp_path / "a"), FaultyBackend(posix(tmp_path / "b"))
    newer.publish("commits/00000000000000000002", b"2")
    older.publish("commits/00000000000000000001", b"1")
    roots = HostsBackend(HostsConfig(path=""), root=newer)
    roots.join(HostRoot("a", 2, newer), [HostRoot("b", 1, older)], leads=True)
    older.fail("publish", match="commits/")
    with pytest.raises(StorageError):
        roots.publish("commits/00000000000000000003", b"3")
    assert [info.name[-1] for info in older.list("commits/")] == ["1"]
    roots.publish("commits/00000000000000000003", b"3")
    assert [info.name[-1] for info in older.list("commits/")] == ["2", "3"]


@pytest.mark.parametrize("same_job", [False, True])
def test_new_root_can_be_used_after_an_interrupted_first_change(tmp_path, same_job):
    used, new = posix(tmp_path / "a"), FaultyBackend(posix(tmp_path / "b"))
    used.publish(HOST_NAME, encode_host(HostRecord("a", 2, ("a",), "")))
    used.publish("commits/00000000000000000001", b"1")
    used.publish("commits/00000000000000000002", b"2")

    def job():
        roots = HostsBackend(HostsConfig(path=""), root=used)
        epochs = [getattr(read_host(root), "epoch", 0) for root in (used, new)]
        others = [HostRoot("b", epochs[1], new)]
        roots.join(HostRoot("a", epochs[0], used), others, leads=True)
        return roots

    roots = job()
    new.fail("publish", match="2")
    with pytest.raises(StorageError):
        roots.publish("commits/00000000000000000003", b"3")
    (roots if same_job else job()).publish("commits/00000000000000000003", b"3")
    assert [info.name[-1] for info in new.list("commits/")] == ["1", "2", "3"]


def test_record_that_is_deleted_meanwhile_is_not_published_again(tmp_path):
    own, other, gate = posix(tmp_path / "a"), FaultyBackend(posix(tmp_path / "b")), Gate()
    root = HostRoot("b", 2, other)
    roots = HostsBackend(HostsConfig(path=""), root=own)
    roots.join(HostRoot("a", 2, own), [root], leads=False)
    own.publish("commits/1", b"1")
    held = other.block("publish", gate)
    publishing = threading.Thread(target=roots.publish_again, args=("commits/1", root))
    publishing.start()
    assert held.reached.wait(60)
    deleting = threading.Thread(target=roots.delete, args=(["commits/1"],))
    deleting.start()
    deleting.join(2)  # without the lock, it is over
    gate.set()
    publishing.join(60)
    deleting.join(60)
    assert not other.list("commits/")


def test_commit_records_are_listed_without_other_hosts_and_none_is_forgotten(tmp_path):
    """A record that another host may still have would come back in the next job."""
    own, other = posix(tmp_path / "a"), FaultyBackend(posix(tmp_path / "b"))
    roots = HostsBackend(HostsConfig(path=""), root=own)
    roots.join(HostRoot("a", 0, own), [HostRoot("b", 0, other)], leads=True)
    roots.publish("commits/1", b"1")
    other.fail("list")
    other.fail("delete")
    with pytest.raises(StorageError):
        roots.delete(["commits/1"])
    assert [info.name for info in roots.list("commits/")] == ["commits/1"]


def test_truncated_file_does_not_hide_the_durable_checkpoint(tmp_path):
    tiers = Hosts(tmp_path, durable=str(tmp_path / "durable"))
    tiers.save("ab", 1, 2)
    for path in tiers.root("a").glob("data/*/blobs/*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert tiers.restore("ab") == 2


def test_pins_survive_the_host_that_wrote_them(hosts):
    hosts.save("a", 1)
    hosts.save("ab", 2)
    hosts.run("ab", lambda ckpt, rank, _: (ckpt.steps(), rank or ckpt.pin(1, "good")))
    for name in ("commits", "notes", "tier"):
        shutil.rmtree(hosts.root("a") / name)
    assert hosts.run("ab", lambda ckpt, *_: ckpt.info(1).tags) == [("good",)] * 2


def test_refused_deletion_deletes_nothing_in_the_durable_tier(tmp_path):
    hosts = Hosts(tmp_path, durable=str(tmp_path / "durable"))
    hosts.save("ab", 1, 2)
    fast = {"type": "hosts", "path": str(hosts.root("a"))}
    backend = {"type": "tiered", "fast": fast, "durable": str(tmp_path / "durable")}
    with (
        closing(open_backend(backend)) as store,
        pytest.raises(StorageError, match="nothing was deleted"),
    ):
        Catalog(store).delete(1)
    with Checkpointer(tmp_path / "durable") as ckpt:
        assert ckpt.steps() == [1, 2]


def test_copies_need_a_root_that_renames():
    options = {"type": "hosts", "path": "s3://bucket/run"}
    with pytest.raises(ConfigError, match="path must be a folder"):
        Checkpointer({**options, "copies": 1})


DIES = (
    JOIN
    + """
import os
from pathlib import Path

limit_s, kind = float(sys.argv[5]), sys.argv[6]

def open_at(host):
    backend = {"type": "hosts", "path": f"{root}/host{host}"}
    if kind == "tiered":
        backend = {"type": "tiered", "fast": backend, "durable": f"{root}/durable"}
    return penstock.Checkpointer(backend, rank_timeout_s=limit_s)

part = lambda n: penstock.Shard(torch.full((9, 4), float(n)), (9 * count, 4), (9 * rank, 0))
with open_at(rank) as ckpt:
    ckpt.save({"w": part(1 + rank)}, 1, mode="blocking")

def wait(progress):
    if progress.phase == "read" and not progress.bytes_done:
        print("reads", flush=True)
        while rank == 0 or not Path(f"{root}/go").exists():
            time.sleep(0.05)

ckpt = open_at((rank + 1) % count)  # rank 0 now serves what rank 1 has saved
found = part(0)
try:
    ckpt.restore({"w": found}, on_progress=wait)
except penstock.PenstockError as error:
    equal = torch.equal(found.tensor, part(1 + rank).tensor)
    print(equal, type(error).__name__, str(error).replace("\\n", " "), sep="|", flush=True)
    os._exit(0)
"""
)


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("kind", ["alone", "tiered"])
def test_host_that_dies_ends_the_restore_by_name(tmp_path, how, kind):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    root = tmp_path / "run"
    processes = start(DIES, 3, store.port, root, LIMIT_S, kind)
    try:
        for process in processes:
            assert process.stdout.readline() == "reads\n"
        os.kill(processes[0].pid, how)
        (root / "go").touch()
        reports = [process.stdout.readline().split("|") for process in processes[1:]]
        print(reports)
        assert all("rank 0" in text for _, _, text in reports)
        if kind == "tiered":  # rank 1 has read its bytes from the durable tier
            assert [equal for equal, _, _ in reports] == ["True", "True"]
    finally:
        end(processes)


def test_incomplete_checkpoint_does_not_hide_a_whole_one_of_the_same_step(tmp_path):
    ours = Hosts(tmp_path / "ours", durable=str(tmp_path / "ours" / "durable"))
    theirs = Hosts(tmp_path / "theirs", durable=str(tmp_path / "theirs" / "durable"))
    ours.save("ab", 1)
    theirs.save("cd", 1, 2)
    for folder in ("commits", "data"):
        shutil.rmtree(tmp_path / "ours" / "durable" / folder)
        shutil.copytree(
            tmp_path / "theirs" / "durable" / folder, tmp_path / "ours" / "durable" / folder
        )
    ours.lose("b")  # step 1 of this run is incomplete, and the durable tier has another one
    assert ours.restore("ax", 1) == 1
    assert ours.restore("ax") == 2
    ours.run("ax", rewind_to(1))
    ours.save("ax", 2)
    with Checkpointer(tmp_path / "ours" / "durable") as ckpt:
        assert ckpt.steps() == [1, 2]
        assert ckpt.verify(1).ok


def test_host_with_the_name_of_another_is_absent(tmp_path):
    hosts = Hosts(tmp_path)
    hosts.job("abc", host=lambda _: "same").run(lambda ckpt, rank: saved(ckpt, rank, 3, 1))

    def work(ckpt, rank):
        ckpt.steps()
        return ckpt._backend.inner.absent()

    assert hosts.job("ab", host=lambda _: "same").run(work) == [("same",)] * 2
    assert hosts.job("cab", host=lambda _: "other").run(work) == [()] * 3
