"""Lending between processes: no unverified bytes, none overwritten too soon."""

import itertools
import mmap
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.core.concurrency.timing import SYSTEM_CLOCK, Timing
from penstock.core.concurrency.watchdog import Watchdog
from penstock.core.errors import RestoreError
from penstock.core.pipeline.exchange import Exchange, Peer, Share, TakersStuckError
from penstock.core.pipeline.staging import Staging
from penstock.core.types import ByteRange
from penstock.testing.hasty import ShiftedClock

PAGE = 4096


class Member:
    """One process of several, as an object: its window, and the sockets to the others."""

    def __init__(self, pages, clock):
        self.timing = Timing(poll_s=0.01, clock=clock)
        self.memory = mmap.mmap(-1, pages * PAGE)
        self.peers, self.placed = [], {}
        self.hold = None
        self.exchange = None

    def begin(self, *, own=(), taken=()):
        self.exchange = Exchange(
            Staging(len(self.memory), self.memory), self.peers,
            own=own, taken=[replace(share, reader=reader) for reader, share in taken],
            place=self._place, timing=self.timing,
        )  # fmt: skip
        self.exchange.start()
        return self.exchange

    def _place(self, share, data):
        if self.hold is not None:
            self.hold(share)
        self.placed[share.number] = bytes(data)

    def end(self):
        if self.exchange is not None:
            self.exchange.close()
        for peer in self.peers:
            peer.socket.close()


@pytest.fixture
def members(request):
    """Connected members, with a timeout."""
    made = []

    def make(count=2, *, pages=4, limit_s=60.0, clock=SYSTEM_CLOCK):
        made.extend(Member(pages, clock) for _ in range(count))
        for one in range(count):
            for other in range(one):
                ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                for here, there, line in ((one, other, ends[0]), (other, one, ends[1])):
                    quiet = Watchdog(limit_s, clock)
                    made[here].peers.append(Peer(there, line, made[there].memory, quiet))
        return made

    yield make
    for member in made:
        member.end()


def share(number, *takers, length=PAGE):
    return Share(number, SimpleNamespace(), ByteRange(0, length), 0, takers)


def lend(member, piece, byte):
    block = member.exchange.acquire(piece.span.length, 0)
    block.view[:] = bytes([byte]) * piece.span.length
    member.exchange.lend([(piece.job, block)])


def never():
    return False


def test_all_takers_place_lent_pieces(members):
    one, two, three = members(3)
    pieces = [share(n, 1, 2) for n in range(20)]  # five times the window
    for taker in (two, three):
        taker.begin(taken=[(0, share(n)) for n in range(20)])
    one.begin(own=pieces)
    for number, piece in enumerate(pieces):
        lend(one, piece, number)
    one.exchange.lent_all()
    for taker in (two, three):
        assert taker.exchange.wait(never) == []
        assert taker.placed == {n: bytes([n]) * PAGE for n in range(20)}
        assert taker.exchange.bytes_taken == 20 * PAGE
    assert one.exchange.wait(never) == []


def test_memory_is_not_reused_before_all_takers_finish(members):
    one, two, three = members(3, pages=1)
    slow = threading.Event()
    three.hold = lambda _: slow.wait(30)
    pieces = [share(n, 1, 2) for n in range(2)]
    for taker in (two, three):
        taker.begin(taken=[(0, share(n)) for n in range(2)])
    one.begin(own=pieces)
    lend(one, pieces[0], 7)
    again = threading.Thread(target=lend, args=(one, pieces[1], 8))
    again.start()
    again.join(0.2)
    assert one.memory[:1] == b"\7"
    assert again.is_alive()
    slow.set()
    again.join(30)
    one.exchange.lent_all()
    assert three.exchange.wait(never) == []
    assert {n: data[0] for n, data in three.placed.items()} == {0: 7, 1: 8}


def test_memory_being_copied_is_not_reused_when_its_taker_stops_lending(members):
    reader, taker = members(2, pages=1)
    first, second = share(0, 1), share(1, 1)
    many = [share(number, 0) for number in range(10, 30_000)]  # more than a socket holds
    go_on, copied = threading.Event(), threading.Event()
    reader.hold = lambda _: go_on.wait(30)
    taker.hold = lambda _: copied.wait(30)
    reader.begin(own=[first, second], taken=[(1, piece) for piece in many])
    taker.begin(own=many, taken=[(0, first), (0, second)])
    lend(taker, many[0], 9)
    lend(reader, first, 1)
    while first.number in taker.peers[0].awaited:
        time.sleep(0.01)
    taker.exchange.lend_no_more()  # the reader does not listen now
    go_on.set()
    thread = threading.Thread(target=lend, args=(reader, second, 2))
    thread.start()
    thread.join(0.5)
    waits = thread.is_alive()
    copied.set()
    thread.join(30)
    taker.exchange.wait(never)
    assert waits
    assert taker.placed[0] == bytes([1]) * PAGE


def test_a_taker_beside_a_stalled_one_is_sent_to_the_store_at_once(members):
    reader, stuck, taker = members(3, pages=64)
    reader.peers[0].quiet = Watchdog(0.3)  # of the one that is stuck
    first = [share(number, 1, 2) for number in range(16)]  # as many as fit without an answer
    last, back = share(16, 1, 2), share(17, 0)
    reader.begin(own=[*first, last], taken=[(2, back)])
    taker.begin(own=[back], taken=[(0, piece) for piece in (*first, last)])
    for piece in first:
        lend(reader, piece, 1)
    with pytest.raises(TakersStuckError):
        lend(reader, last, 2)
    reader.exchange.lend_no_more()
    began_s = time.monotonic()
    while taker.peers[0].awaited and time.monotonic() < began_s + 30:  # half of its patience
        time.sleep(0.01)
    assert not taker.peers[0].awaited
    assert last.number not in taker.placed
    assert stuck.exchange is None


def test_a_stalled_taker_that_lends_nothing_keeps_its_lent_pieces(members):
    clock = ShiftedClock()
    one, _ = members(2, pages=1, clock=clock)
    pieces = [share(0, 1), share(1, 1)]
    one.begin(own=pieces, taken=[(1, share(9))])
    lend(one, pieces[0], 7)
    clock.ahead_s = itertools.count(61).__next__  # each look is a second later
    while not one.peers[0].gone:
        time.sleep(0.01)
    with pytest.raises(TakersStuckError):
        one.exchange.acquire(PAGE, 0)
    assert one.memory[:1] == b"\7"


def test_a_dead_peer_frees_its_loans_and_its_pieces_are_left_to_read(members):
    one, two = members(2, pages=1)
    pieces = [share(n, 1) for n in range(3)]
    awaited = share(9)
    one.begin(own=pieces, taken=[(1, awaited)])
    lend(one, pieces[0], 7)
    two.peers[0].socket.close()
    lend(one, pieces[1], 8)
    lend(one, pieces[2], 9)
    one.exchange.lent_all()
    assert one.exchange.wait(never) == [awaited.job]


def test_a_piece_outside_the_window_is_not_read(members):
    one, two = members(2, pages=1)
    taken = share(0, length=2 * PAGE)
    two.begin(taken=[(0, taken)])
    one.begin(own=[piece := share(0, 1)])
    lend(one, piece, 1)
    assert two.exchange.wait(never) == [taken.job]
    assert not two.placed


def test_a_failed_target_ends_lending_of_that_process_at_once(members):
    """Its own loans are in use: it would wait for memory that no process frees."""
    one, two = members(2, pages=1)

    def fail(_):
        raise ZeroDivisionError

    two.hold = fail
    two.begin(own=[held := share(1, 0), share(2, 0)], taken=[(0, share(0))])
    lend(two, held, 2)  # all of its window; the other does not take it
    one.exchange = Exchange(
        Staging(len(one.memory), one.memory), one.peers,
        own=[piece := share(0, 1)], taken=[], place=one._place, timing=one.timing,
    )  # fmt: skip
    lend(one, piece, 1)
    with pytest.raises(RestoreError, match="ZeroDivisionError"):
        two.exchange.acquire(PAGE, 0)
    one.exchange.start()  # so that it can be closed


def test_many_small_pieces_both_ways_never_deadlock(members):
    count = 1500
    one, two = members(2, pages=count)
    for me, member in enumerate((one, two)):
        other = 1 - me
        numbers = range(me * count, me * count + count)
        theirs = range(other * count, other * count + count)
        member.begin(
            own=[share(n, other, length=16) for n in numbers],
            taken=[(other, share(n, length=16)) for n in theirs],
        )

    def work(member):
        for piece in list(member.exchange._own.values()):
            lend(member, piece, piece.number % 251)
        member.exchange.lent_all()

    threads = [threading.Thread(target=work, args=(member,)) for member in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [member.exchange.wait(never) for member in (one, two)] == [[], []]
    assert [len(member.placed) for member in (one, two)] == [count, count]
