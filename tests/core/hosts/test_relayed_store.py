"""A store that takes bytes read by other ranks, and reads missing ones from its own store."""

import pytest
from tests.core.hosts.test_relay import hurry, relays
from tests.integration.support import memory

from penstock.core.errors import BlobNotFoundError, StorageError
from penstock.core.hosts.blob_http import BlobRange
from penstock.core.hosts.relay import RelayedBytes, RelayedStore
from penstock.core.ranks.templates import RoundOverError
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.faults import Fault, FaultyBackend
from penstock.testing.hasty import ShiftedClock

DATA = bytes(range(256)) * 16
HALF = len(DATA) // 2
PATIENT_S = 100


def stored():
    backend = memory()
    writer = backend.create("a.raw")
    writer.write([WriteRequest(0, [memoryview(DATA)])])
    writer.seal(len(DATA))
    return backend


def halves(sources, recipients):
    """The halves of the blob, each with its source rank and its targets."""
    return [
        RelayedBytes(BlobRange("a.raw", n * HALF, HALF), sources[n], recipients[n]) for n in (0, 1)
    ]


def begun(store, *starts):
    """A read of halves, and its targets."""
    targets = [bytearray(HALF) for _ in starts]
    requests = [
        ReadRequest("a.raw", start, memoryview(target))
        for start, target in zip(starts, targets, strict=True)
    ]
    return store.submit_read(requests), targets, requests


# Two ranks; each reads one half for both.
TWO = {0: halves((None, 1), ((1,), ())), 1: halves((0, None), ((), (0,)))}


def two(found, backends):
    """The stores of the two ranks."""
    return [RelayedStore(backends[rank], found[rank], TWO[rank]) for rank in (0, 1)]


def test_each_half_is_read_by_one_rank_for_both():
    with relays(TWO) as found:
        stores = two(found, [stored(), stored()])
        reads = [begun(store, 0, HALF) for store in stores]
        for (future, targets, _), store in zip(reads, stores, strict=True):
            future.result(PATIENT_S)
            assert b"".join(targets) == DATA
            assert store.bytes_received == HALF


def test_a_second_read_of_a_range_goes_to_the_store():
    with relays(TWO) as found:
        stores = two(found, [stored(), stored()])
        for _ in range(2):
            for future, targets, _ in [begun(store, 0, HALF) for store in stores]:
                future.result(PATIENT_S)
                assert b"".join(targets) == DATA
        assert [store.bytes_received for store in stores] == [HALF, HALF]


def test_missing_bytes_are_read_from_the_store():
    clock = ShiftedClock()
    with relays(TWO, clock=clock) as found:
        found[1].close()
        hurry(clock)  # it may have closed before it was connected
        store = two(found, [stored(), stored()])[0]
        future, targets, _ = begun(store, 0, HALF)
        future.result(PATIENT_S)
        assert b"".join(targets) == DATA
        assert store.bytes_received == 0


def test_nothing_is_read_after_the_caller_leaves():
    with relays(TWO) as found:
        store = two(found, [stored(), stored()])[0]
        future, targets, _ = begun(store, HALF)
        found[0].close()
        with pytest.raises(RoundOverError):
            future.result(PATIENT_S)
        assert targets == [bytes(HALF)]


@pytest.mark.parametrize("error", [StorageError("the cable is cut"), BlobNotFoundError("gone")])
def test_a_failing_store_is_that_ranks_error_and_the_other_reads_itself(error):
    clock = ShiftedClock()
    with relays(TWO, clock=clock) as found:
        broken = FaultyBackend(stored(), Fault("read", error=error, times=None))
        stores = two(found, [broken, stored()])
        (failed, _, _), (future, targets, _) = [begun(store, 0, HALF) for store in stores]
        hurry(clock)  # the failed rank may never ask for the other's offer
        future.result(PATIENT_S)
        assert b"".join(targets) == DATA
        with pytest.raises(type(error)):
            failed.result(PATIENT_S)


def test_only_bytes_that_arrived_damaged_are_reread_as_a_tier():
    with relays(TWO) as found:
        stores = two(found, [stored(), stored()])
        (future, targets, (own, received)), other = [begun(store, 0, HALF) for store in stores]
        future.result(PATIENT_S)
        other[0].result(PATIENT_S)
        targets[1][:] = bytes(HALF)
        again = stores[0].tiers[0].backend
        again.read([received])
        assert bytes(targets[1]) == DATA[HALF:]
        assert stores[0].bytes_received == 0
        for request in (own, received):
            with pytest.raises(StorageError):
                again.read([request])


def test_bytes_damaged_twice_are_read_again_twice():
    """Like a base of several chunks."""
    place = BlobRange("a.raw", HALF, HALF)
    twice = {0: [RelayedBytes(place, 1, ())] * 2, 1: [RelayedBytes(place, None, (0,))] * 2}
    with relays(twice) as found:
        stores = [RelayedStore(stored(), found[rank], twice[rank]) for rank in (0, 1)]
        (future, targets, requests), other = [begun(store, HALF, HALF) for store in stores]
        future.result(PATIENT_S)
        other[0].result(PATIENT_S)
        assert stores[0].bytes_received == 2 * HALF
        for request, target in zip(requests, targets, strict=True):
            target[:] = bytes(HALF)
            stores[0].tiers[0].backend.read([request])
            assert bytes(target) == DATA[HALF:]
        assert stores[0].bytes_received == 0
