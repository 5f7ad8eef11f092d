"""Which ranks are on one host: all learn the same, once per job."""

import threading
from base64 import b64encode

import pytest

from penstock.core.errors import FormatError
from penstock.core.format.compressed import compress
from penstock.core.hosts.census import Census
from penstock.core.ranks.group import RankGroup
from penstock.core.ranks.session import RankSession
from penstock.core.rounds.round import RestoreRound
from penstock.testing.coordination import MemoryBoard, MemoryCoordination


def census_of(rank, count, board, *, host="a", limit_s=60.0, failed=False):
    """A rank's question in a restore that another rank may have ended."""
    coordination = MemoryCoordination(board)
    group = RankGroup(rank, count, coordination, host=host, timeout_s=limit_s)
    session = RankSession(group, RestoreRound(group.place, 0, timeout_s=limit_s))
    if failed:
        session.tell(lambda round_: round_.fail("another one has failed"))
    return Census(session)


def ask(hosts, *, limit_s=60.0, absent=(), board=None, failed=False):
    """What each rank learns of the ranks of its host, by threads."""
    board, found = board or MemoryBoard(), {}

    def one(rank):
        asks = {"host": hosts[rank], "limit_s": limit_s, "failed": failed}
        sets = census_of(rank, len(hosts), board, **asks).sets()
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
def test_no_rank_shares_reads_until_all_have_joined(absent):
    board = MemoryBoard()
    found = ask(["a"] * 3, absent=(absent,), limit_s=0.2, board=board)
    assert [one for rank, one in enumerate(found) if rank != absent] == [(), ()]
    assert ask(["a"] * 3, board=board) == [(0, 1, 2)] * 3


def test_no_rank_waits_once_all_have_failed():
    assert ask(["a"] * 2, absent=(1,), failed=True) == [(), None]


def test_binary_post_counts_as_another_host():
    board = MemoryBoard()
    MemoryCoordination(board).post("host/00001", b"\xff")
    assert census_of(0, 2, board).sets() == ((0,), (1,))


@pytest.mark.parametrize("post", [b"\xff", b"!", b"AAAA", b64encode(compress(b"odd"))])
def test_hosts_that_cannot_be_read_are_refused(post):
    board = MemoryBoard()
    MemoryCoordination(board).post("hosts", post)
    with pytest.raises(FormatError, match="the numbers of ranks"):
        census_of(1, 2, board).sets()


def test_rank_0_does_not_wait_for_ranks_with_a_known_host():
    board = MemoryBoard()
    for rank in (1, 2):
        Census.announce(census_of(rank, 3, board)._group)
    assert census_of(0, 3, board, failed=True).sets() == ((0, 1, 2),)


def test_it_is_asked_once():
    census = census_of(0, 2, MemoryBoard(), failed=True)
    census._group.by_host = ((0, 1),)
    assert census.sets() == ((0, 1),)


def test_a_rank_without_shared_memory_is_excluded_by_its_host():
    board = MemoryBoard()
    one, other, elsewhere = (census_of(rank, 3, board) for rank in range(3))
    assert not one.are_apart((0, 1))
    other.part((0, 1), "no memory")
    assert other.are_apart((0, 1))
    assert census_of(0, 3, board).are_apart((0, 1))
    assert not elsewhere.are_apart((2,))
