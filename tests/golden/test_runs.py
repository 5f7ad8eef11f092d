"""Once stored, runs are readable forever, and continue.

Each is in the folder of the release that wrote it. PENSTOCK_REWRITE_GOLDEN=1 writes missing runs.
Existing ones never change, since users have such runs; a format change needs a new folder.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.golden.runs import RUNS, blank_of_rank, of_rank
from tests.integration.ranks.saving import Job
from tests.integration.support import bits, leaves, same

import penstock
from penstock.core.format.commit_record import unseal
from penstock.core.format.features import FORMAT_VERSION
from penstock.core.storage.open import open_backend
from penstock.testing.golden import rewriting

GOLDEN = Path(__file__).parent / f"format-{FORMAT_VERSION}"
ALONE = [name for name in RUNS if not RUNS[name].ranks]


def digests(tree):
    return {path: hashlib.sha256(bits(leaf)).hexdigest() for path, leaf in leaves(tree)}


def stored(name):
    """The folder of a run."""
    return next(GOLDEN.glob(f"*/{name}"), GOLDEN / penstock.__version__ / name)


def copied(name, tmp_path):
    """A writable copy of a run."""
    run, root = RUNS[name], stored(name)
    if rewriting() and not root.exists():
        new = tmp_path / "new" / name
        run.write(new)
        if run.lossy:
            with run.opened(new) as ckpt:
                found = {step: digests(ckpt.load(step)) for step in run.left}
            root.parent.mkdir(parents=True, exist_ok=True)
            root.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        shutil.copytree(new, root)
    assert root.is_dir(), f"{root} is missing: write it with PENSTOCK_REWRITE_GOLDEN=1"
    return Path(shutil.copytree(root, tmp_path / name))


def plain(tree):
    """A state with modules, optimizers and generators replaced by their contents."""
    if isinstance(tree, torch.nn.Module | torch.optim.Optimizer):
        return plain(tree.state_dict())
    if isinstance(tree, random.Random):
        return tree.getstate()
    if isinstance(tree, np.random.Generator):
        return tree.bit_generator.state
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return tree


@pytest.mark.parametrize("name", RUNS)
def test_every_step_is_what_was_saved(name, tmp_path):
    run = RUNS[name]
    with run.opened(copied(name, tmp_path)) as ckpt:
        assert tuple(ckpt.steps()) == run.left
        for step in run.left:
            assert ckpt.verify(step).ok
            if run.lossy:
                wanted = json.loads(stored(name).with_suffix(".json").read_text())
                assert digests(ckpt.load(step)) == wanted[str(step)]
            elif run.ranks:
                assert same(ckpt.load(step), run.state(step))
            else:
                target = run.state(99)
                ckpt.restore(target, step)
                assert same(plain(target), plain(run.state(step)))


@pytest.mark.parametrize("name", RUNS)
def test_the_release_that_wrote_a_run_is_the_one_of_its_folder(name):
    records = list(stored(name).rglob("commits/*.json"))
    assert {unseal(path.read_bytes(), path.name)["penstock"] for path in records} == {
        stored(name).parent.name
    }


@pytest.mark.parametrize("name", ALONE)
def test_a_run_continues(name, tmp_path):
    run, root = RUNS[name], copied(name, tmp_path)
    step = run.left[-1] + 1
    with run.opened(root) as ckpt:
        report = ckpt.save(run.state(step), step, mode="blocking").result()
    if name in {"chain", "share", "derived"}:
        assert report.bytes_stored < 0.7 * report.bytes_raw
    with run.opened(root) as ckpt:
        steps = ckpt.steps()
        assert all(ckpt.verify(n).ok for n in steps)
        if name == "retention":
            kept = ckpt.info(steps[0])
            assert steps == [3, 4, 8, 9, 10]
            assert (kept.metadata, tuple(kept.tags)) == ({"loss": 0.5}, ("kept",))
        if not run.lossy:
            target = run.state(99)
            ckpt.restore(target, step)
            assert same(plain(target), plain(run.state(step)))


def test_ranks_get_what_each_had(tmp_path):
    store = open_backend(f"file://{copied('ranks', tmp_path)}")

    def restored(ckpt, rank):
        state = blank_of_rank(rank)
        ckpt.restore(state)
        return state

    for rank, state in enumerate(Job(4, store, writer_bytes=1).run(restored)):
        wanted = of_rank(rank)
        assert torch.equal(state["cut"].tensor, wanted["cut"].tensor)
        assert torch.equal(state["flat"].tensor, wanted["flat"].tensor)
        assert same(state["alike"], wanted["alike"])
        assert state["loader"].value == wanted["loader"].value
    store.close()


def test_each_way_of_storing_is_there(tmp_path):
    """Or a run would not test its chain, its shares, its second section."""
    with RUNS["chain"].opened(copied("chain", tmp_path)) as ckpt:
        assert [(b := ckpt._catalog.record(step).base) and b.step for step in (1, 2, 3, 4)] == [
            None,
            1,
            2,
            3,
        ]
    with RUNS["share"].opened(copied("share", tmp_path)) as ckpt:
        assert ckpt._catalog.record(3).references
    with RUNS["many_ranks"].opened(copied("many_ranks", tmp_path)) as ckpt:
        assert ckpt._catalog.record(2).many_parts
        assert ckpt._catalog.record(2).many_borrowed
    with RUNS["compacted"].opened(copied("compacted", tmp_path)) as ckpt:
        records = [ckpt._catalog.record(step) for step in (1, 2, 3)]
        assert [(r.generation, bool(r.compacts)) for r in records] == [
            (0, False),
            (1, True),
            (2, False),
        ]
    with RUNS["derived"].opened(copied("derived", tmp_path)) as ckpt:
        found = [o.path for o in ckpt.open(2).contents.objects() if o.derived]
        assert found == [("model", "a.weight"), ("model", "b.weight")]
    tiers = copied("tiers", tmp_path)
    assert [len(list((tiers / tier / "commits").glob("*"))) for tier in ("fast", "durable")] == [
        1,
        2,
    ]
