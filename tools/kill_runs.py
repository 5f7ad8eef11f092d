"""Crosses all operations of a run at random, kills its processes, and compares with a plain dict.

    python tools/kill_runs.py --seconds 600
    python tools/kill_runs.py --seed 7 --rounds 1 --kind tiers

Each round is a run of its own, in one place or in two tiers, used by one session after the other.
A session is a forked trainer with options drawn at random (codecs, sharing, chains, retention,
sizes, modes). It saves, overwrites, deletes, rewinds, compacts, prunes, verifies, loads and copies.
In half of the sessions a second process compacts, prunes, verifies, loads and copies at the same
time. Three of four trainers are killed at a random moment, with `--drain-in process` half of the
time with the process that copies. Between sessions the fast tier may be lost, and what is stored
may be aged by more than the grace time of `prune`.

After each session everything is read: the run has to hold what the dict says, and whatever any tier
or copy lists has to be whole, bit for bit. In the end of a round everything is drained and pruned,
and nothing may be left over. A violation is printed with its seed and the command that repeats the
round: the same sessions and operations, though not the same moments. Its folder stays.

    python tools/kill_runs.py --s3 --elements 1500000 --kind tiers --drain-in process

does so with an object store (moto's, on loopback) as the durable tier, and states that go there as
multipart uploads.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from killing import MOST_CHARS, Reports, end, fork, parser, show_where
from tests.backends import s3_server
from tests.integration.support import same

import penstock
from penstock.core.catalog.survey import survey_records
from penstock.core.concurrency.workers import Workers
from penstock.core.config.model import load_config
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.reencode import Reencoding, copy_objects
from penstock.core.plugins.registry import default_registry
from penstock.core.storage.open import open_backend
from penstock.core.tree.select import Selection
from penstock.testing.hasty import FAST, timing_in_force

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

_ELEMENTS = 50_000  # some 1 MB in all: several writes, and a copy that takes a while
_SESSIONS = 8  # of a round
_HANGS_S = 180.0
_AGE_S = 25 * 3600

_LOSSY = {"match": "ema", "codecs": [{"type": "cast", "to": "bfloat16"}]}
RULES = {
    "raw": [],
    "zstd": [{"match": "**", "codecs": ["zstd"]}],
    "delta+floatsplit": [{"match": "model/**", "codecs": ["delta", "floatsplit"]}],
    "delta+zstd": [{"match": "**", "codecs": ["delta", "zstd"]}],
    "lossy+delta": [_LOSSY, {"match": "**", "codecs": ["delta"]}],
    "auto": [{"match": "**", "codecs": "auto"}],
    "mixed": [
        _LOSSY,
        {"match": "packed", "codecs": ["delta", "lz4"]},
        {"match": "raw", "codecs": ["floatsplit"]},
    ],
}
_GONE = (penstock.CheckpointGoneError, penstock.CheckpointNotFoundError)

_elements = _ELEMENTS


def state_of(number: int) -> dict[str, Any]:
    """What save `number` holds: something new, something that moves a little, something still."""
    made = torch.Generator().manual_seed(number)
    same = torch.Generator().manual_seed(0)
    moving = torch.randint(1 << 30, (_elements,), generator=same, dtype=torch.int32)
    moving[number % 7 :: 7] += number
    start, drift = (torch.randn(_elements, generator=same) for _ in range(2))
    return {
        "model": {"w": start + 1e-6 * number * drift, "frozen": start},
        "raw": torch.randn(_elements // 2, generator=made),
        "ema": torch.randn(_elements // 4, generator=made),
        "packed": moving,
        "small": [torch.full((n,), float(number)) for n in (1, 3, 700)],
        "number": number,
    }


def is_same(tree: dict[str, Any]) -> bool:
    """Whether a loaded tree is, bit for bit, the save that it says it is."""
    expected = state_of(tree["number"])
    rounded = {**expected, "ema": expected["ema"].bfloat16().float()}  # by the rules of some saves
    return same(tree, expected) or same(tree, rounded)


# -- what there must be ----------------------------------------------------------------------------


@dataclass
class Model:
    """What a run may hold, by what its trainers were told.

    Attributes:
        may: The numbers that each step may hold; None: it may be missing.
        begun: All numbers that were ever saved at a step.
        durable: The number of a step that is told to be in the durable tier.
    """

    may: dict[int, set[int | None]] = field(default_factory=lambda: defaultdict(lambda: {None}))
    begun: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    durable: dict[int, int] = field(default_factory=dict)

    def hear(self, told: dict[str, Any], *, beside: bool) -> None:
        """Take in what a trainer did; `beside`: whether another process compacts at that time."""
        what = told["what"]
        if what == "saving":
            step, number = told["step"], told["number"]
            self.may[step].add(number)
            self.begun[step].add(number)
            self.durable.pop(step, None)
            self._retain(step, told["keep_last"])
        elif what == "committed":
            self.may[told["step"]] = {told["number"]}
        elif what == "durable":
            if self.may[told["step"]] <= {told["number"], None}:
                self.durable[told["step"]] = told["number"]
        elif what == "deleting":
            for step in told["steps"]:
                self.may[step].add(None)
                self.durable.pop(step, None)
        elif what == "deleted":
            for step in told["steps"]:
                # A compaction that commits in that very moment may be missed (docs/chains.md).
                self.may[step] = {None, *self.may[step]} if beside else {None}

    def _retain(self, step: int, keep_last: int | None) -> None:
        """Take in that retention may delete, for a save of `step`, which may not be committed."""
        older = sorted(s for s, may in self.may.items() if may != {None} and s != step)
        for one in older[: -(keep_last - 1) or None] if keep_last else ():
            self.may[one].add(None)

    def lose_fast(self) -> None:
        """Take in that all of the fast tier is lost."""
        for step, may in self.may.items():
            if may - {None} != {self.durable.get(step)}:
                may.update({None}, self.begun[step])

    def settle(self, found: dict[int, int]) -> list[str]:
        """Compare with the number that each step holds, and go on from there."""
        wrong = [
            f"step {step} holds {found.get(step)}, and may hold {self.may[step]}"
            for step in sorted({*found, *self.may})
            if found.get(step) not in self.may[step]
        ]
        for step in {*found, *self.may}:
            self.may[step] = {found.get(step)}
        self.durable = {step: n for step, n in self.durable.items() if found.get(step) == n}
        return wrong


# -- the processes ---------------------------------------------------------------------------------


class Actor:
    """A process that works on a run until it is killed, or for a number of operations."""

    def __init__(
        self, run: Run, options: dict[str, Any], seed: int, say: Callable[..., None]
    ) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - no secret
        self._run, self._options, self._say = run, options, say
        self._numbers = iter(range(seed << 24, (seed + 1) << 24))

    def work(self, operations: int, weights: dict[str, int]) -> None:
        """Do so many operations."""
        with self._run.open(**self._options) as self.ckpt:
            for _ in range(operations):
                (name,) = self._chance.choices([*weights], [*weights.values()])
                self._say("begins", op=name)
                try:
                    getattr(self, name)()
                except _GONE:
                    self._say("gone", op=name)
                self._say("ends", op=name)

    def _problem(self, text: str) -> None:
        self._say("problem", text=text[:MOST_CHARS])

    def _step(self) -> int:
        steps = self.ckpt.steps()
        if not steps:
            msg = "nothing is there"
            raise penstock.CheckpointNotFoundError(msg)
        return self._chance.choice([steps[-1], self._chance.choice(steps)])

    # -- of both --

    def load(self) -> None:
        """Load a step, and compare."""
        step = self._step()
        if not is_same(self.ckpt.load(step)):
            self._problem(f"step {step} is loaded wrong")

    def restore(self) -> None:
        """Restore a step in place, and compare."""
        step = self._step()
        tree = state_of(0)
        self.ckpt.restore(tree, step)
        if not is_same(tree):
            self._problem(f"step {step} is restored wrong")

    def verify(self) -> None:
        """Verify a step, with tiers perhaps with repair."""
        step = self._step()
        repair = self._run.tiered and self._chance.random() < 0.5  # noqa: PLR2004
        report = self.ckpt.verify(step, repair=repair)
        if not report.ok:
            self._problem(f"step {step} is damaged: {report.damaged}")

    def prune(self) -> None:
        """Prune."""
        none_before = not self.ckpt.steps()
        for why in self.ckpt.prune().refused:
            if "not one commit record" in why and (none_before or not self.ckpt.steps()):
                self._say("refused", op="prune")
            else:
                self._problem(f"prune refused: {why}")

    def compact(self) -> None:
        """Compact a step, all, or what keeps data of deleted ones."""
        how: dict[str, Any] = self._chance.choice([{}, {"everything": True}, {"steps": None}])
        steps = [self._step()] if "steps" in how else None
        try:
            done = self.ckpt.compact(steps, everything="everything" in how)
        except penstock.LostRaceError:
            self._say("lost", op="compact")  # two compact one step
        else:
            self._say("compacted", count=len(done.steps))

    def copy(self) -> None:
        """Copy a step to another run, encoded anew or as it is."""
        step = self._step()
        target = open_backend(self._run.elsewhere)
        try:
            with closing(Workers(1)) as workers:
                if self._chance.random() < 0.5:  # noqa: PLR2004
                    config = load_config({"backend": self._run.elsewhere})
                    how = Reencoding(
                        config=config, selection=Selection(), keep_codecs=True, overwrite=True
                    )
                    copy_objects(
                        self.ckpt.open(step), target, how, registry=default_registry(),
                        workers=workers,
                    )  # fmt: skip
                else:
                    record = self.ckpt._catalog.record(step)  # noqa: SLF001 - what the command does
                    CheckpointCopy(
                        self.ckpt._backend, target, record, workers=workers,  # noqa: SLF001
                        grace_s=24 * 3600,
                    ).run()  # fmt: skip
        except (penstock.StepExistsError, penstock.BusyError, penstock.LostRaceError):
            self._say("refused", op="copy")
        finally:
            target.close()

    # -- of the trainer --

    def save(self) -> None:
        """Save a later step."""
        steps = self.ckpt.steps()
        self._save((steps[-1] if steps else 0) + self._chance.randint(1, 2))

    def save_twice(self) -> None:
        """Save twice in a row."""
        self.save()
        self.save()

    def overwrite(self) -> None:
        """Overwrite a step."""
        self._save(self._step(), overwrite=True)

    def _save(self, step: int, **how: Any) -> None:
        number = next(self._numbers)
        retention = self._options["retention"]
        keep_last = retention["keep_last"] if retention else None
        self._say("saving", step=step, number=number, keep_last=keep_last)
        mode = self._chance.choice(["blocking", "async", "lazy"])
        try:
            handle = self.ckpt.save(state_of(number), step, mode=mode, **how)
        except penstock.StepExistsError:
            if how:
                raise
            self._say("overtaken")  # a step that a compaction has brought back: docs/chains.md
            return
        except penstock.CheckpointGoneError:
            if mode != "blocking" or retention is None:
                raise
            return
        handle.durable.add_done_callback(partial(self._told, step, number))
        if self._chance.random() < 0.8:  # noqa: PLR2004
            handle.committed.result()
            self._say("committed", step=step, number=number)

    def _told(self, step: int, number: int, future: Any) -> None:
        error = future.exception()
        if error is None and "durable" in future.result().tiers:
            self._say("durable", step=step, number=number)
        elif error is not None and not isinstance(
            error, (penstock.CheckpointGoneError, penstock.NotDrainedError)
        ):
            self._problem(f"save {number} of step {step}: {type(error).__name__}: {error}")

    def delete(self) -> None:
        """Delete a step."""
        self._delete(self.ckpt.delete, lambda step: [step])

    def rewind(self) -> None:
        """Rewind to a step."""
        self._delete(self.ckpt.rewind, lambda step: [s for s in self.ckpt.steps() if s > step])

    def _delete(self, call: Callable[[int], Any], doomed: Callable[[int], list[int]]) -> None:
        self.ckpt.wait()
        step = self._step()
        steps = doomed(step)
        self._say("deleting", steps=steps)
        call(step)
        self._say("deleted", steps=steps)

    def wait(self) -> None:
        """Wait for the saves."""
        self.ckpt.wait()


TRAINER = {
    "save": 8, "save_twice": 3, "overwrite": 5, "delete": 1, "rewind": 1, "load": 2, "restore": 1,
    "compact": 3, "prune": 1, "verify": 1, "copy": 2, "wait": 1,
}  # fmt: skip
OTHER = {"compact": 6, "prune": 2, "verify": 2, "load": 2, "copy": 3}


@dataclass(frozen=True)
class Run:
    """The places of a round."""

    backend: Any
    places: dict[str, str]
    elsewhere: str
    folder: Path

    @property
    def tiered(self) -> bool:
        """Whether there are two tiers."""
        return len(self.places) > 1

    def open(self, **options: Any) -> penstock.Checkpointer:
        """Open the run, with these options of a session."""
        return penstock.Checkpointer.from_config({"backend": self.backend, "workers": 1, **options})


def children_of(pid: int) -> list[int]:
    """Processes that one has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended since
            found += map(int, task.read_text().split())
    return found


# -- a round ---------------------------------------------------------------------------------------


class Round:
    """One run, session after session."""

    def __init__(self, run: Run, seed: int, seen: Counter[str]) -> None:
        self._run, self._seen = run, seen
        self._chance = random.Random(seed)  # noqa: S311 - no secret
        self.model = Model()
        self.problems: list[str] = []

    def go(self, sessions: int, end_s: float) -> None:
        """Work through the sessions, until there is a problem."""
        for number in range(sessions):
            self._session(number)
            if not self.problems:
                self._look()
            if self.problems or time.monotonic() > end_s:
                break
            if self._chance.random() < 0.25:  # noqa: PLR2004
                self._age()
            if self._run.tiered and self._chance.random() < 0.2:  # noqa: PLR2004
                self._lose_fast()
        if not self.problems:
            self._finish()

    def _session(self, number: int) -> None:
        chance, options = self._chance, self._drawn_options()
        kills = chance.random() < 0.75  # noqa: PLR2004
        beside = chance.random() < 0.5  # noqa: PLR2004
        seeds = chance.getrandbits(24), chance.getrandbits(24)
        delay_s = chance.random() * chance.choice([0.3, 2.0, 6.0])
        node = chance.random() < 0.5  # noqa: PLR2004
        count = 10_000 if kills else chance.randint(3, 12)
        self._seen["sessions"] += 1
        self._seen["sessions with a second process"] += beside

        reports = Reports()

        def start(who: str, seed: int, how: dict[str, Any], *work: Any) -> int:
            def body() -> None:
                with timing_in_force(FAST):
                    Actor(self._run, how, seed, partial(reports.say, who=who)).work(*work)

            return fork(who, reports, body)

        pids = {"trainer": start("trainer", seeds[0], options, count, TRAINER)}
        if beside:
            pids["other"] = start("other", seeds[1], {}, 10_000, OTHER)
        doing = dict.fromkeys(pids, "")
        trainer, began = pids["trainer"], time.monotonic()
        strike = began + (delay_s if kills else _HANGS_S)
        alive = True
        while alive and time.monotonic() < strike:
            self._hear(reports, doing, 0.02, beside=beside)
            alive = os.waitid(os.P_PID, trainer, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            # It starts slowly on a busy machine: the delay counts from its first operation.
            if kills and not doing["trainer"]:
                strike = min(time.monotonic() + delay_s, began + _HANGS_S)
        if alive and not kills:
            self.problems.append(f"session {number}: the trainer hangs")
            show_where(trainer)
        doomed = children_of(trainer) if alive else []
        for pid in pids.values():
            end(pid)
        self._seen["kills"] += alive
        self._end_copying(doomed, kill=node)
        self._hear(reports, doing, 0, beside=beside)
        reports.close()
        for who, what in doing.items():
            if what and (alive or who == "other"):
                self._seen[f"{who} killed in {what}"] += 1

    def _drawn_options(self) -> dict[str, Any]:
        chance = self._chance
        rules = chance.choice([*RULES])
        options = {
            "rules": RULES[rules],
            "share": chance.random() < 0.6,  # noqa: PLR2004
            "deltas": {
                "every": chance.choice([2, 4, 9]),
                "max_chain": chance.choice([1, 2, 5]),
                "memory_bytes": chance.choice([None, 0]),
            },
            "retention": chance.choice([None, None, None, {"keep_last": 2}, {"keep_last": 4}]),
            "chunk_bytes": chance.choice([16384, 65536, 1 << 20]),
            "block_bytes": chance.choice([4096, 16384]),
            "staging_bytes": chance.choice([None, None, 1 << 20]),
        }
        self._seen[f"rules {rules}"] += 1
        self._seen["sessions with retention"] += options["retention"] is not None
        return options

    def _end_copying(self, pids: list[int], *, kill: bool) -> None:
        """Wait for the processes that copied for a trainer, or kill them."""
        end_s = time.monotonic() + 30
        for pid in pids:
            while Path(f"/proc/{pid}").exists() and time.monotonic() < end_s:
                if kill:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
        self._seen["kills of a copying process"] += len(pids) if kill else 0

    def _hear(
        self, reports: Reports, doing: dict[str, str], wait_s: float, *, beside: bool
    ) -> None:
        for told in reports.hear(wait_s):
            who, what = told["who"], told["what"]
            if what == "begins":
                doing[who] = told["op"]
            elif what == "ends":
                self._seen[f"{who}: {told['op']}"] += 1
            elif what == "problem":
                self.problems.append(f"{who}, in {doing[who]}: {told['text']}")
            elif what == "compacted":
                self._seen["steps compacted"] += told["count"]
            elif what in {"gone", "lost", "refused"}:
                self._seen[f"{who}: {told['op']} {what}"] += 1
            if who == "trainer":
                self.model.hear(told, beside=beside)

    # -- what is left ------------------------------------------------------------------------------

    def _look(self) -> None:
        """Compare the run with the model, and read all that each place lists."""
        try:
            with self._run.open() as ckpt:
                found = self._read(ckpt, "the run")
        except penstock.PenstockError as error:
            self.problems.append(f"the run cannot be read: {type(error).__name__}: {error}")
            return
        durable = dict(self.model.durable)
        self.problems += self.model.settle(found)
        for name, url in {**self._run.places, "elsewhere": self._run.elsewhere}.items():
            with penstock.Checkpointer(url, workers=1) as ckpt:
                here = self._read(ckpt, name)
            for step, number in here.items():
                if number not in self.model.begun[step]:
                    self.problems.append(f"step {step} in {name} is save {number} of another step")
            if name == "durable":
                self.problems += [
                    f"step {step} was told durable as {number}, and {here.get(step)} is there"
                    for step, number in durable.items()
                    if found.get(step) == number != here.get(step)
                ]

    def _read(self, ckpt: penstock.Checkpointer, where: str) -> dict[int, int]:
        found = {}
        for step in ckpt.steps():
            try:
                tree = ckpt.load(step)
                found[step] = tree["number"]
                if not is_same(tree):
                    self.problems.append(f"step {step} in {where} is not what was saved")
                self._seen["checkpoints compared"] += 1
            except penstock.PenstockError as error:
                self.problems.append(f"step {step} is listed in {where}, and not whole: {error}")
        return found

    def _age(self) -> None:
        """Make all that is stored older than the grace time of `prune`."""
        self._seen["times aged"] += 1
        for path in self._run.folder.rglob("*"):
            if path.is_file():
                then = path.stat().st_mtime - _AGE_S
                os.utime(path, (then, then))

    def _lose_fast(self) -> None:
        self._seen["fast tiers lost"] += 1
        shutil.rmtree(self._run.places["fast"].removeprefix("posix://"))
        self.model.lose_fast()

    def _finish(self) -> None:
        """Drain and prune everything: nothing may be left over."""
        with self._run.open() as ckpt:
            steps = ckpt.steps()
            number = (1 << 48) + len(steps)
            step = (steps[-1] if steps else 0) + 1
            ckpt.save(state_of(number), step).result()
            ckpt.wait()
        self.model.begun[step].add(number)
        self.model.may[step] = {number}
        time.sleep(0.05)  # longer than the clock of the file system stands still
        for place in (self._run.backend, self._run.elsewhere):
            with penstock.Checkpointer(place, workers=1, grace_s=1e-6) as ckpt:
                if ckpt.steps():
                    report = ckpt.prune(everything=True)
                    self.problems += [f"prune refused: {why}" for why in report.refused]
        for url in self._run.places.values():
            self.problems += [f"left over: {name}" for name in rubbish_of(url)]
            self.problems += [f"an upload is left over: {name}" for name in uploads_of(url)]
        self._look()


def rubbish_of(url: str) -> list[str]:
    """Names that no checkpoint needs."""
    backend = open_backend(url)
    needed = survey_records(backend).needed
    names = [info.name for info in backend.list("")]
    backend.close()
    return [n for n in names if n.startswith("data/") and n.split("/")[1] not in needed]


def uploads_of(url: str) -> list[str]:
    """Names of multipart uploads to S3 that nobody has ended."""
    if not url.startswith("s3://"):
        return []
    backend = open_backend(url)
    pages = backend._store()._client.pages("list_multipart_uploads", "sweep")  # type: ignore[attr-defined] # noqa: SLF001 - what no name shows
    names = [upload["Key"] for page in pages for upload in page.get("Uploads", ())]
    backend.close()
    return names


def places_of(folder: Path, durable: str | None, chance: random.Random, options: Any) -> Run:
    """Draw the places of a round."""
    elsewhere = f"posix://{folder}/elsewhere"
    kind = chance.choice(["one", "tiers", "tiers"]) if options.kind == "all" else options.kind
    if kind == "one":
        url = f"posix://{folder}/one"
        return Run(url, {"one": url}, elsewhere, folder)
    places = {"fast": f"posix://{folder}/fast", "durable": durable or f"posix://{folder}/durable"}
    backend = {
        "type": "tiered",
        **places,
        "keep_fast": chance.choice([None, 1, 2]),
        "drain_every": chance.choice([1, 1, 1, 2]),
        "drain_bytes_per_s": chance.choice([None, "100 MB", "10 MB"]),
        "drain_in": options.drain_in,
    }
    return Run(backend, places, elsewhere, folder)


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    options = parser(__doc__, 60)
    options.add_argument("--rounds", type=int, default=1_000_000, help="at most")
    options.add_argument("--kind", choices=["one", "tiers", "all"], default="all")
    place = options.add_mutually_exclusive_group()
    place.add_argument("--durable", help="URL of a folder for durable tiers; default: on this disk")
    place.add_argument("--s3", action="store_true", help="the durable tier is S3, on loopback")
    options.add_argument("--elements", type=int, default=_ELEMENTS, help="of the largest tensors")
    options.add_argument("--drain-in", default="thread", choices=["thread", "process"])
    return options.parse_args()


def main() -> None:
    """Run rounds, and print what they crossed and found."""
    options = parsed()
    global _elements  # noqa: PLW0603 - one program, and its children
    _elements = options.elements
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    default_registry().listing()  # imports every plugin, so that no child has to
    end_s, seen, wrong = time.monotonic() + options.seconds, Counter[str](), 0
    print(f"seed {options.seed}, for {options.seconds:.0f} s", flush=True)
    with ExitStack() as stack:
        endpoint = ""
        if options.s3:
            os.environ.update(s3_server.ENVIRONMENT)
            endpoint = stack.enter_context(s3_server.running())
        gc.freeze()
        for number in range(options.rounds):
            if time.monotonic() > end_s:
                break
            seed = options.seed + number
            chance = random.Random(seed)  # noqa: S311 - no secret
            folder = Path(tempfile.mkdtemp(prefix="penstock-runs-", dir=options.root))
            durable = f"{options.durable}/{folder.name}" if options.durable else None
            if endpoint:
                # The smallest parts that S3 takes.
                query = f"endpoint_url={endpoint}&part_bytes={5 << 20}"
                durable = f"s3://{s3_server.BUCKET}/{folder.name}?{query}"
            run = places_of(folder, durable, chance, options)
            one = Round(run, chance.getrandbits(32), seen)
            one.go(_SESSIONS, end_s)
            seen["rounds"] += 1
            seen[f"rounds in {'tiers' if run.tiered else 'one place'}"] += 1
            if not one.problems:
                shutil.rmtree(folder)
                continue
            wrong += len(one.problems)
            for problem in one.problems[:20]:
                print(f"PROBLEM {problem}")
            print(
                f"seed {seed} found it; the run is left in {folder}. To repeat the round:\n"
                f"  python tools/kill_runs.py --seed {seed} --rounds 1 --kind {options.kind} "
                f"--elements {options.elements} --drain-in {options.drain_in}",
                flush=True,
            )
    for what, count in sorted(seen.items()):
        print(f"  {count:6d} {what}")
    print(f"{wrong} problems")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
