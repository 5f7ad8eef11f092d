"""The lease of a copy: one holder at a time, and a list of the blobs that are durable."""

import os

import pytest
from tests.integration.support import memory

from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.concurrency.timing import Timing
from penstock.core.copy.lease import SILENT_S, Lease
from penstock.core.errors import BusyError
from penstock.core.format.commit_record import unseal
from penstock.core.format.records import lease_name
from penstock.testing.hasty import ShiftedClock

UID = "a" * 32


def test_second_copy_waits_for_the_first_and_learns_what_it_sealed():
    target = memory()
    first, second = (Lease(target, UID, Timing()) for _ in range(2))
    assert not second.is_abandoned()
    first.take()
    first.seal("one")
    with pytest.raises(BusyError, match="already copying this checkpoint"):
        second.take()
    first.release()
    assert second.is_abandoned()
    second.take(durable=["two"])
    assert (first.found, second.found) == (False, True)
    assert second.sealed == {"one", "two"}
    second.keep(["two"])
    assert second.sealed == {"two"}
    with pytest.raises(BusyError, match="belongs to another copy"):
        first.seal("three")
    second.remove()
    assert target.list("") == []


def test_lease_is_published_again_only_when_it_is_due():
    target, clock = memory(), ShiftedClock()
    lease = Lease(target, UID, Timing(clock=clock))
    lease.take()
    (before,) = target.list(lease_name(UID))
    target.delete([before.name])
    lease.refresh()  # does not look at the store
    clock.ahead_s = Timing().lease_refresh_s + 1
    with pytest.raises(BusyError, match="or is gone"):
        lease.refresh()


def test_a_lease_unrefreshed_for_long_is_lost_even_if_the_store_has_it():
    """A refresh may have overwritten the lease of the next copy."""
    clock = ShiftedClock()
    lease = Lease(memory(), UID, Timing(clock=clock))
    lease.take()
    lease.check()
    clock.ahead_s = SILENT_S / 2 + 1
    with pytest.raises(BusyError, match="not refreshed for 451 s"):
        lease.check()


def test_only_its_own_lease_is_removed():
    target = memory()
    lease = Lease(target, UID, Timing())
    lease.take()
    target.publish(lease_name(UID), b"{}")
    lease.remove()
    assert target.read_record(lease_name(UID), limit_bytes=10) == b"{}"


@pytest.mark.process
def test_the_lease_of_a_zombie_process_does_not_hold(tmp_path):
    target = PosixBackend(PosixConfig(path=str(tmp_path), direct_io="off"))
    copier = os.fork()
    if copier == 0:
        Lease(target, UID, Timing()).take()
        os._exit(0)
    try:
        os.waitid(os.P_PID, copier, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        found = target.read_record(lease_name(UID), limit_bytes=1 << 20)
        assert unseal(found, lease_name(UID))["pid"] == copier
        Lease(target, UID, Timing()).take()
    finally:
        os.waitpid(copier, 0)
