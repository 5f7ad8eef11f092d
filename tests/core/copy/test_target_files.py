"""The files of a copy at its target: their owners, and which are replaced."""

from contextlib import closing

import pytest
from tests.integration.support import memory, saved_in_memory

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.commit_table import Commit
from penstock.core.catalog.prune import GRACE_S
from penstock.core.catalog.publisher import Publisher
from penstock.core.concurrency.timing import Timing
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.lease import Lease
from penstock.core.copy.target_files import TargetFiles
from penstock.core.errors import BusyError
from penstock.core.format.records import commit_name, intent_name, lease_name

STEP = 7


@pytest.fixture(scope="module")
def source():
    return saved_in_memory(3, STEP)


@pytest.fixture
def record(source):
    return Catalog(source).record(STEP)


@pytest.fixture
def target():
    return memory()


@pytest.fixture
def copied(source, target, record):
    """Copies the checkpoint, and deletes these names at the target."""

    def copy(*deleted):
        with closing(Workers(1)) as workers:
            CheckpointCopy(source, target, record, workers=workers, grace_s=GRACE_S).run()
        target.delete(deleted)

    return copy


def files_of(target, record, *, repair=False):
    timing = Timing()
    publisher = Publisher(
        target, Commit(), uid=record.uid, step=STEP, grace_s=GRACE_S, clock=timing.clock
    )
    lease = Lease(target, record.uid, timing)
    files = TargetFiles(
        [target], record, lease=lease, publisher=publisher, timing=timing, repair=repair
    )
    return files, lease


def names(target):
    return {info.name for info in target.list("")}


def test_data_of_a_save_in_flight_is_left_alone(target, record):
    name = intent_name(record.uid)
    target.publish(name, b"of a save")
    files, lease = files_of(target, record)
    with pytest.raises(BusyError, match="no copy wrote it"):
        files.check()
    lease.take()
    with pytest.raises(BusyError, match="no copy wrote it"):
        files.begin()
    assert not files.wrote
    assert target.read_record(name, limit_bytes=100) == b"of a save"


def test_data_beside_the_lease_of_an_earlier_copy_is_replaced(target, record):
    earlier, lease = files_of(target, record)
    lease.take()
    earlier.begin()
    earlier.publish(record.index.name, b"torn")
    lease.release()
    files, lease = files_of(target, record)
    files.check()
    lease.take()
    assert files.begin() is False
    files.publish(record.index.name, b"whole")
    assert target.read_record(record.index.name, limit_bytes=100) == b"whole"


def test_leftovers_of_a_deletion_are_replaced_but_newer_data_stays(target, record, copied):
    part = record.parts[0].name
    copied(commit_name(STEP, 0), intent_name(record.uid), part)
    files, lease = files_of(target, record)
    files.check()
    lease.take()
    assert files.begin() is True
    files.publish(record.index.name, b"replaced")
    target.publish(part, b"of another save")
    with pytest.raises(BusyError, match="no copy wrote it"):
        files.publish(part, b"of the copy")
    assert target.read_record(part, limit_bytes=100) == b"of another save"


def test_intent_is_withdrawn_unless_an_earlier_copy_left_data(target, record):
    files, lease = files_of(target, record)
    lease.take()
    files.begin()
    files.take_back_intent()
    assert not files.wrote
    assert names(target) == {lease_name(record.uid)}
    files.begin()
    lease.release()
    files, lease = files_of(target, record)
    lease.take()
    files.begin()
    files.take_back_intent()
    assert files.wrote
    assert intent_name(record.uid) in names(target)


def test_repair_replaces_data_without_a_lease(target, record, copied):
    copied(commit_name(STEP, 0))
    target.publish(record.index.name, b"damaged")
    with pytest.raises(BusyError):
        files_of(target, record)[0].check()
    files, lease = files_of(target, record, repair=True)
    files.check()
    lease.take()
    assert files.begin() is False
    files.publish(record.index.name, b"whole")
