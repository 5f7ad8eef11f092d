"""Actions on a run that may crash, and the allowed states after that."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from tests.integration.support import leaves
from torch import nn

from penstock import Checkpointer, PenstockError
from penstock.core.catalog.survey import survey_records
from penstock.core.format.records import blob_uid, data_uid, notes_origin, parse_commit_name
from penstock.testing.faults import EFFECTS, CrashAt, FaultyBackend, SimulatedCrashError
from penstock.testing.powercut import Disk, PowerCut

# So small that 30 KB of state have slabs, and raw and encoded chunks of several blocks.
OPTIONS = {"chunk_bytes": 8192, "block_bytes": 4096, "workers": 1}
RAW = {}
ENCODED = {"rules": [{"match": "**", "codecs": ["zstd"]}]}
BOTH = {"rules": [{"match": "optimizer/**", "codecs": ["zstd"]}]}
CHAINED = {"rules": [{"match": "optimizer/**", "codecs": ["delta", "zstd"]}]}
DAY_S = 86400.0
SAVED = 9  # the step saved to continue


@functools.cache
def pattern(*shape):
    """The content of tensors besides their number: without it no delta would be worth storing."""
    chance = torch.Generator().manual_seed(math.prod(shape))
    return torch.randint(1 << 15, 1 << 16, shape, generator=chance).float()


def carries(tensor, number):
    """Whether all of a tensor carries this number."""
    return bool((tensor == pattern(*tensor.shape) + number).all())


class Job:
    """A job in which every tensor, and a value, carry one number."""

    def __init__(self, number=0):
        self.model = nn.Linear(50, 60)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.train()
        self.state = {"model": self.model, "optimizer": self.optimizer, "number": 0}
        self.fill(number)

    def train(self):
        self.model(torch.ones(1, 50)).sum().backward()
        self.optimizer.step()

    def tensors(self):
        moments = [t for of in self.optimizer.state.values() for t in of.values()]
        return [*self.model.state_dict().values(), *moments]

    def fill(self, number):
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.copy_(pattern(*tensor.shape) + number)
        self.state["number"] = number

    def number(self):
        """Its number; torn states have several."""
        return only_number({"tensors": dict(enumerate(self.tensors())), **self.state})


def only_number(tree):
    """The number that all of a tree carries."""
    number = tree["number"]
    for path, leaf in leaves(tree):
        if isinstance(leaf, torch.Tensor):
            assert carries(leaf, number), f"{path} is torn: not all of it is {number}"
    return number


@functools.cache
def job():
    """One for all: creating optimizers is slow. Fill it before use."""
    return Job()


def save(ckpt, step, number, **options):
    """Save `number`, change everything at once, and wait for the end."""
    its = job()
    its.fill(number)
    handle = ckpt.save(its.state, step, **options)
    its.train()  # the step fences what is lazy
    its.fill(-1)
    return handle.result()


def opened(backend, **options):
    return Checkpointer(backend, **OPTIONS, **options)


@contextmanager
def mortal():
    """A user of a store without power dies, threads silently; all have ended then."""
    report = threading.excepthook

    def unless_dead(args):
        if not issubclass(args.exc_type, SimulatedCrashError):
            report(args)

    threading.excepthook = unless_dead
    try:
        with suppress(SimulatedCrashError, PenstockError):
            yield
    finally:
        for thread in threading.enumerate():
            if thread.name in {"penstock-save", "penstock-capture"}:
                thread.join()
        threading.excepthook = report


# -- scenarios -------------------------------------------------------------------------------------


def three_steps(disk, **options):
    with opened(PowerCut(disk), **(options or BOTH)) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, step, mode="blocking")
        ckpt.annotate(2, {"mark": 2})


def three_links(disk):
    """Steps 2 and 3 are each encoded against the one before."""
    three_steps(disk, **CHAINED)
    with opened(PowerCut(disk)) as ckpt:
        assert [len(ckpt._catalog.record(step).references) for step in (1, 2, 3)] == [0, 1, 2]


def two_links(disk):
    """The process died after it deleted the record of step 1, the base of the others."""
    three_links(disk)
    dying = CrashAt(PowerCut(disk), 1, after=True, operations=["delete"])
    with mortal(), opened(dying) as ckpt:
        ckpt.delete(1)
    assert len(PowerCut(disk).list("commits/")) == 2


@dataclass
class Scenario:
    """An action on a run.

    Attributes:
        act: Does it; calls its second argument with the index of the reached `end`.
        ends: What the run may hold, step -> number, from before to after.
        prepare: Creates the run on an empty disk.
        options: Options of the acting checkpointer.
        wrap: Wraps the store that may die.
    """

    name: str
    act: Callable
    ends: list[dict[int, int]]
    prepare: Callable = field(default=three_steps)
    options: dict = field(default_factory=dict)
    wrap: Callable = field(default=lambda backend: backend)

    def prepared(self):
        disk = Disk()
        self.prepare(disk)
        return disk.copy()

    def run(self, backend):
        """Do it, dying if the store does; the index of the end promised by then."""
        reached = [0]
        with mortal(), opened(self.wrap(backend), **self.options) as ckpt:
            self.act(ckpt, reached.append)
            ckpt.wait()
            if ckpt._saver.job is not None:
                ckpt._saver.job.released.wait()  # work after the commit is over, too
        return max(reached)


def half_overwritten(disk):
    """The process died between the commit of an overwrite, and the delete of what it replaced."""
    three_steps(disk)
    dying = CrashAt(PowerCut(disk), 1, operations=["delete"])
    with mortal(), opened(dying, **BOTH) as ckpt:
        save(ckpt, 3, 30, mode="blocking", overwrite=True)
        ckpt._saver.job.released.wait()
    assert len(PowerCut(disk).list("commits/")) == 4


def littered(disk):
    """The same, with leftovers of two saves of a dead process."""
    half_overwritten(disk)
    for effect in (4, 7):
        with mortal(), opened(CrashAt(PowerCut(disk), effect, operations=EFFECTS), **BOTH) as ckpt:
            save(ckpt, 4, 4, mode="blocking")
    disk.advance(2 * DAY_S)


def saving(mode, **options):
    def act(ckpt, reached):
        save(ckpt, 4, 4, mode=mode, **options)
        reached(1)

    return act


def overwriting(ckpt, reached, *, step=3):
    save(ckpt, step, 10 * step, overwrite=True)
    reached(1)


def failing(backend, *, operation, match):
    faulty = FaultyBackend(backend)
    faulty.fail(operation, match=match)
    return faulty


BEFORE = {1: 1, 2: 2, 3: 3}
AFTER = {**BEFORE, 4: 4}
TWO_GENERATIONS = {**BEFORE, 3: 30}


def without(run, *steps):
    return {step: number for step, number in run.items() if step not in steps}


SCENARIOS = [
    *(
        Scenario(f"save {mode} {kind}", saving(mode), [BEFORE, AFTER], options=rules)
        for mode in ("blocking", "async", "lazy")
        for kind, rules in (("raw", RAW), ("encoded", ENCODED), ("both", BOTH))
    ),
    Scenario("first save", saving("async"), [{}, {4: 4}], prepare=lambda disk: None, options=BOTH),
    Scenario("overwrite the latest", overwriting, [BEFORE, TWO_GENERATIONS], options=BOTH),
    Scenario(
        "overwrite an older one",
        partial(overwriting, step=2),
        [BEFORE, {**BEFORE, 2: 20}],
        options=BOTH,
    ),
    Scenario(
        "overwrite again",
        lambda ckpt, reached: save(ckpt, 3, 300, overwrite=True) and reached(1),
        [TWO_GENERATIONS, {**BEFORE, 3: 300}],
        prepare=half_overwritten,
    ),
    Scenario(
        "retention",  # an earlier process's unfinished work goes first
        lambda ckpt, reached: save(ckpt, 4, 4, mode="async") and reached(2),
        [BEFORE, without(BEFORE, 1), without(AFTER, 1), without(AFTER, 1, 2)],
        options={"retention": {"keep_last": 2}},
    ),
    Scenario("delete", lambda ckpt, _: ckpt.delete(2), [BEFORE, without(BEFORE, 2)]),
    Scenario(
        "delete two generations",
        lambda ckpt, _: ckpt.delete(3),
        [TWO_GENERATIONS, without(BEFORE, 3)],
        prepare=half_overwritten,
    ),
    Scenario(
        "rewind",
        lambda ckpt, _: ckpt.rewind(1),
        [BEFORE, without(BEFORE, 3), without(BEFORE, 2, 3)],
    ),
    Scenario(
        "rewind two generations",
        lambda ckpt, _: ckpt.rewind(2),
        [TWO_GENERATIONS, without(BEFORE, 3)],
        prepare=half_overwritten,
    ),
    *(
        Scenario(
            f"save that fails to {operation}",
            saving("async"),
            [BEFORE, BEFORE],  # it cleans up before it has sealed, and leaves all to prune after
            options=BOTH,
            wrap=partial(failing, operation=operation, match=match),
        )
        for operation, match in (("write", ".enc"), ("seal", ".raw"), ("publish", "/index"))
    ),
    *(
        Scenario(f"{name} of a chain", act, ends, prepare=prepare, options={**CHAINED, **options})
        for name, act, ends, prepare, options in (
            ("save", saving("async"), [BEFORE, AFTER], three_links, {}),
            ("overwrite", overwriting, [BEFORE, TWO_GENERATIONS], three_links, {}),
            (
                "retention",
                lambda ckpt, reached: save(ckpt, 4, 4, mode="async") and reached(2),
                [{2: 2, 3: 3}, {3: 3}, {3: 3, 4: 4}, {4: 4}],
                two_links,
                {"retention": {"keep_last": 1}},
            ),
            (
                "delete",
                lambda ckpt, _: ckpt.delete(2),
                [BEFORE, without(BEFORE, 2)],
                three_links,
                {},
            ),
            (
                "rewind",
                lambda ckpt, _: ckpt.rewind(1),
                [BEFORE, without(BEFORE, 3), {1: 1}],
                three_links,
                {},
            ),
            (
                "end",
                lambda ckpt, _: [ckpt.delete(step) for step in (2, 3)],
                [{2: 2, 3: 3}, {3: 3}, {}],
                two_links,
                {},
            ),
        )
    ),
    Scenario("prune", lambda ckpt, _: ckpt.prune(), [TWO_GENERATIONS] * 2, prepare=littered),
]


def each_scenario(*quick):
    """Parametrize a test by all scenarios; those that are not in `quick` are slow."""
    assert {*quick} <= {s.name for s in SCENARIOS}
    return pytest.mark.parametrize(
        "scenario",
        [
            pytest.param(
                s, id=s.name.replace(" ", "-"), marks=() if s.name in quick else pytest.mark.slow
            )
            for s in SCENARIOS
        ],
    )


# -- what must hold --------------------------------------------------------------------------------


_numbers = {}  # by all stored data of a checkpoint: no state is read twice


def contents(ckpt):
    """Step -> number of checkpoints, which are all whole."""
    return {step: number_stored(ckpt, step) for step in ckpt.steps()}


def number_stored(ckpt, step):
    """The number of a checkpoint: loaded, verified, and restored."""
    stored = all_stored_data(ckpt, step)
    if stored not in _numbers:
        tree = ckpt.load(step)
        assert set(tree) == {"model", "optimizer", "number"}
        report = ckpt.verify(step)
        assert report.ok, report.damaged
        fresh = job()
        fresh.fill(-2)
        ckpt.restore(fresh.state, step)
        assert fresh.number() == only_number(tree)
        _numbers[stored] = fresh.number()
    return _numbers[stored]


def all_stored_data(ckpt, step):
    backend, info = ckpt._backend, ckpt.info(step)
    names = [f"commits/{step:08d}-{info.generation}.json"]
    uids = [info.uid, *ckpt._catalog.record(step).references]
    names += [blob.name for uid in uids for blob in backend.list(f"data/{uid}/")]
    return tuple((name, backend.read_record(name, limit_bytes=1 << 20)) for name in names)


def check_run(disk, ends):
    """The run is one of `ends`, and can continue: save, prune, no leftovers."""
    with opened(PowerCut(disk)) as ckpt:
        found = contents(ckpt)
        assert found in ends, f"holds {found}, which is none of {ends}"
        if found:
            assert ckpt.latest() == max(found)
        save(ckpt, SAVED, SAVED, mode="blocking")
        disk.advance(2 * DAY_S)
        assert not ckpt.prune().refused
        assert ckpt.steps() == [*found, SAVED]
        assert only_number(ckpt.load(SAVED)) == SAVED
        assert {step: number_stored(ckpt, step) for step in found} == found
        marks = {number: ckpt.info(step).metadata.get("mark") for step, number in found.items()}
        assert marks == {number: 2 if number == 2 else None for number in marks}
        check_no_garbage(PowerCut(disk), steps=len(found) + 1)
    return found


def check_no_garbage(backend, *, steps):
    survey = survey_records(backend)
    assert not survey.unreadable
    assert len(survey.records) == steps, "an older generation is still there"
    names = [info.name for info in backend.list("")]
    names = [name for name in names if not name.startswith("tier/")]  # which tiers belong together
    # Of a deleted checkpoint with borrowers only the blobs.
    needed = {n for n in names if data_uid(n) in survey.named or blob_uid(n) in survey.used}
    origins = {record.origin for record in survey.records.values()}
    needed |= {n for n in names if notes_origin(n) in origins}
    left = [n for n in names if parse_commit_name(n) is None and n not in needed]
    assert not left, f"garbage: {left}"
