"""Runs with dependent checkpoints, used and damaged at will, against a plain dict."""

from __future__ import annotations

import copy
import functools
import hashlib
import random
from contextlib import closing

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.effort import examples
from tests.integration.atomic.crash_scenarios import DAY_S, check_no_garbage, mortal
from tests.integration.support import same

from penstock import Checkpointer, PenstockError
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.survey import survey_records
from penstock.core.concurrency.workers import Workers
from penstock.core.config.model import load_config
from penstock.core.copy import lease
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.reencode import Reencoding, copy_objects
from penstock.core.errors import DamagedError, StorageError
from penstock.core.plugins.registry import default_registry
from penstock.core.tree.select import Selection
from penstock.testing.faults import FaultyBackend
from penstock.testing.hasty import FAST
from penstock.testing.powercut import Disk, PowerCut

# A process without power ends all of its threads.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

# So small that 50 KB of state have slabs, and chunks of several blocks.
OPTIONS = {"chunk_bytes": 8192, "block_bytes": 4096, "workers": 2}
CODECS = [["delta", "zstd"], ["delta", "floatsplit"], ["delta"]]

picks = st.integers(0, 7)
modes = st.sampled_from(["blocking", "async"])
shapes = st.sampled_from([0, 0, 0, 1])
powers = st.none() | st.integers(0, 1 << 30)


@functools.cache
def state(number, shape=0):
    """A state whose tensors differ a little between numbers; one has two shapes."""
    chance = torch.Generator().manual_seed(5)

    def tensor(*sizes):
        start = torch.randn(sizes, generator=chance)
        return start + 1e-6 * number * torch.randn(sizes, generator=chance)

    tree = {
        "model": {
            "large": tensor(60, 70),
            "half": tensor(3000).bfloat16(),
            **{f"small{n}": tensor(20, 5) for n in range(4)},
        },
        "plain": tensor(1500),
        "still": {"frozen": torch.arange(2100.0), "often": torch.arange(1100.0) + number // 3},
        "number": number,
    }
    tree["model"]["odd"] = tensor(31 + shape, 77)
    return tree


def number_of(tree):
    """The state number of a loaded tree."""
    return tree["number"], tree["model"]["odd"].shape[0] - 31


class Chains(RuleBasedStateMachine):
    """`run` is the required content: step -> number and shape of its state.

    No rule has a precondition: the number of effects of a save depends on threads, so the time of
    deaths does, too, and hypothesis would have to find the same rules enabled again.
    """

    @initialize(
        codecs=st.sampled_from(CODECS),
        every=st.sampled_from([2, 3, 9]),
        max_chain=st.sampled_from([1, 2, 9]),
        memory=st.sampled_from([None, 0]),
        share=st.booleans(),
        retention=st.sampled_from([None, None, {"keep_last": 1}, {"keep_last": 2}]),
        tiered=st.booleans(),
    )
    def start(self, *, codecs, every, max_chain, memory, share, retention, tiered):
        self.options = {
            **OPTIONS,
            "rules": [
                {"match": ["plain", "still/often"], "codecs": []},
                {"match": "**", "codecs": codecs},
            ],
            "deltas": {"every": every, "max_chain": max_chain, "memory_bytes": memory},
            "share": share,
            "retention": retention,
        }
        self.disks = [Disk(), Disk()] if tiered else [Disk()]
        self.elsewhere = Disk()
        self.run = {}
        self.copied = {}  # the required content elsewhere, whatever happens to the run
        self.number = 0
        self.checked = {}
        self.open()

    def open(self):
        self.faulty = [FaultyBackend(PowerCut(disk)) for disk in self.disks]
        self.ckpt = Checkpointer(self.backend(self.faulty), **self.options)

    def backend(self, places):
        if len(places) == 1:
            return places[0]
        config = TieredConfig(fast="memory://", durable="memory://", keep_fast=2)
        return TieredBackend(config, fast=places[0], durable=places[1])

    def another(self, **options):
        """A checkpointer of another process."""
        places = [PowerCut(disk) for disk in self.disks]
        return Checkpointer(self.backend(places), **{**self.options, **options})

    def close(self):
        with mortal():
            self.ckpt.close()

    def pick(self, number):
        return sorted(self.run)[number % len(self.run)] if self.run else None

    def next_step(self, skipped=0):
        return max(self.run, default=-1) + 1 + skipped

    # -- completed actions ----------------------------------------------------------------------

    @rule(mode=modes, shape=shapes, skipped=st.integers(0, 1))
    def save(self, mode, shape, skipped):
        self.do_save(self.ckpt, self.next_step(skipped), shape, mode=mode)

    @rule(mode=modes, shape=shapes)
    def save_twice(self, mode, shape):
        for _ in range(2):
            self.do_save(self.ckpt, self.next_step(), shape, mode=mode)

    @rule(mode=modes, shape=shapes, pick=picks)
    def overwrite(self, mode, shape, pick):
        step = self.pick(pick)
        if step is not None:
            self.do_save(self.ckpt, step, shape, mode=mode, overwrite=True)

    @rule(shape=shapes)
    def save_by_another(self, shape):
        with self.another() as other:
            self.do_save(other, self.next_step(), shape, mode="blocking")

    def do_save(self, ckpt, step, shape, **options):
        self.number += 1
        ckpt.save(state(self.number, shape), step, **options).result(300)
        self.settle(ckpt)
        self.found_after({**self.run, step: (self.number, shape)}, since=step)

    @rule(
        fault=st.sampled_from(
            [("write", ".enc"), ("seal", ".enc"), ("publish", "parts/"), ("publish", "commits/")]
        ),
        mode=modes,
        late=st.booleans(),
    )
    def save_that_fails(self, fault, mode, late):
        self.faulty[0].fail(fault[0], StorageError("simulated"), match=fault[1], late=late)
        step = self.next_step()
        self.number += 1
        try:
            self.ckpt.save(state(self.number), step, mode=mode).result()
        except PenstockError:
            self.settle(self.ckpt, failed=True)
        else:
            self.settle(self.ckpt)
            self.run = {**self.run, step: (self.number, 0)}
        for faulty in self.faulty:
            faulty.clear()
        self.found_after(self.run, since=step)

    @rule(pick=picks)
    def delete(self, pick):
        if self.run:
            step = self.pick(pick)
            self.ckpt.delete(step)
            del self.run[step]

    @rule(pick=picks)
    def rewind(self, pick):
        if self.run:
            step = self.pick(pick)
            self.ckpt.rewind(step)
            self.run = {s: n for s, n in self.run.items() if s <= step}

    @rule(pick=picks, flat=st.booleans())
    def copy(self, pick, flat):
        """To another root: with the borrowed blobs of the step, or stored whole."""
        if self.run:
            step = self.pick(pick)
            self.make_way(step)
            self.copy_to(PowerCut(self.elsewhere), step, flat=flat)
            self.copied[step] = self.run[step]

    def make_way(self, step):
        if step in self.copied:
            Catalog(PowerCut(self.elsewhere)).delete(step)
            del self.copied[step]

    def copy_to(self, target, step, *, flat):
        with closing(Workers(2)) as workers, self.another(retention=None) as source:
            if flat:
                checkpoint = source.open(step)
                config = load_config({"backend": target, **OPTIONS})
                how = Reencoding(config=config, selection=Selection(), keep_codecs=True)
                registry = default_registry()
                copy_objects(checkpoint, target, how, registry=registry, workers=workers)
            else:
                store, record = source._backend, source._catalog.record(step)
                CheckpointCopy(store, target, record, workers=workers, grace_s=DAY_S).run()

    @rule(pick=picks)
    def delete_copy(self, pick):
        if self.copied:
            self.make_way(sorted(self.copied)[pick % len(self.copied)])

    @rule(age_s=st.sampled_from([0, 2 * DAY_S]))
    def prune(self, age_s):
        for disk in self.disks:
            disk.advance(age_s)
        self.ckpt.prune()
        if age_s:
            with self.another() as other:  # each process keeps its own last save
                assert not other.prune(everything=True).refused
            for disk in self.disks:
                store = PowerCut(disk)
                check_no_garbage(store, steps=len(survey_records(store).records))

    @rule()
    def open_again(self):
        self.close()
        self.open()

    @rule(pick=picks)
    def restore(self, pick):
        if self.run:
            step = self.pick(pick)
            target = copy.deepcopy(state(0, self.run[step][1]))
            self.ckpt.restore(target, step)
            assert same(target, state(*self.run[step]))

    @rule(seed=st.integers(0, 1 << 30), saved=st.booleans())
    def damage(self, seed, saved):
        """One byte of one blob: found by its readers, and none of them returns it."""
        chance = random.Random(seed)
        disk = chance.choice(self.disks)
        blobs = [b for b in disk.listed("data/") if "/blobs/" in b.name and b.size_bytes]
        if not blobs:
            return
        blob = chance.choice(blobs)
        file = disk.find(blob.name)
        good, bad = file.data, bytearray(file.data)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        file.data = bytes(bad)
        with Checkpointer(PowerCut(disk), **OPTIONS) as alone:
            for step in alone.steps():
                try:
                    tree = alone.load(step)
                except DamagedError:
                    assert not alone.verify(step).ok
                    record = alone._catalog.record(step)
                    named = {record.uid, *record.references}
                    assert blob.name.split("/")[1] in named
                else:
                    assert same(tree, state(*number_of(tree)))
        if saved and len(self.disks) == 1:
            self.number += 1
            step = self.next_step()
            options = {"deltas": {"memory_bytes": 0}, "share": False, "retention": None}
            with self.another(**options) as other:
                other.save(state(self.number), step, mode="blocking")
                # Bases are read, so the damage was found, or was harmless.
                assert same(other.load(step), state(self.number))
            self.run = {**self.run, step: (self.number, 0)}
        file.data = good

    # -- interrupted actions --------------------------------------------------------------------

    @rule(mode=modes, effect=st.integers(1, 14), power=powers, slower=st.booleans())
    def die_in_save(self, mode, effect, power, slower):
        self.die_saving(self.next_step(), effect, power, slower, mode=mode)

    @rule(mode=modes, pick=picks, effect=st.integers(1, 16), power=powers)
    def die_in_overwrite(self, mode, pick, effect, power):
        if self.run:
            self.die_saving(self.pick(pick), effect, power, slower=False, mode=mode, overwrite=True)

    def die_saving(self, step, effect, power, slower, **options):
        self.number += 1
        number, promised = self.number, []

        def act():
            handle = self.ckpt.save(state(number), step, **options)
            handle.committed.result()
            promised.append(step)
            self.settle(self.ckpt)

        self.die_during(act, effect, power, slower)
        found = self.numbers()
        run = dict(self.run)
        if found.get(step, run.get(step)) != run.get(step) or promised:
            run[step] = (number, 0)
        self.found_after(run, since=step)

    @rule(pick=picks, effect=st.integers(1, 4), power=powers)
    def die_in_delete(self, pick, effect, power):
        if self.run:
            step = self.pick(pick)
            self.die_during(lambda: self.ckpt.delete(step), effect, power)
            self.found_after(self.run, may_go={step})

    @rule(pick=picks, effect=st.integers(1, 6), power=powers)
    def die_in_rewind(self, pick, effect, power):
        if self.run:
            step = self.pick(pick)
            self.die_during(lambda: self.ckpt.rewind(step), effect, power)
            self.found_after(self.run, may_go={s for s in self.run if s > step})

    @rule(pick=picks, effect=st.integers(1, 12), power=powers, deleting=st.booleans())
    def die_in_copy(self, pick, effect, power, deleting):
        if not self.run:
            return
        step = self.pick(pick)
        if not deleting:
            self.make_way(step)
        target = PowerCut(self.elsewhere)
        self.elsewhere.cut_in(effect)
        with mortal():
            if deleting and self.copied:
                Catalog(target).delete(sorted(self.copied)[pick % len(self.copied)])
            self.copy_to(target, step, flat=False)
        self.elsewhere.cut_in(None)
        lease._held.clear()  # a process that died holds no lease
        dead = self.elsewhere
        self.elsewhere = dead.copy() if power is None else dead.cut(random.Random(power))
        may = {**self.copied, step: self.run[step]}
        with Checkpointer(PowerCut(self.elsewhere), **OPTIONS) as alone:
            found = {s: number_of(alone.load(s)) for s in alone.steps()}
        assert found.items() <= may.items() | self.copied.items()
        assert deleting or self.copied.items() <= found.items()
        self.copied = found

    @rule(effect=st.integers(1, 6), power=powers)
    def die_in_prune(self, effect, power):
        for disk in self.disks:
            disk.advance(2 * DAY_S)
        self.die_during(self.ckpt.prune, effect, power)

    def die_during(self, act, effect, power, slower=False):
        dying = self.disks[-1 if slower else 0]
        dying.cut_in(effect)
        with mortal():
            act()
        dying.cut_in(None)
        dead = self.disks
        if power is None:
            left = [disk.copy() for disk in dead]
        else:
            chance = random.Random(power)
            left = [d.cut(chance) if d is dying else d.copy() for d in dead]
        self.close()
        self.disks = left
        self.open()

    def settle(self, ckpt, *, failed=False):
        try:
            ckpt.wait()
        except PenstockError:
            assert failed
        if ckpt._saver.job is not None:
            ckpt._saver.job.released.wait()
        if ckpt._drains is not None:
            ckpt._drains.settle(300)  # and retention after it

    # -- checks ---------------------------------------------------------------------------------

    def numbers(self):
        """Number and shape of the state of each step, as another process sees it."""
        with self.another(retention=None) as other:
            found = {}
            for step in other.steps():
                found[step] = number_of(other.load(step))
            return found

    def found_after(self, run, *, since=None, may_go=()):
        """Adopt the remains of `run`: retention and dead processes may have deleted the rest."""
        found = self.numbers()
        keep = self.options["retention"]
        if keep is not None and since is not None:
            newest = sorted(run)[-keep["keep_last"] :]
            may_go = {*may_go, *run} - {*newest, since}
        gone = run.keys() - found.keys()
        assert gone <= {*may_go}, (gone, may_go)
        assert found == {step: run[step] for step in found}
        self.run = found

    @invariant()
    def holds_what_it_should(self):
        if not hasattr(self, "ckpt"):
            return
        assert self.ckpt.steps() == sorted(self.run)
        for disk in self.disks:
            self.look_at(disk, self.run if len(self.disks) == 1 else None)
        assert Catalog(PowerCut(self.elsewhere)).steps() == sorted(self.copied)
        self.look_at(self.elsewhere, self.copied)

    def look_at(self, disk, run):
        """Each place separately: all listed steps exist, bit for bit."""
        with Checkpointer(PowerCut(disk), **OPTIONS) as alone:
            for step in alone.steps():
                stored = self.all_stored_data(disk, alone._catalog.record(step))
                if stored not in self.checked:
                    report = alone.verify(step)
                    assert report.ok, report.damaged
                    tree = alone.load(step)
                    assert same(tree, state(*number_of(tree)))
                    self.checked[stored] = number_of(tree)
                if run is not None:
                    assert self.checked[stored] == run[step]

    def all_stored_data(self, disk, record):
        digest = hashlib.sha256(repr(record).encode())
        for uid in sorted({record.uid, *record.references}):
            for blob in disk.listed(f"data/{uid}/"):
                if "intent" not in blob.name and "lease" not in blob.name:
                    digest.update(blob.name.encode() + disk.find(blob.name).data)
        return digest.digest()

    def teardown(self):
        if not hasattr(self, "ckpt"):
            return
        try:
            assert self.numbers() == self.run
            for step in sorted(self.run):
                self.ckpt.delete(step)
                self.run = self.numbers()
            self.close()
            for disk in self.disks:
                disk.advance(2 * DAY_S)
            with self.another() as other:
                other.prune(everything=True)
            for step in sorted(self.copied):
                self.make_way(step)
            self.elsewhere.advance(2 * DAY_S)
            Catalog(PowerCut(self.elsewhere)).prune(everything=True)
            left = [b.name for disk in (*self.disks, self.elsewhere) for b in disk.listed("")]
            assert {*left} <= {"tier/root.json"}
        finally:
            self.close()


def explore(count, steps, **options):
    run_state_machine_as_test(
        Chains,
        settings=settings(
            deadline=None, max_examples=examples(count), stateful_step_count=steps, **options
        ),
    )


@pytest.fixture(autouse=True)
def hasty(waits):
    waits(FAST, drain_failing_s=0.1)


def test_chains_match_a_dict_after_any_death():
    explore(3, 12, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_chains_match_a_dict_in_long_runs():
    explore(150, 30, derandomize=False)
