"""Tiers in folders: losses of one are noticed, reported, and copied again."""

import shutil

import pytest
from tests.integration.support import blank, make_state, same
from tests.integration.tiers.places import Folders

from penstock import Checkpointer


@pytest.fixture
def folders(tmp_path):
    made = Folders(tmp_path)
    with made.open() as ckpt:
        for step in (1, 2):
            ckpt.save(make_state(step), step).result(300)
    return made


def state_of(folders, **options):
    """The result of a restore of step 2, and its report."""
    events = []
    tree = blank(make_state(2))
    with folders.open(on_event=events.append) as ckpt:
        report = ckpt.restore(tree, **options)
        assert same(tree["model"], make_state(2)["model"])
        uid = ckpt.info(2).uid
    (done,) = (event for event in events if event.kind == "restore_done")
    return report, done.as_dict(), uid


def test_a_restore_reports_missing_blobs_and_copies_them_again(folders, caplog):
    with folders.open() as ckpt:
        uid = ckpt.info(2).uid
    (blob,) = (folders.fast / "data" / uid / "blobs").iterdir()
    good = blob.read_bytes()
    blob.unlink()
    report, counts, _ = state_of(folders)
    assert report.rescued == ((f"data/{uid}/blobs/{blob.name}", "durable"),)
    assert counts["rescued"] == 1
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert (
        f"tier fast lists it, but has lost all or the end of data/{uid}/blobs/{blob.name}"
        in warnings[0]
    )
    assert blob.read_bytes() == good
    with Checkpointer(f"posix://{folders.fast}") as alone:
        assert alone.verify(2).ok
    report, counts, _ = state_of(folders)
    assert (report.rescued, counts["rescued"]) == ((), 0)
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


def test_a_partial_restore_notices_unread_lost_blobs_too(folders):
    with folders.open() as ckpt:
        uid = ckpt.info(2).uid
    shutil.rmtree(folders.fast / "data" / uid / "parts")
    (folders.fast / "data" / uid / "index").unlink()
    report, _, _ = state_of(folders, include="model")
    assert [tier for _, tier in report.rescued] == ["durable"] * 2
    with Checkpointer(f"posix://{folders.fast}") as alone:
        assert alone.verify(2).ok


def test_a_load_repairs_as_well(folders):
    with folders.open() as ckpt:
        uid = ckpt.info(1).uid
    shutil.rmtree(folders.fast / "data" / uid / "blobs")
    with folders.open() as ckpt:
        assert same(ckpt.load(1), make_state(1))
    with Checkpointer(f"posix://{folders.fast}") as alone:
        assert alone.verify(1).ok


def test_eviction_is_permanent(folders, caplog):
    with folders.open() as ckpt:
        uid = ckpt.info(2).uid
    (folders.fast / "commits" / "00000002-0.json").unlink()
    data = folders.fast / "data" / uid
    (data / "intent.json").unlink()
    shutil.rmtree(data / "blobs")  # interrupted in its middle: part and index exist
    before = folders.blobs(folders.fast, uid)
    report, _, _ = state_of(folders)
    assert report.rescued == ()
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    assert folders.blobs(folders.fast, uid) == before


def test_the_last_good_blobs_are_not_dropped_for_a_copy_that_lost_others(folders, caplog):
    """Neither tier is whole, both together are: restored, reported, and nothing is deleted."""
    with folders.open(rules=[{"match": "optimizer/**", "codecs": ["zstd"]}]) as ckpt:
        ckpt.save(make_state(3), 3).result(300)
        uid = ckpt.info(3).uid
    (folders.fast / "data" / uid / "blobs" / "00000-0.raw").unlink()
    (folders.durable / "data" / uid / "blobs" / "00000-0.enc").unlink()
    left = folders.blobs(folders.fast, uid), folders.blobs(folders.durable, uid)
    with folders.open() as ckpt:
        tree = blank(make_state(3))
        report = ckpt.restore(tree)
        assert same(tree["model"], make_state(3)["model"])
        assert same(tree["optimizer"], make_state(3)["optimizer"])
    assert report.rescued == ((f"data/{uid}/blobs/00000-0.raw", "durable"),)
    assert "repairing a damaged copy failed" in caplog.text
    assert (folders.blobs(folders.fast, uid), folders.blobs(folders.durable, uid)) == left
