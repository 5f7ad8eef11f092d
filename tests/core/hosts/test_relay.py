"""A relay carries bytes to all that need them, and waits for nobody for long."""

import itertools
import os
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

from penstock.core.concurrency.timing import CountedClock, Timing
from penstock.core.hosts.network import Greeting, listening_socket
from penstock.core.hosts.relay import REFUSED, Relay, RelayKey
from penstock.testing.hasty import ShiftedClock

PATIENCE_S = 200.0  # twice what a test waits, so what comes meanwhile comes at once
LARGE = os.urandom(20 << 20)


def hurry(clock):
    """Let each look at the clock be a little later; by leaps a relay would seem to be asleep."""
    clock.ahead_s = map((PATIENCE_S / 400).__mul__, itertools.count()).__next__


def key(number):
    return RelayKey(number, 0)


class Waiter:
    """Notes what a relay tells, and when."""

    def __init__(self):
        self.told = []
        self._over = threading.Event()

    def __call__(self, *told):
        self.told += told
        self._over.set()

    @property
    def is_over(self):
        return self._over.is_set()

    def wait(self):
        assert self._over.wait(PATIENCE_S / 2)
        return self.told


@contextmanager
def relays(
    sources, *, offers=range(10), address="127.0.0.1", secrets=None, ended=lambda: False,
    clock=None,
):  # fmt: skip
    """Relays by rank; `sources` says for each from which others it takes."""
    with ExitStack() as opened:
        listeners = {rank: listening_socket(address) for rank in sources}
        where = {rank: one.getsockname()[:2] for rank, one in listeners.items()}
        found = {}
        for rank, taken in sources.items():
            found[rank] = Relay(
                Greeting((secrets or {}).get(rank, b"secret"), rank),
                listeners[rank],
                sources={other: where[other] for other in taken},
                recipients=[other for other, ranks in sources.items() if rank in ranks],
                offers=[key(number) for number in offers],
                patience_s=PATIENCE_S,
                ended=ended,
                timing=Timing(poll_s=0.01, clock=clock or ShiftedClock()),
            )
            opened.callback(found[rank].close)
            found[rank].start()
        yield found


def ask(relay, source, number, length):
    target, waiter = bytearray(length), Waiter()
    relay.ask(source, key(number), memoryview(target), waiter)
    return target, waiter


def offer(relay, number, data, *recipients):
    waiter = Waiter()
    relay.offer(key(number), recipients, memoryview(data), waiter)
    return waiter


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("first", ["ask", "offer"])
def test_all_that_need_a_piece_get_it_whoever_speaks_first(address, first):
    with relays({0: (), 1: (0,), 2: (0,)}, address=address) as found:
        if first == "offer":
            given = offer(found[0], 3, LARGE, 1, 2)
        got = [ask(found[rank], 0, 3, len(LARGE)) for rank in (1, 2)]
        if first == "ask":
            while not all(key(3) in peer.asked for peer in found[0]._recipients.values()):
                time.sleep(0.01)
            given = offer(found[0], 3, LARGE, 1, 2)
        given.wait()
        for target, waiter in got:
            assert waiter.wait() == [len(LARGE)]
            assert target == LARGE


def test_ranks_take_from_each_other_at_once():
    ranks = {rank: tuple(other for other in range(3) if other != rank) for rank in range(3)}
    with relays(ranks) as found:
        got = [(o, ask(found[r], o, o, 1 << 20)) for r in ranks for o in ranks[r]]
        given = [
            offer(found[rank], rank, bytes([rank]) * (1 << 20), *ranks[rank]) for rank in ranks
        ]
        for waiter in given:
            waiter.wait()
        for number, (target, waiter) in got:
            assert waiter.wait() == [1 << 20]
            assert set(target) == {number}


def test_what_is_refused_or_never_comes_is_answered_at_once():
    with relays({0: (), 1: (0,)}) as found:
        _, waiting = ask(found[1], 0, 3, 10)
        _, unknown = ask(found[1], 0, 99, 10)
        assert unknown.wait() == [REFUSED]
        found[0].refuse(key(3))
        assert waiting.wait() == [REFUSED]
        _, late = ask(found[1], 0, 3, 10)
        assert late.wait() == [REFUSED]


def test_a_rank_that_never_offers_is_given_up_and_nothing_of_it_comes_later():
    clock = ShiftedClock()
    with relays({0: (), 1: (0,)}, clock=clock) as found:
        target, waiter = ask(found[1], 0, 3, 10)
        hurry(clock)
        assert waiter.wait() == [REFUSED]
        assert offer(found[0], 3, b"x" * 10, 1).wait() == []
        time.sleep(0.1)
        assert target == bytes(10)
        assert ask(found[1], 0, 4, 10)[1].wait() == [REFUSED]


def test_a_rank_that_never_asks_is_given_up_and_the_others_get_theirs():
    clock = ShiftedClock()
    with relays({0: (), 1: (0,), 2: (0,)}, clock=clock) as found:
        given = offer(found[0], 3, LARGE, 1, 2)
        target, waiter = ask(found[1], 0, 3, len(LARGE))
        waiter.wait()
        assert target == LARGE
        assert not given.is_over
        hurry(clock)
        given.wait()
        assert ask(found[2], 0, 4, 10)[1].wait() == [REFUSED]


def test_a_rank_that_closes_is_not_waited_for():
    with relays({0: (), 1: (0,), 2: (1,)}) as found:
        _, waiter = ask(found[1], 0, 3, 10)
        given = offer(found[1], 4, b"abc", 2)
        found[0].close()
        assert waiter.wait() == [REFUSED]
        target, other = ask(found[2], 1, 4, 3)
        assert other.wait() == [3]
        assert bytes(target) == b"abc"
        given.wait()


def test_ranks_of_two_jobs_take_nothing_from_each_other():
    clock = ShiftedClock()
    with relays({0: (), 1: (0,)}, secrets={0: b"one", 1: b"two"}, clock=clock) as found:
        given = offer(found[0], 3, b"abc", 1)
        target, waiter = ask(found[1], 0, 3, 3)
        assert waiter.wait() == [REFUSED]
        assert bytes(target) == bytes(3)
        hurry(clock)
        given.wait()


def test_a_rank_that_stands_in_for_another_without_the_secret_is_found():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            line, _ = listener.accept()
            with line:
                line.sendall(bytes(32))
                line.recv(1000)
                line.sendall(bytes(32) + RelayKey(3, 0)[0].to_bytes(8, "little") + bytes(4))
                with suppress(ConnectionError):
                    line.sendall((3).to_bytes(8, "little") + b"abc")
                    line.recv(1000)

        thread = threading.Thread(target=pretend)
        thread.start()
        relay = Relay(
            Greeting(b"secret", 1),
            None,
            sources={0: listener.getsockname()},
            recipients=(),
            offers=(),
            patience_s=PATIENCE_S,
            ended=lambda: False,
            timing=Timing(poll_s=0.05),
        )
        relay.start()
        target, waiter = ask(relay, 0, 3, 3)
        assert waiter.wait() == [REFUSED]
        assert bytes(target) == bytes(3)
        relay.close()
        thread.join(30)


def test_sources_that_say_nothing_cost_one_wait_however_many_they_are():
    clock = ShiftedClock()
    with ExitStack() as opened:
        silent = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        relay = Relay(
            Greeting(b"secret", 9),
            None,
            sources={rank: one.getsockname() for rank, one in enumerate(silent)},
            recipients=(),
            offers=(),
            patience_s=PATIENCE_S,
            ended=lambda: False,
            timing=Timing(poll_s=0.01, clock=clock),
        )
        opened.callback(relay.close)
        relay.start()
        hurry(clock)
        assert ask(relay, 0, 0, 3)[1].wait() == [REFUSED]
        clock.ahead_s = clock.ahead_s()
        for rank in (1, 2, 3):  # as one batch after the other needs them
            assert ask(relay, rank, rank, 3)[1].wait() == [REFUSED]


def test_nobody_waits_once_all_have_given_up():
    over = threading.Event()
    with relays({0: (), 1: (0,)}, ended=over.is_set) as found:
        _, waiter = ask(found[1], 0, 3, 10)
        given = offer(found[0], 4, b"abc", 1)
        over.set()
        assert waiter.wait() == [REFUSED]
        given.wait()


def test_after_its_end_a_relay_refuses_and_keeps_nothing():
    with relays({0: (), 1: (0,)}) as found:
        for relay in found.values():
            relay.close()
        assert ask(found[1], 0, 3, 10)[1].told == [REFUSED]
        assert offer(found[0], 3, b"abc", 1).is_over


def test_strangers_who_connect_and_say_nothing_keep_nobody_out():
    with relays({0: (), 1: (0,)}) as found, ExitStack() as opened:
        address = found[1]._addresses[0]
        for _ in range(100):
            opened.enter_context(socket.create_connection(address, 10))
        given = offer(found[0], 3, b"abc", 1)
        target, waiter = ask(found[1], 0, 3, 3)
        assert waiter.wait() == [3]
        assert bytes(target) == b"abc"
        given.wait()


def test_a_rank_that_is_slow_to_say_who_it_is_is_not_driven_out_by_strangers():
    with ExitStack() as opened:
        listener = listening_socket("127.0.0.1")
        address = listener.getsockname()
        relay = Relay(
            Greeting(b"secret", 0),
            listener,
            sources={},
            recipients=[1],
            offers=[key(3)],
            patience_s=PATIENCE_S,
            ended=lambda: False,
            timing=Timing(poll_s=0.01, clock=CountedClock()),
        )
        opened.callback(relay.close)
        relay.start()
        line = opened.enter_context(socket.create_connection(address, 10))
        challenge = line.recv(32, socket.MSG_WAITALL)
        for _ in range(200):
            opened.enter_context(socket.create_connection(address, 10))
        time.sleep(0.3)  # all would have been accepted by now
        steps = Greeting(b"secret", 1).claim(0)
        next(steps)
        with pytest.raises(StopIteration) as claimed:
            steps.send(memoryview(challenge))
        claim, expected = claimed.value.value
        line.sendall(claim)
        assert line.recv(len(expected), socket.MSG_WAITALL) == expected
