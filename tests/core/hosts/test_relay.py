"""A relay carries bytes to all ranks that need them, and waits for none for long."""

import itertools
import os
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, RemoteDisconnected

import pytest

from penstock.core.concurrency.timing import CountedClock, Timing
from penstock.core.errors import BlobNotFoundError, StorageError
from penstock.core.hosts.blob_http import BlobRange, Credentials
from penstock.core.hosts.relay import Relay, RelayedBytes
from penstock.core.types import ReadRequest
from penstock.testing.hasty import ShiftedClock

PATIENCE_S = 200.0  # twice a test's wait, so bytes that come meanwhile come at once
SIZE = 20 << 20
LARGE = os.urandom(SIZE)


def hurry(clock):
    """Advance the clock a little at each read; after leaps a relay would seem asleep."""
    clock.ahead_s = map((PATIENCE_S / 400).__mul__, itertools.count()).__next__


def place(number, size=SIZE):
    return BlobRange("a.raw", number, size)


@contextmanager
def relays(relayed, *, address="127.0.0.1", secrets=None, ended=lambda: False, clock=None):
    """Relays by rank, each with its takes and gives."""
    with ExitStack() as opened:
        timing = Timing(poll_s=0.01, clock=clock or ShiftedClock())
        found = {
            rank: Relay((secrets or {}).get(rank, b"secret"), rank, address, timing)
            for rank in relayed
        }
        where = {rank: relay.at for rank, relay in found.items()}
        for rank, relay in found.items():
            opened.callback(relay.close)
            relay.start(relayed[rank], where, patience_s=PATIENCE_S, ended=ended)
        yield found


def one_way(*recipients, numbers=range(10), size=SIZE):
    """The bytes that rank 0 reads for others."""
    given = [RelayedBytes(place(n, size), None, recipients) for n in numbers]
    taken = [RelayedBytes(place(n, size), 0, ()) for n in numbers]
    return {0: given, **dict.fromkeys(recipients, taken)}


def fetch(relay, source, number, size=SIZE):
    target = bytearray(size)
    return target, relay.fetch(source, ReadRequest("a.raw", number, memoryview(target)))


def failure(relay, future):
    """The error of a fetch, once the relay has waited for it."""
    waited = threading.Thread(target=relay.wait, args=(future.done,))
    waited.start()
    waited.join(PATIENCE_S / 2)
    assert not waited.is_alive()
    return future.exception()


def outlast(relay, offer):
    waited = threading.Thread(target=relay.wait, args=(lambda: not offer.left,))
    waited.start()
    waited.join(PATIENCE_S / 2)
    assert not waited.is_alive()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("first", ["ask", "offer"])
def test_all_ranks_get_their_bytes_in_any_order(address, first):
    with relays(one_way(1, 2), address=address) as found:
        if first == "offer":
            given = found[0].offer(place(3), (1, 2), memoryview(LARGE))
        got = [fetch(found[rank], 0, 3) for rank in (1, 2)]
        if first == "ask":
            time.sleep(0.1)
            given = found[0].offer(place(3), (1, 2), memoryview(LARGE))
        outlast(found[0], given)
        for target, future in got:
            future.result(PATIENCE_S / 2)
            assert target == LARGE


def test_ranks_take_from_each_other_at_once():
    ranks = range(3)
    others = {rank: tuple(other for other in ranks if other != rank) for rank in ranks}
    relayed = {
        rank: [
            RelayedBytes(place(n), None if n == rank else n, others[n] if n == rank else ())
            for n in ranks
        ]
        for rank in ranks
    }
    with relays(relayed) as found:
        got = [(n, fetch(found[rank], n, n)) for rank in ranks for n in others[rank]]
        given = [
            found[rank].offer(place(rank), others[rank], memoryview(bytes([rank]) * SIZE))
            for rank in ranks
        ]
        for rank in ranks:
            outlast(found[rank], given[rank])
        for number, (target, future) in got:
            future.result(PATIENCE_S / 2)
            assert set(target) == {number}


def test_refused_or_missing_bytes_are_answered_at_once():
    with relays(one_way(1)) as found:
        _, waiting = fetch(found[1], 0, 3)
        found[0].refuse(place(3))
        for future in (waiting, fetch(found[1], 0, 99)[1], fetch(found[1], 0, 3)[1]):
            assert isinstance(failure(found[1], future), BlobNotFoundError)


def test_bytes_listed_twice_are_delivered_twice():
    with relays(one_way(1, numbers=(3, 3))) as found:
        for fill in (b"a", b"b"):
            target, future = fetch(found[1], 0, 3)
            outlast(found[0], found[0].offer(place(3), (1,), memoryview(fill * SIZE)))
            future.result(PATIENCE_S / 2)
            assert target == fill * SIZE
        assert isinstance(failure(found[1], fetch(found[1], 0, 3)[1]), BlobNotFoundError)


def test_a_rank_that_never_offers_is_abandoned_for_good():
    clock = ShiftedClock()
    with relays(one_way(1), clock=clock) as found:
        target, future = fetch(found[1], 0, 3)
        hurry(clock)
        assert "was silent for 200 s" in str(failure(found[1], future))
        outlast(found[0], found[0].offer(place(3), (1,), memoryview(LARGE)))
        time.sleep(0.1)
        assert not any(target)
        assert isinstance(failure(found[1], fetch(found[1], 0, 4)[1]), StorageError)


def test_a_rank_that_never_asks_is_abandoned_and_others_are_served():
    clock = ShiftedClock()
    with relays(one_way(1, 2), clock=clock) as found:
        given = found[0].offer(place(3), (1, 2), memoryview(LARGE))
        target, future = fetch(found[1], 0, 3)
        future.result(PATIENCE_S / 2)
        assert target == LARGE
        while given.left != {2}:
            time.sleep(0.01)
        hurry(clock)
        outlast(found[0], given)
        assert isinstance(failure(found[2], fetch(found[2], 0, 4)[1]), StorageError)


def test_a_rank_that_stalls_while_taking_is_abandoned():
    clock = ShiftedClock()
    with relays({0: one_way(1)[0]}, clock=clock) as found, connected(found[0], 1) as line:
        line.putrequest("GET", "/a.raw")
        line.putheader("Authorization", authorization(0, 1))
        line.putheader("Range", f"bytes=3-{3 + SIZE - 1}")
        line.endheaders()
        given = found[0].offer(place(3), (1,), memoryview(LARGE))
        while not given.sending:
            time.sleep(0.01)
        hurry(clock)
        outlast(found[0], given)


def test_no_rank_waits_for_a_closed_rank():
    relayed = one_way(1)
    relayed[1] = [*relayed[1], RelayedBytes(place(4), None, (2,))]
    relayed[2] = [RelayedBytes(place(4), 1, ())]
    with relays(relayed) as found:
        _, future = fetch(found[1], 0, 3)
        target, other = fetch(found[2], 1, 4)
        found[0].close()
        assert isinstance(failure(found[1], future), StorageError)
        outlast(found[1], found[1].offer(place(4), (2,), memoryview(LARGE)))
        other.result(PATIENCE_S / 2)
        assert target == LARGE
        found[2].close()
        outlast(found[1], found[1].offer(place(5), (2,), memoryview(LARGE)))


def test_ranks_of_two_jobs_share_nothing():
    clock = ShiftedClock()
    with relays(one_way(1), secrets={0: b"one", 1: b"two"}, clock=clock) as found:
        given = found[0].offer(place(3), (1,), memoryview(LARGE))
        target, future = fetch(found[1], 0, 3)
        assert "does not prove" in str(failure(found[1], future))
        assert not any(target)
        hurry(clock)
        outlast(found[0], given)


def test_any_number_of_silent_sources_cost_one_wait():
    clock = ShiftedClock()
    with ExitStack() as opened:
        silent = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        relay = Relay(b"secret", 9, "127.0.0.1", Timing(poll_s=0.01, clock=clock))
        opened.callback(relay.close)
        relay.start(
            [RelayedBytes(place(n), n, ()) for n in range(4)],
            {n: one.getsockname() for n, one in enumerate(silent)},
            patience_s=PATIENCE_S,
            ended=lambda: False,
        )
        hurry(clock)
        assert isinstance(failure(relay, fetch(relay, 0, 0)[1]), StorageError)
        clock.ahead_s = clock.ahead_s()
        for n in (1, 2, 3):  # as batch after batch needs them
            assert isinstance(failure(relay, fetch(relay, n, n)[1]), StorageError)


def test_no_rank_waits_once_all_have_failed():
    over = threading.Event()
    with relays(one_way(1), ended=over.is_set) as found:
        _, future = fetch(found[1], 0, 3)
        given = found[0].offer(place(4), (1,), memoryview(LARGE))
        over.set()
        assert isinstance(failure(found[1], future), StorageError)
        outlast(found[0], given)


def test_a_closed_relay_refuses_and_keeps_nothing():
    with relays(one_way(1)) as found:
        for relay in found.values():
            relay.close()
        assert isinstance(fetch(found[1], 0, 3)[1].exception(0), StorageError)
        assert not found[0].offer(place(3), (1,), memoryview(LARGE)).left


# -- strangers -------------------------------------------------------------------------------------


def authorization(server, client, secret=b"secret"):
    return f"Bearer {client}.{Credentials.of(secret, server, client).token}"


@contextmanager
def connected(relay, rank):
    """An authenticated connection to a relay of rank 0 as `rank`."""
    with closing(HTTPConnection(*relay.at, timeout=PATIENCE_S / 2)) as line:
        line.request("GET", "/", headers={"Authorization": authorization(0, rank)})
        answer = line.getresponse()
        answer.read()
        assert answer.status == HTTPStatus.OK
        yield line


def test_silent_strangers_block_no_member():
    with relays(one_way(1)) as found, ExitStack() as opened:
        for _ in range(100):
            opened.enter_context(socket.create_connection(found[0].at, 10))
        given = found[0].offer(place(3), (1,), memoryview(LARGE))
        target, future = fetch(found[1], 0, 3)
        future.result(PATIENCE_S / 2)
        assert target == LARGE
        outlast(found[0], given)


def test_strangers_do_not_displace_a_rank_slow_to_identify():
    with relays({0: one_way(1)[0]}, clock=CountedClock()) as found, ExitStack() as opened:
        line = HTTPConnection(*found[0].at, timeout=PATIENCE_S / 2)
        opened.callback(line.close)
        line.connect()
        for _ in range(200):
            opened.enter_context(socket.create_connection(found[0].at, 10))
        while len(found[0]._server._silent) < 63:
            time.sleep(0.01)
        time.sleep(0.5)  # for those that would take the place of the first
        line.request("GET", "/", headers={"Authorization": authorization(0, 1)})
        assert line.getresponse().status == HTTPStatus.OK


def test_a_silent_stranger_is_disconnected():
    clock = ShiftedClock()
    with (
        relays({0: one_way(1)[0]}, clock=clock) as found,
        socket.create_connection(found[0].at, 10) as line,
    ):
        while not found[0]._server._silent:
            time.sleep(0.01)
        clock.ahead_s = 2 * PATIENCE_S
        line.settimeout(PATIENCE_S / 2)
        assert line.recv(10) == b""


def test_a_replayed_token_opens_no_connection():
    with relays({0: one_way(1)[0]}) as found, connected(found[0], 1) as line:
        for _ in range(2):
            with (
                pytest.raises((AssertionError, RemoteDisconnected)),
                connected(found[0], 1),
            ):
                pass
            line.close()
            while found[0]._recipients:
                time.sleep(0.01)
