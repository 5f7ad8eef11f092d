"""A checkpoint that a store lists is confirmed only if it is whole and durable there."""

import pytest
from tests.integration.support import saved_in_memory

from penstock.core.catalog.catalog import Catalog
from penstock.core.copy.confirmation import confirmed
from penstock.core.format.records import lease_name
from penstock.testing.faults import FaultyBackend, WrapperBackend

DATA = [
    "intent.json",
    "parts/00000.json.zst",
    "index",
    "blobs/00000-0.raw",
    "blobs/00000-0.enc",
]


@pytest.fixture
def store():
    return saved_in_memory(1, step=1)


def test_a_whole_step_is_a_copy(store):
    record = Catalog(store).record(1)
    assert {i.name for i in store.list("data/")} == {f"data/{record.uid}/{n}" for n in DATA}
    assert confirmed(store, record)
    assert Catalog(store).steps() == [1]


def test_a_record_with_a_lost_response_is_published_again(store):
    record = Catalog(store).record(1)
    store.publish(lease_name(record.uid), b"{}")
    watched = FaultyBackend(store)
    for _ in range(2):
        assert confirmed(watched, record)
    assert [operation for operation, _ in watched.calls].count("publish") == 1


@pytest.mark.parametrize(
    ("lacking", "how"),
    [(name, "gone") for name in DATA] + [(name, "short") for name in DATA[1:]],
)
def test_a_record_lacking_data_is_no_copy_and_is_deleted(lacking, how, store):
    record = Catalog(store).record(1)
    name = f"data/{record.uid}/{lacking}"
    data = store.read_record(name, limit_bytes=1 << 30)
    store.delete([name])
    if how == "short":
        store.publish(name, data[:-1])
    store.publish(lease_name(record.uid), b"{}")  # or nothing would be published in any case
    watched = FaultyBackend(store)
    assert not confirmed(watched, record)
    assert Catalog(store).steps() == []
    assert "publish" not in {operation for operation, _ in watched.calls}


def test_a_record_deleted_during_confirmation_is_not_republished(store):
    record = Catalog(store).record(1)
    store.publish(lease_name(record.uid), b"{}")  # its copy never got the response

    class Racing(WrapperBackend):
        def publish(self, name, data, /, *, exclusive=False):
            Catalog(self.inner).delete(1)  # as another process may at any moment
            super().publish(name, data, exclusive=exclusive)

    assert not confirmed(Racing(store), record)
    assert store.list("") == []
