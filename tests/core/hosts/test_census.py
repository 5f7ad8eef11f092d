"""Which ranks are on one host: all learn the same, once for each job."""

import threading
from base64 import b64encode

import pytest

from penstock.core.concurrency.timing import Timing
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import FormatError
from penstock.core.format.compressed import compress
from penstock.core.hosts.census import ranks_by_host
from penstock.core.ranks.group import RankGroup
from penstock.testing.coordination import MemoryBoard, MemoryCoordination


def ask(hosts, *, limit_s=60.0, absent=(), board=None, ended=lambda: False):
    """What each rank is told of the ranks of its host, by threads."""
    board, found = board or MemoryBoard(), {}

    def one(rank):
        group = RankGroup(rank, len(hosts), MemoryCoordination(board), host=hosts[rank])
        sets = ranks_by_host(group, Deadline(limit_s), ended, Timing())
        found[rank] = next((ranks for ranks in sets if rank in ranks), ())
        assert [*sets] == sorted(sets)

    threads = [
        threading.Thread(target=one, args=(r,)) for r in range(len(hosts)) if r not in absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return [found.get(rank) for rank in range(len(hosts))]


def test_the_ranks_of_each_host_find_each_other():
    assert ask(["a", "b", "a", "b", "c"]) == [(0, 2), (1, 3), (0, 2), (1, 3), (4,)]


def test_many_ranks_of_one_host_read_in_parts():
    found = ask(["a"] * 20)
    assert found[3] == tuple(range(16))
    assert found[19] == (16, 17, 18, 19)


@pytest.mark.parametrize("absent", [0, 1])
def test_while_one_has_not_come_nobody_reads_with_others_and_later_all_do(absent):
    board = MemoryBoard()
    found = ask(["a"] * 3, absent=(absent,), limit_s=0.2, board=board)
    assert [one for rank, one in enumerate(found) if rank != absent] == [(), ()]
    assert ask(["a"] * 3, board=board) == [(0, 1, 2)] * 3


def test_nobody_waits_once_all_have_given_up():
    assert ask(["a"] * 2, absent=(1,), ended=lambda: True) == [(), None]


def test_post_that_is_no_text_is_the_name_of_another_host():
    board = MemoryBoard()
    MemoryCoordination(board).post("host/00001", b"\xff")
    group = RankGroup(0, 2, MemoryCoordination(board))
    assert ranks_by_host(group, Deadline(20.0), lambda: False, Timing()) == ((0,), (1,))


@pytest.mark.parametrize("post", [b"\xff", b"!", b"AAAA", b64encode(compress(b"odd"))])
def test_hosts_that_cannot_be_read_are_refused(post):
    board = MemoryBoard()
    MemoryCoordination(board).post("hosts", post)
    with pytest.raises(FormatError, match="the numbers of ranks"):
        ranks_by_host(
            RankGroup(1, 2, MemoryCoordination(board)), Deadline(20.0), lambda: False, Timing()
        )


def test_it_is_asked_once():
    group = RankGroup(0, 2, MemoryCoordination(MemoryBoard()))
    group.by_host = ((0, 1),)
    assert ranks_by_host(group, Deadline(0.0), lambda: True, Timing()) == ((0, 1),)
