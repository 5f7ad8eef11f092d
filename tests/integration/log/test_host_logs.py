"""The log of each rank is copied to other hosts, so that it survives the loss of its host."""

import threading

import pytest
import torch
from tests.integration.log.test_ranks import BASE, LAST, Replica, flip, trained
from tests.integration.ranks.test_hosts import Hosts

from penstock.core.format.segment import HEADER_BYTES


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path, copies=1)


def log_to(hosts, names, last=LAST, step="latest", *, settled=False, then=lambda step: None):
    """Train and log up to a step, from the beginning or from a restored step.

    With `settled`, all hosts have tried to copy each entry before `then` is called, and before the
    next entry.
    """
    all_ranks = threading.Barrier(len(names))

    def work(ckpt, rank, _):
        del rank
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
    ("names", "lost"), [(names, lost) for names in ("ab", "abc") for lost in names]
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
