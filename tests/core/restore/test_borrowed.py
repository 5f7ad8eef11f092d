"""Reading checkpoints that borrow blobs: missing blobs are named, with their step."""

import pytest
from tests.core.borrowing import borrow
from tests.integration.support import checkpointer, make_state, memory, same

from penstock.core.catalog.catalog import Catalog
from penstock.core.errors import CheckpointGoneError, DamagedError
from penstock.core.format.records import commit_name
from penstock.testing.faults import WrapperBackend

DELTA = "d" * 32
STATE = make_state(1)


@pytest.fixture
def store():
    backend = memory()
    with checkpointer(backend) as ckpt:
        ckpt.save(STATE, 1, mode="blocking")
    borrow(backend, 1, 2, uid=DELTA)
    return backend


def lose(store):
    (blob,) = Catalog(store).record(2).borrowed
    store.delete([blob.name])
    return blob.name


def test_a_checkpoint_is_read_without_its_lender(store):
    with checkpointer(store) as ckpt:
        ckpt.delete(1)
        assert ckpt.verify(2).ok
        assert same(ckpt.load(2), STATE)
        assert ckpt.info(2).references == Catalog(store).record(2).references


@pytest.mark.parametrize("deleted", [False, True])
def test_a_missing_borrowed_blob_is_damage_that_names_it_and_its_step(store, deleted):
    if deleted:
        Catalog(store).delete(1)
    name = lose(store)
    owner = "a deleted step" if deleted else "step 1"
    with checkpointer(store) as ckpt:
        with pytest.raises(DamagedError, match=f"{name}.* lies in the blobs of {owner}"):
            ckpt.load(2)
        assert name in {damage.what for damage in ckpt.verify(2, deep=False).damaged}


def test_a_reader_reports_that_its_record_is_gone(store):
    class Deleting(WrapperBackend):
        def read(self, requests, /):
            if any("/blobs/" in request.name for request in requests):
                self.inner.delete([commit_name(2, 0)])
                lose_all(self.inner)
            self.inner.read(requests)

    with checkpointer(Deleting(store)) as ckpt, pytest.raises(CheckpointGoneError):
        ckpt.load(2)


def lose_all(store):
    store.delete([info.name for info in store.list("data/") if "/blobs/" in info.name])
