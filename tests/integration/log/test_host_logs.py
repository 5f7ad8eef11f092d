"""The log of each rank is copied to other hosts, so that it survives the loss of its host."""

import gc
import os
import threading
import tracemalloc

import pytest
import torch
from tests.integration.log.test_ranks import BASE, LAST, Replica, flip, trained
from tests.integration.ranks.test_hosts import Hosts, posix

from penstock.core.errors import StorageError
from penstock.core.format.segment import HEADER_BYTES, segment_name
from penstock.core.log.host_logs import _end_of, _Tail
from penstock.core.log.segments import SegmentWriter, StoredLog


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path, copies=1)


def log_to(
    hosts,
    names,
    last=LAST,
    step="latest",
    *,
    logged=lambda ckpt, rank, step: None,
    settled=False,
    then=lambda step: None,
):
    """Train and log up to a step, from the beginning or from a restored step.

    Each rank calls `logged` after it has logged a step. With `settled`, all hosts have tried to
    copy each entry before `then` is called, and before the next entry.
    """
    all_ranks = threading.Barrier(len(names))

    def work(ckpt, rank, _):
        replica = Replica(seed=9)
        first = 0
        if ckpt.latest() is None:
            replica = Replica()
        else:
            first = ckpt.restore(replica.state, step).step + 1
            assert torch.equal(replica.weights(), trained(first - 1))
        for number in range(first, last + 1):
            replica.step(number)
            if number == BASE:
                handle = ckpt.save(replica.state, number, mode="blocking")
                assert handle.replicated.result(300)
            elif number > BASE:
                assert ckpt.log(replica.state, number)
                logged(ckpt, rank, number)
                if settled:
                    ckpt._log.recorder.flush()
                    ckpt._log_copies.settle()
                    all_ranks.wait(300)
                    then(number)
                    all_ranks.wait(300)
        return first - 1

    return hosts.run(names, work)


def restored(hosts, names):
    """Restore bit for bit; return the step."""

    def work(ckpt, rank, _):
        del rank
        replica = Replica(seed=9)
        step = ckpt.restore(replica.state).step
        assert torch.equal(replica.weights(), trained(step))
        return step

    (step,) = set(hosts.run(names, work))
    return step


@pytest.mark.parametrize(
    ("names", "lost"),
    [(names, lost) for names in ("ab", "abc", "aabb") for lost in sorted({*names})],
)
def test_log_survives_the_loss_of_any_host(hosts, names, lost):
    log_to(hosts, names)
    hosts.lose(lost)
    assert restored(hosts, names.replace(lost, "x")) == LAST


def logs(hosts, host, rank):
    return sorted(hosts.root(host).glob(f"data/*/log/{rank:05}-*.log"))


def test_log_of_a_restarted_job_survives_too(hosts):
    log_to(hosts, "ab", 5)
    (copy,) = logs(hosts, "a", 1)
    copy.write_bytes(copy.read_bytes()[:-4096])  # the job died before it was copied
    assert log_to(hosts, "ab", 7) == [5, 5]
    hosts.lose("b")
    assert restored(hosts, "ax") == 7


def test_old_log_of_a_host_that_was_away_does_not_count(hosts):
    log_to(hosts, "ab")
    bring_back = hosts.copy("b")
    hosts.lose("b")
    assert log_to(hosts, "ax", 6, step=5) == [5, 5]
    bring_back()
    assert restored(hosts, "ab") == 6


def test_neighbor_that_cannot_copy_does_not_hold_the_log(hosts, caplog):
    root = hosts.faulty("b")
    root.fail("create", times=None, match="log/00000")
    log_to(hosts, "ab")
    assert "a log of another host is not copied" in caplog.text
    assert restored(hosts, "ab") == LAST
    hosts.lose("a")
    assert restored(hosts, "xb") == BASE


def test_damaged_entry_is_not_copied(hosts, caplog):
    log_to(hosts, "ab")
    (own,), (copy,) = logs(hosts, "b", 1), logs(hosts, "a", 1)
    copy.unlink()
    size = own.stat().st_size // 5
    flip(own, 3 * size + 200)
    assert log_to(hosts, "ab", 6) == [5, 5]
    assert "a log of another host is not copied: DamagedError: the log ends before" in caplog.text
    assert copy.stat().st_size <= 3 * size


@pytest.mark.parametrize("at", [0, HEADER_BYTES])
@pytest.mark.parametrize("host", "ab")
def test_damaged_entry_is_read_from_another_host(hosts, host, at):
    log_to(hosts, "ab")
    (damaged,) = logs(hosts, host, 1)
    flip(damaged, 3 * (damaged.stat().st_size // 5) + at)
    assert restored(hosts, "ab") == LAST
    assert restored(hosts, "ba") == LAST


def test_log_is_copied_as_one_file_after_an_error_of_the_neighbor(hosts):
    root = hosts.faulty("a")
    root.fail("write", match="log/00001")
    log_to(hosts, "ab", 7, settled=True)
    (copy,), (own,) = logs(hosts, "a", 1), logs(hosts, "b", 1)
    assert copy.name == own.name
    hosts.lose("b")
    assert restored(hosts, "ax") == 7


def test_neighbor_that_copies_no_longer_hides_no_step_of_the_log(hosts):
    root = hosts.faulty("a")
    root.fail("write", match="log/00001")

    def no_more(step):
        if step == 5:
            root.fail("write", times=None, match="log/00001")

    log_to(hosts, "ab", 7, settled=True, then=no_more)
    assert not [*hosts.root("a").glob("data/*/pulled-log/*")]
    assert restored(hosts, "ab") == 7


def test_full_neighbor_keeps_no_part_of_an_entry(hosts):
    root = hosts.faulty("a")
    for operation in ("write", "seal"):  # as of a file that could not be written
        root.fail(operation, times=None, match="log/00001")
    kept = []
    log_to(hosts, "ab", settled=True, then=lambda _: kept.extend(logs(hosts, "a", 1)))
    assert not kept


LATE = "other hosts copy the log too slowly"


def test_step_is_logged_only_after_the_copy_of_the_step_before(hosts, caplog):
    hosts.faulty("a").slow("write", 0.05, match="log/00001")
    hosts.faulty("b").slow("write", 0.05, match="log/00000")

    def logged(ckpt, rank, number):
        steps = StoredLog(posix(hosts.root("ba"[rank])), ckpt.info(BASE).uid, rank).steps
        assert number - 1 in [BASE, *steps] or LATE in caplog.text

    log_to(hosts, "ab", logged=logged)


def test_late_neighbor_does_not_hold_the_log_and_is_waited_for_after_it_has_caught_up(
    hosts, caplog
):
    free = threading.Event()
    root = hosts.faulty("a")
    root.block("write", free, match="log/00001")

    def logged(ckpt, rank, number):
        if rank == 1 and number == LAST:
            assert ckpt._log_copies._late
            free.set()
            ckpt._log_copies.settle()
            assert not ckpt._log_copies._late

    log_to(hosts, "ab", logged=logged)
    assert caplog.text.count(LATE) == 1
    hosts.lose("b")
    assert restored(hosts, "ax") == LAST


def test_neighbor_that_fails_does_not_copy_the_whole_log_at_every_step(hosts):
    root = hosts.faulty("a")
    root.fail("write", times=None, match="log/00001")
    log_to(hosts, "ab", BASE + 16, settled=True)
    tried = [names for name, names in root.calls if name == "create" and "log/00001" in str(names)]
    assert len(tried) == 5  # with 1, 2, 4, 8 and 16 entries


def test_memory_does_not_grow_with_the_logged_steps(hosts):
    for host in "ab":  # io_uring leaks 0.5 KB per buffer
        hosts._faulty[host] = posix(hosts.root(host))
    all_ranks, used = threading.Barrier(2), []

    def measure(ckpt):
        ckpt._log.recorder.flush()
        ckpt._log_copies.settle()
        if all_ranks.wait(300) == 0:
            gc.collect()
            used.append(tracemalloc.get_traced_memory()[0])
        all_ranks.wait(300)

    def work(ckpt, rank, _):
        replica = Replica()
        for number in range(601):
            replica.step(number)
            if number:
                assert ckpt.log(replica.state, number)
            else:
                assert ckpt.save(replica.state, 0, mode="blocking").replicated.result(300)
            if number in (100, 600):
                measure(ckpt)

    tracemalloc.start()
    try:
        hosts.run("ab", work)
    finally:
        tracemalloc.stop()
    # 0.45 KB: writers remember the edge pages of open segments. An entry has more than 1 KB.
    assert used[1] - used[0] < 500 * 1000


BASE_UID = "0123456789abcdef" * 2


@pytest.fixture
def copying(tmp_path):
    """A function that begins a copy of a segment, up to an entry, as another process would."""
    source, own = posix(tmp_path / "b"), posix(tmp_path / "a")
    name, ends = segment_name(BASE_UID, 1, 7), []
    with_log = SegmentWriter(
        source, BASE_UID, 1, 2, number=7, synced=lambda found: ends.extend(found.values())
    )
    for step in range(1, 6):
        with_log.append(step, {"data/blob": [bytes(5000)]}, sync_every=1)
    with_log.close()

    def begin(last, *, replaces=True):
        return _Tail(source, own, name, replaces=replaces).extend(ends[last - 1])

    return begin, lambda: StoredLog(own, BASE_UID, 1).steps


def test_copy_of_a_killed_process_ends_at_its_last_entry(copying, tmp_path):
    """Its file is longer: space was reserved."""
    begin, _ = copying
    assert len([*begin(2, replaces=False)]) == 2
    (path,) = (tmp_path / "a").rglob("*.log")
    os.truncate(path, 1 << 20)
    found = _end_of(posix(tmp_path / "a"), segment_name(BASE_UID, 1, 7))
    assert 10000 < found < 30000


def test_stopped_process_does_not_replace_a_copy_by_the_half_of_another(copying):
    begin, steps = copying
    assert len([*begin(2, replaces=False)]) == 2
    stopped = begin(5)
    for _ in range(5):
        next(stopped)  # all is copied but not renamed
    half = begin(5)
    next(half)
    with pytest.raises(StorageError):
        next(stopped)
    assert steps() == [1, 2]
    assert len([*half]) == 4
    assert steps() == [1, 2, 3, 4, 5]


def test_stopped_process_does_not_replace_a_copy_by_a_shorter_one(copying, tmp_path):
    begin, steps = copying
    assert len([*begin(1, replaces=False)]) == 1
    stopped = begin(3)
    for _ in range(3):
        next(stopped)
    (landing,) = (tmp_path / "a").rglob("pulled-log/*")
    data = landing.read_bytes()
    assert len([*begin(5)]) == 5
    landing.parent.mkdir(exist_ok=True)
    landing.write_bytes(data)  # as if it was created after the other process had looked
    with pytest.raises(StorageError):
        next(stopped)
    assert steps() == [1, 2, 3, 4, 5]


def test_stopped_process_does_not_remove_the_first_copy_of_another(copying):
    begin, steps = copying
    stopped = begin(5, replaces=False)
    assert len([*begin(5, replaces=False)]) == 5
    with pytest.raises(StorageError):
        next(stopped)
    assert steps() == [1, 2, 3, 4, 5]
