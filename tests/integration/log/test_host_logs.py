"""The log of each rank is copied to other hosts, so that it survives the loss of its host."""

import pytest
import torch
from tests.integration.log.test_ranks import BASE, LAST, Replica, flip, trained
from tests.integration.ranks.test_hosts import Hosts


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path, copies=1)


def log_to(hosts, names, last=LAST, step="latest"):
    """Train and log up to a step, from the beginning or from a restored step."""

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
