"""A run in tiers with one that cannot be opened yet."""

import itertools
import threading
from concurrent.futures import Future

import pytest

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.concurrency.pool import fulfil
from penstock.core.errors import CapabilityError, ConfigError, StorageError
from penstock.core.types import ReadRequest
from penstock.testing.hasty import ShiftedClock


class Places:
    """Opens tiers; those in `away` do not answer."""

    def __init__(self, *away, error=StorageError):
        self.away = set(away)
        self.error = error
        self.asked = []
        self.open = {}

    def __call__(self, spec):
        self.asked.append(spec)
        if spec in self.away:
            raise self.error(f"{spec} does not answer")
        self.open[spec] = MemoryBackend(MemoryConfig())
        return self.open[spec]

    def tiered(self):
        return TieredBackend.open(TieredConfig(fast="near", durable="far"), open_backend=self)


@pytest.fixture
def at_once(waits):
    """At each read twice as much time has passed: more than the last try took."""
    looks = itertools.count(10)
    waits(tier_reopen_s=0.0, clock=ShiftedClock(lambda: 2.0 ** next(looks)))


@pytest.mark.parametrize("name", ["near", "far"])
def test_an_unresponsive_tier_does_not_block_the_other(name, at_once):
    places = Places(name)
    backend = places.tiered()
    with pytest.raises(StorageError, match=f"tier {'fast' if name == 'near' else 'durable'} .*"):
        backend.list("commits/")
    (other,) = places.open.values()
    other.publish("commits/x", b"x")
    assert backend.read_record("commits/x", limit_bytes=9) == b"x"
    assert not backend.capabilities.exclusive_publish  # unknown for one of them
    assert backend.direct_io is False
    backend.close()


def test_an_absent_tier_opens_later_and_closes_with_the_rest(at_once):
    places = Places("near")
    backend = places.tiered()
    assert backend.url.startswith("tiered(a folder (not open yet), memory://")
    with pytest.raises(StorageError, match="near does not answer"):
        backend.publish("commits/x", b"x")
    places.away.clear()
    backend.publish("commits/x", b"x")
    near = places.open["near"]
    assert near.read_record("commits/x", limit_bytes=9) == b"x"
    target = bytearray(1)
    backend.submit_read([ReadRequest("commits/x", 0, memoryview(target))]).result(300)
    assert target == b"x"
    assert backend.url == f"tiered({near.url}, {places.open['far'].url})"
    assert backend.tiers[0].backend.name == "memory"
    backend.close()
    for one in places.open.values():
        with pytest.raises(StorageError):
            one.list("")


def test_closing_does_not_wait_for_a_hung_try(at_once):
    """A tier that still opens is closed."""
    places = Places("near")
    backend = places.tiered()
    places.away.clear()
    begun, goes_on = threading.Event(), threading.Event()

    def hold(_):
        begun.set()
        goes_on.wait()

    backend.tiers[0].backend.check = hold
    outcome = Future()
    calling = threading.Thread(target=fulfil, args=(outcome, backend.free_bytes))
    calling.start()
    assert begun.wait(300)
    closing = threading.Thread(target=backend.close)
    closing.start()
    closing.join(300)
    waited = closing.is_alive()
    goes_on.set()
    closing.join(300)
    assert not waited
    with pytest.raises(StorageError, match="is closed"):
        outcome.result(300)
    calling.join(300)
    with pytest.raises(StorageError, match="closed"):
        places.open["near"].list("")


def test_a_tier_with_the_root_of_the_other_is_not_used(at_once, tmp_path):
    away = True

    def open_backend(spec):
        if spec == "near" and away:
            raise StorageError("near does not answer")
        return PosixBackend(PosixConfig(path=str(tmp_path)))

    backend = TieredBackend.open(
        TieredConfig(fast="near", durable="far"), open_backend=open_backend
    )
    away = False
    with pytest.raises(StorageError, match="two tiers are one place"):
        backend.tiers[0].backend.list("commits/")
    backend.close()


def test_not_every_call_retries_it(waits):
    waits(tier_reopen_s=3600.0)
    places = Places("near")
    backend = places.tiered()
    for _ in range(3):
        with pytest.raises(StorageError, match="near does not answer"):
            backend.free_bytes()
    assert places.asked.count("near") == 1
    backend.close()
    with pytest.raises(StorageError, match="is closed"):
        backend.free_bytes()


def test_without_any_reply_opening_fails():
    with pytest.raises(StorageError, match="near does not answer"):
        Places("near", "far").tiered()


@pytest.mark.parametrize("error", [CapabilityError, ConfigError])
def test_invalid_tiers_fail_at_once(error):
    places = Places("far", error=error)
    with pytest.raises(error):
        places.tiered()
    with pytest.raises(StorageError):
        places.open["near"].list("")


def test_absent_tier_is_logged(at_once, caplog):
    Places("far").tiered().close()
    assert "continuing without it for now: far does not answer" in caplog.text
