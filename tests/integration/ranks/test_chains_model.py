"""Chains of checkpoints by one process and by many ranks, under other operations."""

import random
from contextlib import closing

import pytest
from tests.integration.ranks.saving import Job
from tests.integration.ranks.test_deltas import (
    RULES,
    in_columns,
    in_rows,
    plain,
    replicas_of_rows,
    warm,
    weights,
)
from tests.integration.ranks.test_deltas_failures import Full, names
from tests.integration.support import blank, checkpointer, memory, same

from penstock.core.catalog.survey import survey_records
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.diff.checkpoints import diff_checkpoints

__all__ = ["warm"]  # the fixture compiles the codec

WAYS = [plain, in_rows, in_columns, replicas_of_rows]


def state_of(way, step, rank, count):
    """Some of it changes, some never does, and some weights are rounded masters."""
    state = way(step, rank, count)
    state["master"] = {"moves": weights(step)["model"]["large"][:, :60].clone()}
    state["half"] = {"moves": state["master"]["moves"].bfloat16()}
    state["frozen"] = weights(0)["model"]["odd"]
    return state


def whole(step):
    return state_of(plain, step, 0, 1)


def check(store, steps):
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == sorted(steps)
        for step in steps:
            assert same(ckpt.load(step), whole(step)), step
            report = ckpt.verify(step)
            assert report.ok, report.damaged


class Run:
    """A run, and its expected steps; each action is drawn by `random`."""

    def __init__(self, drawn):
        self.drawn = drawn
        self.store = memory()
        self.steps = []
        self.next = 0

    def options(self):
        deltas = {"every": self.drawn.choice([2, 4, 9]), "max_chain": self.drawn.choice([1, 3, 8])}
        return {
            "rules": self.drawn.choice([RULES, [{"match": "model/**", "codecs": ["zstd"]}], []]),
            "share": self.drawn.random() < 0.6,
            "deltas": {**deltas, "memory_bytes": self.drawn.choice([None, 0])},
        }

    def save(self):
        count = self.drawn.choice([1, 1, 2, 2, 3, 4])
        numbers = range(self.next, self.next + self.drawn.randint(1, 3))
        self.next = numbers.stop
        if count == 1:
            with checkpointer(self.store, **self.options()) as ckpt:
                for step in numbers:
                    ckpt.save(whole(step), step, mode="blocking")
        else:
            ways = WAYS if count in {2, 4} else WAYS[:3]
            way = self.drawn.choice(ways)
            mode = self.drawn.choice(["blocking", "async"])

            def work(ckpt, rank):
                return [
                    ckpt.save(state_of(way, step, rank, count), step, mode=mode).result(300).step
                    for step in numbers
                ]

            job = Job(count, self.store, **self.options())
            assert job.run(work) == [list(numbers)] * count
        self.steps += numbers

    def fail(self):
        victim, before = self.drawn.randrange(2), names(self.store)
        job = Job(2, lambda r: Full(self.store) if r == victim else self.store, **self.options())
        way = self.drawn.choice([in_rows, in_columns])  # each rank has something to write
        for error in job.save(lambda rank: state_of(way, self.next, rank, 2), self.next):
            assert isinstance(error, Exception)
        assert names(self.store) == before

    def delete(self):
        if len(self.steps) > 1:
            step = self.steps.pop(self.drawn.randrange(len(self.steps)))
            with checkpointer(self.store) as ckpt:
                ckpt.delete(step)

    def rewind(self):
        if len(self.steps) > 1:
            step = self.drawn.choice(self.steps)
            with checkpointer(self.store) as ckpt:
                ckpt.rewind(step)
            self.steps = [other for other in self.steps if other <= step]

    def prune(self):
        with checkpointer(self.store) as ckpt:
            ckpt._catalog.prune(grace_s=0)

    def compact(self):
        with checkpointer(self.store) as ckpt:
            ckpt.compact()

    def restore(self):
        if self.steps:
            step, count = self.drawn.choice(self.steps), self.drawn.choice([2, 3])
            targets = [blank(whole(step)) for _ in range(count)]
            job = Job(count, self.store)
            assert job.run(lambda ckpt, rank: ckpt.restore(targets[rank], step).step) == (
                [step] * count
            )
            assert all(same(target, whole(step)) for target in targets)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, *range(2, 8)))]
)
def test_every_checkpoint_restores_after_any_operations(seed):
    run = Run(random.Random(seed))
    others = [run.fail, run.delete, run.rewind, run.prune, run.compact, run.restore]
    for number in range(12):
        action = run.drawn.choice([run.save] * 6 + others) if number else run.save
        action()
    check(run.store, run.steps)
    needed = survey_records(run.store).used
    run.prune()
    assert {name.split("/")[1] for name in names(run.store)} == needed


def test_a_chain_of_ranks_is_copied_compacted_and_compared_like_any_other():
    store, target = memory(), memory()
    job = Job(2, store, rules=RULES, share=True)

    def work(ckpt, rank):
        for step in range(4):
            ckpt.save(state_of(in_rows, step, rank, 2), step).result(300)

    assert job.run(work) == [None, None]
    with checkpointer(store) as ckpt, closing(Workers(2)) as workers:
        record = ckpt._catalog.record(3)
        assert len(record.references) == 3
        CheckpointCopy(store, target, record, workers=workers, grace_s=3600).run()
        with checkpointer(target) as copied:
            assert diff_checkpoints(ckpt.open(3), copied.open(3)).same
            assert not diff_checkpoints(ckpt.open(3), ckpt.open(2)).same
    check(target, [3])
    with checkpointer(target, rules=RULES, share=True) as ckpt:
        ckpt.save(whole(4), 4, mode="blocking")
    check(target, [3, 4])
    with checkpointer(store) as ckpt:
        for step in range(3):
            ckpt.delete(step)
        ckpt.compact()
        assert not ckpt._catalog.record(3).references
    assert len({name.split("/")[1] for name in names(store)}) == 1
    check(store, [3])
