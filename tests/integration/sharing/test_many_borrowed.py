"""Checkpoints that borrow more blobs than fit in a commit record: the index has a table of them."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from tests.core.cli.command import caller
from tests.core.tiers.test_drains import drains_of
from tests.integration.support import same

import penstock
from penstock.core.abc import Tier
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.prune import prune
from penstock.core.catalog.survey import borrowed_blobs, has_data
from penstock.core.errors import DamagedError
from penstock.core.format import commit_record
from penstock.core.format.commit_record import encode_borrowed, encode_commit
from penstock.core.format.records import blob_uid, commit_name
from penstock.core.save import manifest
from penstock.core.storage.open import open_backend
from penstock.core.tiers.whereabouts import mark
from penstock.testing.hasty import FAST

LISTED = 8  # instead of 64, so a run of seven saves is enough
LAST = LISTED // 2 + 2
RULES = [{"match": "z*", "codecs": ["zstd"]}]


@pytest.fixture
def call(capsys, monkeypatch):
    return caller(capsys, monkeypatch)


def state(step):
    """Two weights for each step so far: each save stores two, and borrows the others."""
    return {f"{kind}{n}": torch.full((4096,), n + 0.5) for n in range(step + 1) for kind in "wz"}


def opened(url, **options):
    return penstock.Checkpointer(url, share=True, chunk_bytes=16384, rules=RULES, **options)


@pytest.fixture(autouse=True)
def hasty(waits):
    waits(FAST)


@pytest.fixture(scope="module", autouse=True)
def few():
    with pytest.MonkeyPatch.context() as patch:
        for module in (commit_record, manifest):
            patch.setattr(module, "MAX_LISTED_BORROWED", LISTED)
        yield


@pytest.fixture(scope="module")
def saved(few, tmp_path_factory):
    root = tmp_path_factory.mktemp("many") / "run"
    with opened(root) as ckpt:
        for step in range(LAST + 1):
            ckpt.save(state(step), step=step, mode="blocking")
    return root


@pytest.fixture
def root(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def record_of(backend):
    return Catalog(backend).record(LAST)


def check(root, step=LAST):
    """A checkpoint has its table and is whole."""
    with closing(open_backend(str(root), must_exist=True)) as backend:
        record = Catalog(backend).record(step)
        assert (record.borrowed, record.many_borrowed.count) == ((), 2 * step)
        blobs = borrowed_blobs(backend, record)
        assert [blob_uid(blob.name) for blob in blobs[::2]] == list(record.references)
        assert sum(blob.length for blob in blobs) == record.bytes_borrowed
    with penstock.Checkpointer(root) as ckpt:
        assert same(ckpt.load(step), state(step))
        report = ckpt.verify(step)
        assert report.ok, report.damaged


def damage(root, *, at=-3):
    """Change a byte of the table, which ends the index; returns the name of the index."""
    with closing(open_backend(str(root), must_exist=True)) as backend:
        index = record_of(backend).index.name
    data = bytearray((root / index).read_bytes())
    data[at] ^= 1
    (root / index).write_bytes(data)
    return index


def delete_others(root):
    """Delete all steps but the last, and prune without a grace time."""
    with penstock.Checkpointer(root) as ckpt:
        for step in range(LAST):
            ckpt.delete(step)
        assert ckpt.steps() == [LAST]
    with closing(open_backend(str(root), must_exist=True)) as backend:
        assert prune(backend, grace_s=0.0).uids == ()


def test_a_deletion_spares_blobs_only_in_the_table(root):
    delete_others(root)
    check(root)


def test_a_table_survives_retention_and_rewinding(root):
    with opened(root) as ckpt:
        ckpt.save(state(LAST + 1), step=LAST + 1, mode="blocking")
        ckpt.rewind(LAST)
    check(root)
    with opened(root, retention={"keep_last": 1}) as ckpt:
        ckpt.save(state(LAST + 1), step=LAST + 1, mode="blocking")
        ckpt.wait()
        assert ckpt.steps() == [LAST + 1]
    check(root, LAST + 1)


def test_a_copy_has_the_table(call, root, tmp_path):
    assert call("copy", root, tmp_path / "copy", "--step", LAST).code == 0
    check(tmp_path / "copy")


def test_a_drain_has_the_table_and_a_damaged_one_is_repaired(root, tmp_path):
    durable = tmp_path / "durable"
    durable.mkdir()
    fast = open_backend(str(root), must_exist=True)
    mark(fast, record_of(fast).uid, LAST)
    tiers = Tier("fast", fast), Tier("durable", open_backend(str(durable)), durable=True)
    with drains_of(*tiers) as drains:
        drains.resume()
        assert drains.settle(300)
    check(durable)
    index = damage(root)
    url = f"tiered://?fast={root}&durable={durable}"
    with penstock.Checkpointer(url) as ckpt:
        report = ckpt.verify(LAST, repair=True)
        assert index in {one.what for one in report.damaged}
    check(root)


def test_a_compacted_checkpoint_needs_no_table(root):
    with penstock.Checkpointer(root) as ckpt:
        ckpt.compact([LAST])
        for step in range(LAST):
            ckpt.delete(step)
        assert not ckpt._catalog.record(LAST).references
        assert same(ckpt.load(LAST), state(LAST))


def test_a_damaged_table_is_damage_of_that_checkpoint_alone(root):
    index = damage(root)
    with penstock.Checkpointer(root) as ckpt:
        assert index in {one.what for one in ckpt.verify(LAST).damaged}
        assert ckpt.verify(LAST - 1).ok
    with closing(open_backend(str(root), must_exist=True)) as backend:
        record = record_of(backend)
        with pytest.raises(DamagedError, match=index):
            borrowed_blobs(backend, record)
        assert not has_data(backend, record)


def test_a_damaged_table_costs_no_blob(root):
    """The needed blobs are unknown: all blobs of the saves in the record stay."""
    damage(root)
    before = sorted(root.glob("data/*/blobs/*"))
    assert len(before) == 2 * LAST + 2
    delete_others(root)
    assert sorted(root.glob("data/*/blobs/*")) == before


def shorten(root, leave_out):
    """Re-sign the checkpoint with a table that lacks its blobs of the first save."""
    with closing(open_backend(str(root), must_exist=True)) as backend:
        record = record_of(backend)
        blobs = borrowed_blobs(backend, record)
        path = root / record.index.name
        table, many = encode_borrowed(blobs[leave_out:])
        data = path.read_bytes()[: -record.many_borrowed.length] + table
        path.write_bytes(data)
        index = replace(record.index, length=len(data))
        changed = replace(record, index=index, many_borrowed=many)
        (root / commit_name(LAST, 0)).write_bytes(encode_commit(changed))
    return blobs


def test_a_table_that_lacks_a_blob_is_found_and_not_copied(call, root, tmp_path):
    blobs = shorten(root, 1)
    with penstock.Checkpointer(root) as ckpt:
        (found,) = ckpt.verify(LAST).damaged
        assert blobs[0].name in found.detail
    done = call("copy", root, tmp_path / "copy", "--step", LAST)
    assert done.code != 0
    assert blobs[0].name in done.out + done.err


def test_a_part_borrows_only_from_saves_named_by_the_record(root):
    """A deletion would delete the blobs of that save."""
    (first, *_) = shorten(root, 2)
    with penstock.Checkpointer(root) as ckpt:
        assert ckpt._catalog.record(LAST).references[0] != blob_uid(first.name)
        with pytest.raises(
            DamagedError, match=f"borrows nothing from the save of data/{blob_uid(first.name)}/"
        ):
            ckpt.load(LAST)
