"""A copy restores to the same bits as the original, under any encoding and any copier."""

from __future__ import annotations

import signal
from contextlib import closing
from itertools import count

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import interpreters
from tests.effort import examples
from tests.integration.exact_resume.test_round_trips import (
    CHAINS,
    escaped,
    objects,
    plain,
    save_to,
    settings_of_a_save,
    states,
)
from tests.integration.support import checkpointer, make_state, memory, same

from penstock import Checkpointer
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.prune import GRACE_S
from penstock.core.concurrency.workers import Workers
from penstock.core.config.model import load_config
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.reencode import Reencoding, copy_objects
from penstock.core.errors import SelectionError
from penstock.core.pipeline.loader import Loader
from penstock.core.plugins.registry import default_registry
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.tree.select import Selection
from penstock.testing.faults import EFFECTS

SMALL = {"chunk_bytes": 16384, "block_bytes": 4096, "staging_bytes": 65536}


@pytest.fixture(scope="module")
def workers():
    with closing(Workers(2)) as threads:
        yield threads


def encode(source, target, workers, *, step=1, rules=None, include=None, exclude=None, **options):
    """Copy with these rules, or (None) with the existing codecs."""
    how = Reencoding(
        config=load_config({"backend": target, "rules": rules or [], **SMALL}),
        selection=Selection(include, exclude),
        keep_codecs=rules is None,
        **options,
    )
    checkpoint = Checkpoint.open(source, step, loader=Loader(source, workers))
    return copy_objects(checkpoint, target, how, registry=default_registry(), workers=workers)


def described(backend, step=1):
    """The whole manifest except the places of the bytes."""
    contents = Checkpoint.open(backend, step).contents
    found = [
        (r.ordinal, r.path, r.kind, r.spec, r.role, r.form, r.same_as) for r in contents.objects()
    ]
    return found, contents.nodes(), contents.record.metadata, contents.record.providers


def codecs(backend, step=1):
    contents = Checkpoint.open(backend, step).contents
    found = {}
    for record in contents.objects():
        frames = record.frames
        for shard in record.shards:
            for ref in shard.chunks:
                chain = record.head.chains[frames[ref.frame].chain]
                found[record.path] = tuple(link.name for link in chain)
    return found


rules_of_a_copy = st.one_of(
    st.none(), st.sampled_from(CHAINS).map(lambda chain: [{"match": "**", "codecs": chain}])
)


@given(state=states, setting=settings_of_a_save, rules=rules_of_a_copy)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree_re_encoded_is_bit_identical(workers, state, setting, rules):
    source, target = memory(), memory()
    save_to(source, state, setting)
    encode(source, target, workers, rules=rules)
    assert described(target) == described(source)
    if rules is None:
        assert codecs(target) == codecs(source)
    with Checkpointer(target) as ckpt:
        assert same(ckpt.load(), plain(state))
        assert ckpt.verify().ok


@given(state=states, setting=settings_of_a_save, rules=rules_of_a_copy, data=st.data())
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_copied_part_of_any_tree_equals_loading_it(workers, state, setting, rules, data):
    source, target = memory(), memory()
    save_to(source, state, setting)
    paths = sorted(path for path, _ in objects(state))
    chosen = [escaped(p) for p in data.draw(st.sets(st.sampled_from(paths), min_size=1))]
    which = {data.draw(st.sampled_from(["include", "exclude"])): chosen}
    kept = [path for path, _ in objects(state) if Selection(**which).selects(path)]
    if not kept:
        with pytest.raises(SelectionError, match="is selected"):
            encode(source, target, workers, rules=rules, **which)
        return
    encode(source, target, workers, rules=rules, **which)
    with Checkpointer(source) as original, Checkpointer(target) as copied:
        assert same(copied.load(), original.load(**which))
        assert [o.path for o in copied.open().objects()] == kept


@given(state=states, setting=settings_of_a_save)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree_copied_verbatim_is_bit_identical(workers, state, setting):
    source, target = memory(), memory()
    save_to(source, state, setting)
    record = Catalog(source).record(1)
    CheckpointCopy(source, target, record, workers=workers, grace_s=GRACE_S).run()
    with Checkpointer(target) as ckpt:
        assert same(ckpt.load(), plain(state))
        assert ckpt.verify().ok


class Net(torch.nn.Module):
    """Its output layer is tied to its embedding."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(50, 30)
        self.norm = torch.nn.BatchNorm1d(30)
        self.head = torch.nn.Linear(30, 50, bias=False)
        self.head.weight = self.embed.weight


def job(seed):
    net = Net(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3 * (seed + 1))
    for _ in range(2):
        net.head(net.norm(net.embed(torch.arange(50)))).square().sum().backward()
        optimizer.step()
    return {
        "model": net,
        "optimizer": optimizer,
        "nested": [{"a": torch.ones(3)}, ()],
        "epoch": seed,
    }


RULES = [
    {"match": "optimizer/**", "codecs": ["zstd"]},
    {"match": "model/**", "codecs": ["lz4", "zstd"]},
]


@pytest.mark.parametrize("rules", [None, [], RULES], ids=["kept", "raw", "rules"])
def test_live_objects_restore_equally_from_a_copy(workers, rules):
    source, target, first, second = memory(), memory(), job(1), job(2)
    with checkpointer(source, rules=RULES[:1]) as ckpt:
        ckpt.save(first, step=1, mode="blocking", metadata={"loss": 0.5})
    encode(source, target, workers, rules=rules)
    with Checkpointer(target) as ckpt:
        report = ckpt.restore(second)
    assert report.missing == report.unexpected == ()
    assert same(dict(first["model"].state_dict()), dict(second["model"].state_dict()))
    assert same(first["optimizer"].state_dict(), second["optimizer"].state_dict())
    assert second["epoch"] == 1
    assert Checkpoint.open(target, 1).info.metadata == {"loss": 0.5}
    names = {path: chain for path, chain in codecs(target).items() if path[0] == "optimizer"}
    assert set(names.values()) == {("zstd",)} if rules != [] else {()}


def test_an_object_tied_to_an_excluded_one_is_stored(workers):
    source, target = memory(), memory()
    with checkpointer(source) as ckpt:
        ckpt.save(job(1), step=1, mode="blocking")
        original = ckpt.load()
    encode(source, target, workers, include="model/head.weight")
    (record,) = Checkpoint.open(target, 1).objects()
    assert record.same_as is None
    with Checkpointer(target) as ckpt:
        assert same(ckpt.load()["model"]["head.weight"], original["model"]["embed.weight"])


@pytest.mark.parametrize("staging_bytes", [0, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_state_larger_than_the_buffers_is_copied(workers, staging_bytes):
    state = {"big": torch.randn(600, 1000), "small": [torch.randn(40) for _ in range(300)]}
    source, target = memory(), memory()
    with checkpointer(source) as ckpt:
        ckpt.save(state, step=1, mode="blocking")
    how = Reencoding(
        config=load_config({"backend": target, **SMALL, "staging_bytes": staging_bytes}),
        selection=Selection(),
    )
    checkpoint = Checkpoint.open(source, 1, loader=Loader(source, workers))
    copy_objects(checkpoint, target, how, registry=default_registry(), workers=workers)
    with checkpointer(target) as ckpt:
        assert same(ckpt.load(), state)


# -- processes that end ---------------------------------------------------------------------------

COPY = """
import sys
from penstock.core.catalog.catalog import Catalog
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.storage.open import open_backend
from penstock.testing.faults import EFFECTS, CrashAt
from penstock.core.concurrency.workers import Workers
source, target = open_backend(sys.argv[1]), open_backend(sys.argv[2])
crash = CrashAt(target, int(sys.argv[3]), kill=True, operations=EFFECTS)
CheckpointCopy(source, crash, Catalog(source).record(1), workers=Workers(1), grace_s=9e9).run()
"""


@pytest.mark.slow
def test_copy_resumes_after_its_process_is_killed(workers, tmp_path):
    source, state = f"posix://{tmp_path}/one?direct_io=off", make_state(5)
    with checkpointer(source, rules=[{"match": "table", "codecs": ["zstd"]}]) as ckpt:
        ckpt.save(state, step=1, mode="blocking")
    kept = 0
    for n in count(2, 3):
        target = f"posix://{tmp_path}/{n}?direct_io=off"
        done = interpreters.run("-c", COPY, source, target, n)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        with checkpointer(source) as one, checkpointer(target) as other:
            assert not other.steps() or other.verify().ok
            record = Catalog(one._backend).record(1)
            copy = CheckpointCopy(
                one._backend, other._backend, record, workers=workers, grace_s=GRACE_S
            )
            kept += copy.run().bytes_kept > 0
            assert same(other.load(), state)
    assert n > len(EFFECTS)
    assert kept


def test_selecting_nothing_is_refused(workers):
    source = memory()
    with checkpointer(source) as ckpt:
        ckpt.save(make_state(1), step=1, mode="blocking")
    with pytest.raises(SelectionError, match="nothing of step 1 is selected"):
        encode(source, memory(), workers, exclude="**")
