"""Hosts copy each other's files, so that a job survives the loss of any one of them."""

import threading
import time
from contextlib import suppress

import pytest
from tests.integration.ranks.saving import LONG_S, SHORT_TIMEOUT_S
from tests.integration.ranks.test_hosts import Hosts, posix, restored, saved, state_of
from tests.integration.training import Gate

from penstock.core.errors import CheckpointNotFoundError, ConfigError, DamagedError, RankError
from penstock.core.format.records import parse_commit_name


def handle(ckpt):
    return ckpt._saver.job.handle


def replicated(ckpt, rank, count, *steps):
    """Save steps; return whether each was replicated."""
    found = []
    for step in steps:
        saved(ckpt, rank, count, step)
        found.append(handle(ckpt).replicated.result(300))
    return found


def alone(ready, rank, call):
    """Make a call on rank 0 while the other ranks wait."""
    ready.wait(60)
    if rank == 0:
        call()
    ready.wait(60)


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path, copies=1)


@pytest.mark.parametrize(
    ("names", "lost"),
    [(names, lost) for names in ("ab", "abc", "abcd") for lost in names],
)
def test_job_survives_the_loss_of_any_host(hosts, names, lost):
    assert hosts.run(names, lambda *of: replicated(*of, 1, 2)) == [[True, True]] * len(names)
    hosts.lose(lost)
    left = names.replace(lost, "")
    assert hosts.restore(f"{left}x") == 2
    assert hosts.restore(left, 1) == 1


def test_two_copies_survive_the_loss_of_two_hosts(tmp_path):
    hosts = Hosts(tmp_path, copies=2)
    assert hosts.run("abcd", lambda *of: replicated(*of, 1)) == [[True]] * 4
    hosts.lose("b")
    hosts.lose("d")
    assert hosts.restore("ac") == 1


def test_copies_go_to_another_domain(tmp_path):
    racks = {"a": "1", "b": "1", "c": "2", "d": "2"}
    hosts = Hosts(tmp_path, copies=1, domain=racks.__getitem__)
    assert hosts.run("abcd", lambda *of: replicated(*of, 1)) == [[True]] * 4
    hosts.lose("a")
    hosts.lose("b")
    assert hosts.restore("cd") == 1


def blobs(hosts, host):
    return sorted(hosts.root(host).glob("data/*/blobs/*"))


def test_damaged_blob_is_read_from_another_host(hosts):
    hosts.run("ab", lambda *of: replicated(*of, 1))
    for host in "ab":
        own = blobs(hosts, host)["ab".index(host)]
        own.write_bytes(bytes(own.stat().st_size))
    assert hosts.restore("ab") == 1


def listed(hosts, host):
    """Return step and generation of each commit record in the root of a host."""
    return [parse_commit_name(info.name) for info in posix(hosts.root(host)).list("commits/")]


@pytest.mark.parametrize("fault", ["create", "write", "seal"])
def test_older_checkpoint_stays_until_the_newer_one_is_replicated(hosts, caplog, fault):
    root = hosts.faulty("b")

    def work(ckpt, rank, count):
        first = replicated(ckpt, rank, count, 1)
        if rank == 0:
            root.fail(fault, times=None, match="/pulled/00000")
        saved(ckpt, rank, count, 2)
        return first, handle(ckpt)

    found = hosts.run("ab", work, retention={"keep_last": 1}, timeout_s=SHORT_TIMEOUT_S)
    assert [first for first, _ in found] == [[True], [True]]
    assert [second.replicated.result(0) for _, second in found] == [False, False]
    assert "step 2 has too few copies on other hosts: " in caplog.text
    root.clear()
    assert [step for step, _ in listed(hosts, "b")] == [1, 2]
    hosts.lose("a")
    assert hosts.restore("bx") == 1


def test_older_checkpoints_are_deleted_once_the_newer_one_is_replicated(hosts):
    hosts.run("ab", lambda *of: replicated(*of, 1, 2, 3), retention={"keep_last": 1})
    assert {step for host in "ab" for step, _ in listed(hosts, host)} == {3}


@pytest.mark.parametrize("prunes", [False, True])
def test_replaced_generation_stays_until_the_newer_one_is_replicated(hosts, prunes):
    root = hosts.faulty("b")

    def work(ckpt, rank, count):
        replicated(ckpt, rank, count, 1)
        if rank == 0:
            root.fail("create", times=None, match="/pulled/00000")
        ckpt.save(state_of(1, rank, count), 1, overwrite=True).result(300)
        if prunes and rank == 0:
            ckpt.prune()

    hosts.run("ab", work, timeout_s=SHORT_TIMEOUT_S)
    root.clear()
    assert [step for step, _ in listed(hosts, "b")] == [1, 1]
    hosts.lose("a")
    assert hosts.restore("bx") == 1


def test_damaged_blob_is_not_copied(hosts, caplog):
    root, gate = hosts.faulty("a"), Gate()

    def work(ckpt, rank, count):
        first = replicated(ckpt, rank, count, 1)
        if rank == 0:
            held = root.block("create", gate, match="/pulled/00001")
        saved(ckpt, rank, count, 2)
        if rank == 0:
            assert held.reached.wait(300)
            newest = max(blobs(hosts, "b"), key=lambda path: path.stat().st_mtime)
            newest.write_bytes(bytes(newest.stat().st_size))
            gate.set()
        return first, handle(ckpt)

    found = hosts.run("ab", work, timeout_s=SHORT_TIMEOUT_S)
    assert [second.replicated.result(0) for _, second in found] == [False, False]
    assert "do not match their checksum" in caplog.text
    root.clear()
    assert len(blobs(hosts, "a")) == 3
    hosts.lose("b")
    assert hosts.restore("ax") == 1


def test_training_does_not_wait_for_copies(hosts):
    root, gate = hosts.faulty("b"), Gate()

    def work(ckpt, rank, count):
        if rank == 0:
            root.block("create", gate, match="/pulled/00000")
        saved(ckpt, rank, count, 1)
        first = handle(ckpt)
        saved(ckpt, rank, count, 2)
        is_open = not first.replicated.done()
        if rank == 0:
            gate.set()
        return is_open, first, handle(ckpt)

    found = hosts.run("ab", work)
    assert [one[0] for one in found] == [True, True]
    assert [one[2].replicated.result(0) for one in found] == [True, True]


def test_next_checkpoint_is_copied_as_soon_as_the_last_one_is_replicated(hosts, waits):
    hosts.run("ab", lambda *of: replicated(*of, 1))
    root, gate = hosts.faulty("b"), Gate()
    waits(copies_look_first_s=LONG_S)

    def work(ckpt, rank, count):
        ckpt.steps()  # rank 0 begins to look at step 1
        lead = ckpt._copies._lead
        while rank == 0 and lead._replication.target is not None:
            time.sleep(0.01)
        if rank == 0:
            held = root.block("create", gate, match="/pulled/00000")
        saved(ckpt, rank, count, 2)
        is_copied = rank != 0 or held.reached.wait(60)
        gate.set()
        ckpt._copies.close()  # without another look
        return is_copied

    assert hosts.run("ab", work) == [True, True]


def test_next_job_replaces_the_copies_of_a_lost_host(hosts):
    hosts.run("abcd", lambda *of: replicated(*of, 1))
    hosts.lose("a")

    def work(ckpt, rank, count):
        ckpt.steps()
        return replicated(ckpt, rank, count, 2)

    hosts.run("bcdx", work)
    for lost in "bcdx":
        bring_back = hosts.copy(lost)
        hosts.lose(lost)
        assert hosts.restore("bcdx".replace(lost, "y")) == 2
        bring_back()


def test_copy_in_flight_is_not_read(hosts, caplog):
    root, gate = hosts.faulty("b"), Gate()

    def work(ckpt, rank, count):
        saved(ckpt, rank, count, 1)
        if rank == 0:
            held = root.block("seal", gate, match="/00000-0.raw")
        saved(ckpt, rank, count, 2)
        while rank == 0 and not held.reached.wait(60):
            pass
        found = restored(ckpt, rank, count, "latest")
        if rank == 0:
            gate.set()
        return found, handle(ckpt).replicated.result(300)

    assert hosts.run("ab", work) == [(2, True), (2, True)]
    assert not caplog.records


def test_one_host_has_no_copies(hosts, caplog):
    assert hosts.run("aa", lambda *of: replicated(*of, 1, 2)) == [[False] * 2] * 2
    assert caplog.text.count("copies = 1, but this job has 1 host: ") == 1


def test_more_copies_than_hosts_are_reported(tmp_path, caplog):
    hosts = Hosts(tmp_path, copies=5)
    assert hosts.run("ab", lambda *of: replicated(*of, 1)) == [[True]] * 2
    assert "copies = 5, but this job has 2 hosts: each file is copied to 1 other" in caplog.text


def test_lost_host_is_recovered_without_the_durable_tier(tmp_path):
    hosts = Hosts(tmp_path, durable=str(tmp_path / "durable"), copies=1)
    assert hosts.run("abc", lambda *of: replicated(*of, 1, 2)) == [[True, True]] * 3
    hosts.lose("b")
    (tmp_path / "durable").rename(tmp_path / "away")
    assert Hosts(tmp_path, copies=1).restore("axc") == 2


def damage(hosts, host, kind, number=None):
    """Change the first byte of files of this kind on a host; return the good bytes by path."""
    paths = sorted(hosts.root(host).glob(f"data/*/{kind}"))
    paths = paths if number is None else [paths[number]]
    good = {path: path.read_bytes() for path in paths}
    for path, data in good.items():
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert good
    return good


@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize("kind", ["blobs/*", "parts/*", "index"])
def test_restore_replaces_the_damaged_files_of_its_host(tmp_path, kind, tiered):
    hosts = Hosts(tmp_path, durable=str(tmp_path / "durable") if tiered else None, copies=1)
    hosts.run("ab", lambda *of: replicated(*of, 1))
    good = damage(hosts, "a", kind, None if kind == "index" else 0)
    assert hosts.restore("ab") == 1
    assert {path: path.read_bytes() for path in good} == good


def test_restore_replaces_a_file_from_the_next_tier_if_no_host_has_it_whole(tmp_path):
    hosts = Hosts(tmp_path, durable=str(tmp_path / "durable"), copies=1)
    hosts.run("ab", lambda *of: replicated(*of, 1))
    own = damage(hosts, "a", "blobs/*", 0) | damage(hosts, "b", "blobs/*", 1)
    damage(hosts, "a", "blobs/*", 1)
    damage(hosts, "b", "blobs/*", 0)
    assert hosts.restore("ab") == 1
    assert {path: path.read_bytes() for path in own} == own


def test_damaged_file_without_a_whole_copy_stays(hosts):
    hosts.run("ab", lambda *of: replicated(*of, 1))
    damage(hosts, "a", "blobs/*", 0)
    damage(hosts, "b", "blobs/*", 0)
    before = [[path.read_bytes() for path in blobs(hosts, host)] for host in "ab"]

    def work(ckpt, *of):
        with pytest.raises((DamagedError, RankError)):
            restored(ckpt, *of, step=1)

    hosts.run("ab", work)
    assert [[path.read_bytes() for path in blobs(hosts, host)] for host in "ab"] == before


@pytest.mark.parametrize("kind", ["blobs/*", "parts/*", "index"])
def test_copy_is_made_from_the_host_whose_file_is_whole(tmp_path, kind):
    hosts = Hosts(tmp_path, copies=2)
    hosts.run("abc", lambda *of: replicated(*of, 1))
    hosts.lose("c")
    damage(hosts, "a", kind)

    def work(ckpt, rank, count):
        ckpt.steps()
        return replicated(ckpt, rank, count, 2)  # step 1 first

    found = hosts.run("abx", work, timeout_s=SHORT_TIMEOUT_S)
    assert found == [[True]] * 3
    hosts.lose("a")
    hosts.lose("b")
    assert hosts.restore("x", 1) == 1


@pytest.mark.parametrize("repairs", [False, True])
def test_repair_leaves_the_copies_on_the_other_hosts(tmp_path, repairs):
    tiers = Hosts(tmp_path, durable=str(tmp_path / "durable"), copies=1)
    tiers.run("abcd", lambda *of: replicated(*of, 1))
    for host in "abcd":
        damage(tiers, host, "blobs/*")

    def work(ckpt, rank, count):
        ckpt.steps()
        if rank == 0 and repairs:
            assert not ckpt.verify(1, repair=True).ok

    tiers.run("abcd", work)
    assert [len(blobs(tiers, host)) for host in "abcd"] == [2] * 4


def test_files_that_were_lost_with_their_hosts_are_no_damage(tmp_path):
    tiers = Hosts(tmp_path, durable=str(tmp_path / "durable"), copies=1)
    tiers.run("abcd", lambda *of: replicated(*of, 1))
    tiers.lose("a")
    tiers.lose("b")

    def work(ckpt, rank, _):
        ckpt.steps()
        report = ckpt.verify(1)
        assert report.ok
        assert report.tiers == ("durable",)
        assert not ckpt._orders.damaged(ckpt._catalog.record(1))

    tiers.run("abcd", work)


@pytest.mark.parametrize("copies", [{"a": 1, "b": 0}, {"a": 0, "b": 1}])
def test_ranks_with_other_numbers_of_copies_are_refused(tmp_path, copies):
    hosts = Hosts(tmp_path, copies=copies.__getitem__)
    found = hosts.job("ab").run(lambda ckpt, rank: ckpt.save(state_of(1, rank, 2), 1))
    assert [type(error) for error in found] == [ConfigError] * 2
    assert "copies is" in str(found[0])


def test_rewind_leaves_the_newest_replicated_checkpoint(hosts):
    ready, root = threading.Barrier(2), hosts.faulty("b")

    def work(ckpt, rank, count):
        replicated(ckpt, rank, count, 1, 10)
        alone(ready, rank, lambda: ckpt.rewind(1))
        second = replicated(ckpt, rank, count, 2)
        alone(ready, rank, lambda: root.fail("create", times=None, match="/pulled/00000"))
        saved(ckpt, rank, count, 3)
        saved(ckpt, rank, count, 4)
        return second

    assert (
        hosts.run("ab", work, retention={"keep_last": 2}, timeout_s=SHORT_TIMEOUT_S) == [[True]] * 2
    )
    root.clear()
    hosts.lose("a")
    assert hosts.restore("bx") == 2


def test_retention_and_a_rewind_do_not_delete_each_others_steps(hosts):
    root, gate = hosts.faulty("a"), Gate()

    def rewind(ckpt):
        with suppress(CheckpointNotFoundError):
            ckpt.rewind(1)

    def work(ckpt, rank, count):
        replicated(ckpt, rank, count, 1)
        if rank == 0:
            held = root.block("delete", gate, match="commits/00000001")
        replicated(ckpt, rank, count, 2)
        if rank == 0:
            assert held.reached.wait(60)
            rewinding = threading.Thread(target=rewind, args=[ckpt])
            rewinding.start()
            rewinding.join(2)
            gate.set()
            rewinding.join(60)

    hosts.run("ab", work, retention={"keep_last": 1})
    assert hosts.restore("ab") == 2


def test_step_that_is_saved_again_after_a_rewind_is_replicated(hosts):
    ready = threading.Barrier(2)

    def work(ckpt, rank, count):
        replicated(ckpt, rank, count, 1, 2)
        alone(ready, rank, lambda: ckpt.rewind(1))
        return replicated(ckpt, rank, count, 2)

    assert hosts.run("ab", work) == [[True]] * 2


def test_job_protects_all_checkpoints_that_it_finds(hosts):
    """Even while a host does not answer, so that its checkpoints cannot be listed again."""
    hosts.run("ab", lambda *of: replicated(*of, 1, 2))

    def work(ckpt, rank, _):
        ckpt.steps()
        return rank or ckpt._copies._lead._replication.known

    assert hosts.run("ab", work)[0] == {(1, 0), (2, 0)}


def test_overwrites_of_earlier_steps_are_replicated(hosts):
    def work(ckpt, rank, count):
        replicated(ckpt, rank, count, 1, 2, 9)
        found = []
        for step in (1, 2):
            ckpt.save(state_of(step, rank, count), step, overwrite=True).result(300)
            found.append(handle(ckpt).replicated.result(60))
        return found

    assert hosts.run("ab", work) == [[True, True]] * 2
    assert [step for step, _ in listed(hosts, "b")] == [1, 2, 9]
    hosts.lose("a")
    assert hosts.restore("bx", 2) == 2


def test_save_that_is_replaced_before_its_copies_ends(hosts):
    ready, root, gate = threading.Barrier(2), hosts.faulty("b"), Gate()

    def work(ckpt, rank, count):
        replicated(ckpt, rank, count, 1)
        if rank == 0:
            held = root.block("create", gate, match="/pulled/00000")
        saved(ckpt, rank, count, 2)
        first = handle(ckpt)
        while rank == 0 and not held.reached.wait(60):
            pass
        alone(ready, rank, lambda: (time.sleep(3), ckpt.rewind(1)))  # rank 0 looks once per second
        saved(ckpt, rank, count, 2)
        gate.set()
        return first.replicated.result(60), handle(ckpt).replicated.result(60)

    assert hosts.run("ab", work) == [(False, True)] * 2


def test_second_overwrite_leaves_the_replicated_generation(hosts):
    root, gate = hosts.faulty("b"), Gate()

    def work(ckpt, rank, count):
        replicated(ckpt, rank, count, 1)
        if rank == 0:
            held = root.block("create", gate, match="/pulled/00000")
        ckpt.save(state_of(1, rank, count), 1, overwrite=True).result(300)
        first = handle(ckpt)
        if rank == 0:
            assert held.reached.wait(60)
        ckpt.save(state_of(1, rank, count), 1, overwrite=True).result(300)
        if rank == 0:
            root.fail("create", times=None, match="/pulled/00000")
            gate.set()
        return first.replicated.result(60)

    assert hosts.run("ab", work, timeout_s=SHORT_TIMEOUT_S) == [True, True]
    root.clear()
    hosts.lose("a")
    assert hosts.restore("bx") == 1


def test_compact_is_refused(hosts):
    with pytest.raises(ConfigError, match="compact is not supported with copies"):
        hosts.run("ab", lambda ckpt, rank, count: (saved(ckpt, rank, count, 1), ckpt.compact()))


@pytest.mark.parametrize("kind", ["index", "parts/*", "blobs/*"])
@pytest.mark.parametrize("host", "ab")
def test_truncated_file_hides_no_step(hosts, host, kind):
    hosts.run("ab", lambda *of: replicated(*of, 1, 2))
    for path in hosts.root(host).glob(f"data/*/{kind}"):
        path.write_bytes(path.read_bytes()[:-1])
    assert hosts.restore("ab") == 2


def test_record_that_a_host_lacks_is_published_again(hosts):
    root = hosts.faulty("b")

    def work(ckpt, rank, count):
        first = replicated(ckpt, rank, count, 1)
        if rank == 0:
            root.fail("publish", match="commits/")
        return first + replicated(ckpt, rank, count, 2)

    assert hosts.run("ab", work) == [[True, True]] * 2
    hosts.lose("a")
    assert hosts.restore("bx") == 2


def test_copies_leave_no_empty_folders(hosts):
    hosts.run("ab", lambda *of: replicated(*of, 1, 2, 3), retention={"keep_last": 1})
    assert not [*hosts.root("a").glob("data/*/pulled")]
    assert len([*hosts.root("a").glob("data/*")]) == 1
