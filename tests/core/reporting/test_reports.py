"""Handles, futures and reports as a caller sees them."""

import dataclasses
import pickle
from concurrent.futures import CancelledError, wait
from xml.etree import ElementTree as ET

import pytest

from penstock.core.errors import SaveError
from penstock.core.reporting.reports import (
    CheckpointInfo,
    Damage,
    Progress,
    RestoreReport,
    SaveHandle,
    SaveReport,
    VerifyReport,
)

REPORT = SaveReport(
    step=4, uid="0" * 32, generation=0, bytes_raw=10, bytes_stored=8, blobs=1, objects=2,
    engine="memory", direct_io=False, exclusive=True, deferred_bytes=0, straight_bytes=0,
    seconds={"total": 1.0},
)  # fmt: skip


@pytest.fixture
def handle():
    return SaveHandle(4)


def futures(handle):
    return [handle.captured, handle.committed, handle.durable]


@pytest.mark.parametrize("name", ["captured", "committed", "durable"])
@pytest.mark.parametrize("look", ["result", "exception"])
def test_asking_any_future_marks_the_error_as_seen(name, look, handle):
    error = SaveError("no")
    for future in futures(handle):
        future.set_exception(error)
    assert not handle.error_seen
    future = getattr(handle, name)
    if look == "result":
        with pytest.raises(SaveError, match="no"):
            future.result()
    else:
        assert future.exception() is error
    assert handle.error_seen


def test_polling_without_asking_is_not_seeing(handle):
    error = SaveError("no")
    assert not wait([handle.durable], timeout=0).done
    for future in futures(handle):
        future.set_exception(error)
    assert wait(futures(handle)).done == set(futures(handle))
    assert handle.done()
    assert handle.durable.done()
    assert handle.durable.peek_error() is error
    assert "error" not in repr(handle).lower()
    assert not handle.error_seen


def test_futures_cannot_cancel_a_save(handle):
    for future in futures(handle):
        assert future.cancel() is False
        assert not future.cancelled()
    handle.captured.set_result(None)
    handle.committed.set_result(REPORT)
    handle.durable.set_result(REPORT)
    try:
        assert handle.result(0) is REPORT
    except CancelledError:
        pytest.fail("cancelled")


RECORDS = [
    REPORT,
    Progress(1, 2, "write"),
    Damage("model/w", "checksum"),
    VerifyReport(1, False, (Damage("a", "b"),), 1, 1, 10, True, 0.1),
    RestoreReport(
        step=1, restored=("a",), missing=(), unexpected=(), values={"e": 1}, matched_by="name",
        bytes_needed=1, bytes_read=1, bytes_metadata=1, engine="memory", direct_io=False,
        seconds={"total": 0.5},
    ),
]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_reports_cannot_be_changed_and_cross_processes(record):
    name = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, None)
    assert pickle.loads(pickle.dumps(record)) == record


# -- tables in notebooks --------------------------------------------------------------------------

EVIL = "<script>alert(1)</script>&"


def rows_of(report):
    table = ET.fromstring(report._repr_html_())
    assert {one.tag for one in table.iter()} <= {"table", "caption", "tr", "th", "td"}
    return {row.find("th").text: row.find("td").text for row in table.iter("tr")}


def test_a_notebook_shows_stored_names_as_text():
    damage = (Damage(EVIL, f"of {EVIL}"),)
    verified = VerifyReport(4, ok=False, damaged=damage, objects=2, frames=1, bytes_read=9,
                            deep=True, seconds=0.5)  # fmt: skip
    assert rows_of(verified)["damaged"] == f"1: what {EVIL}, detail of {EVIL}"
    restored = RestoreReport(
        step=4, restored=(EVIL, *map(str, range(99))), missing=(), unexpected=(),
        values={EVIL: EVIL}, matched_by=None, bytes_needed=1, bytes_read=1, bytes_metadata=1,
        engine="posix", direct_io=False, seconds={"total": 0.5}, rescued=((EVIL, "fast"),),
    )  # fmt: skip
    rows = rows_of(restored)
    assert rows["restored"].startswith(f"100: {EVIL}, 0, 1")
    assert len(rows["restored"]) < 300
    assert rows["values"] == "1 value"
    assert rows["rescued"] == f"1: {EVIL} from fast"
    info = CheckpointInfo(4, 0, "0" * 32, "now", 1, 1, 1, 1, metadata={EVIL: EVIL})
    assert rows_of(info)["metadata"] == f"{EVIL} {EVIL}"
