"""Reading around a damaged copy."""

import logging

import pytest

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.errors import BlobNotFoundError, DamagedError, RestoreError, StorageError
from penstock.core.storage.failover import ObservedBackend, from_any_tier
from penstock.testing.faults import Fault, FaultyBackend

WHOLE = b"whole"


def two_tiers(fast, durable):
    """A run of two tiers with these copies of one record; None: the tier has none."""
    tiers = [FaultyBackend(MemoryBackend(MemoryConfig())) for _ in range(2)]
    for tier, copy in zip(tiers, (fast, durable), strict=True):
        if copy is not None:
            tier.publish("record", copy)
    config = TieredConfig(fast="memory://", durable="memory://")
    return TieredBackend(config, fast=tiers[0], durable=tiers[1]), tiers


def read(backend):
    data = backend.read_record("record", limit_bytes=10)
    if data != WHOLE:
        message = f"{data!r} is damaged"
        raise DamagedError(message, ["record"])
    return data


def test_whole_record_is_read_once_without_a_report():
    backend, (_, durable) = two_tiers(WHOLE, WHOLE)
    durable.add(Fault("read", times=None, error=StorageError("not to be asked")))
    failovers = []
    assert from_any_tier(
        ObservedBackend(backend, lambda *what: failovers.append(what)), "record", read
    )
    assert failovers == []


def test_damaged_record_is_read_from_the_next_tier_and_reported(caplog):
    backend, _ = two_tiers(b"flipped", WHOLE)
    failovers = []
    observed = ObservedBackend(backend, lambda *what: failovers.append(what))
    with caplog.at_level(logging.WARNING, "penstock"):
        assert from_any_tier(observed, "record", read) == WHOLE
    assert failovers == [("record", "durable")]
    assert "the good copy in tier durable was read instead" in caplog.text


@pytest.mark.parametrize("durable", [b"also", None])
def test_error_is_the_fastest_tiers_if_no_copy_is_whole(durable):
    backend, _ = two_tiers(b"flipped", durable)
    with pytest.raises(DamagedError, match="flipped"):
        from_any_tier(backend, "record", read)


def test_tier_that_fails_has_no_whole_copy():
    backend, (_, durable) = two_tiers(b"flipped", WHOLE)
    durable.add(Fault("read", times=None, error=StorageError("away")))
    with pytest.raises(DamagedError, match="flipped"):
        from_any_tier(backend, "record", read)


def test_missing_record_is_no_damage():
    backend, _ = two_tiers(None, None)
    with pytest.raises(BlobNotFoundError):
        from_any_tier(backend, "record", read)


def test_too_little_memory_is_no_damage():
    def read_too_much(_):
        raise MemoryError

    with pytest.raises(RestoreError, match="record: reading it takes more memory"):
        from_any_tier(two_tiers(WHOLE, WHOLE)[0], "record", read_too_much)
