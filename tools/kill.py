"""Mix all operations of a run at random, kill its processes, and compare with a plain dict.

    python tools/kill.py --seconds 600
    python tools/kill.py --seed 7 --rounds 1 --kind tiers

A round is one run, in one place or in two tiers. In each session a forked trainer with random
options performs every operation on a run, often beside a second process. Most trainers are killed
at a random moment, some with their copying process. Some sessions are crowds: four processes save,
overwrite, delete and prune at once, and each killed one is replaced. Between sessions the fast tier
may be lost, and files may age beyond the grace time of `prune`.

After each session the run must match the dict, and each checkpoint that any place lists must be
whole, bit for bit. At the end of a round everything is copied and pruned, and nothing may be left
over. A violation is printed with the command that repeats the round: the same operations, at other
moments. Its folder stays.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # uses parts of the tests

import torch
from tests.integration.atomic.forking import MOST_CHARS, Reports, end, fork, show_where
from tests.integration.atomic.run_model import KEEP_EVERY, Model
from tests.integration.support import same, uring_missing

import penstock
from penstock.core.catalog.survey import survey_records
from penstock.core.concurrency.timing import timing_in_force
from penstock.core.concurrency.workers import Workers
from penstock.core.config.model import load_config
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.reencode import Reencoding, copy_objects
from penstock.core.plugins.registry import default_registry
from penstock.core.storage.open import open_backend
from penstock.core.tree.select import Selection
from penstock.testing.hasty import FAST

ELEMENTS = 50_000  # 1 MB in all: several writes, and a copy takes a while
SESSIONS = 8  # per round
HANGS_S = 180.0
CROWD_GRACE_S = 2.0

CAST = [{"type": "cast", "to": "bfloat16"}]
RULES = [
    {},
    {"**": ["zstd"]},
    {"model/**": ["delta", "floatsplit"]},
    {"**": ["delta", "zstd"]},
    {"ema": CAST, "**": ["delta"]},
    {"**": "auto"},
    {"ema": CAST, "packed": ["delta", "lz4"], "raw": ["floatsplit"]},
]
TRAINER = {
    "save": 13, "overwrite": 5, "delete": 1, "rewind": 1, "load": 3, "compact": 3, "prune": 1,
    "verify": 1, "copy": 2,
}  # fmt: skip
OTHER = {"compact": 6, "prune": 2, "verify": 2, "load": 2, "copy": 3}
CROWD = {"save": 8, "overwrite": 3, "delete": 2, "load": 2, "verify": 1, "prune": 2}
GONE = (penstock.CheckpointGoneError, penstock.CheckpointNotFoundError)
RACED = (penstock.StepExistsError, penstock.LostRaceError, penstock.SaveAbortedError)


def state_of(number: int) -> dict[str, Any]:
    """Return the state of save `number`: parts are new, change a little, or stay."""
    made = torch.Generator().manual_seed(number)
    equal = torch.Generator().manual_seed(0)
    moving = torch.randint(1 << 30, (ELEMENTS,), generator=equal, dtype=torch.int32)
    moving[number % 7 :: 7] += number
    start, drift = (torch.randn(ELEMENTS, generator=equal) for _ in range(2))
    return {
        "model": {"w": start + 1e-6 * number * drift, "frozen": start},
        "raw": torch.randn(ELEMENTS // 2, generator=made),
        "ema": torch.randn(ELEMENTS // 4, generator=made),
        "packed": moving,
        "small": [torch.full((n,), float(number)) for n in (1, 3, 700)],
        "number": number,
    }


def is_whole(tree: dict[str, Any]) -> bool:
    """Whether a loaded tree is bit for bit the save of its number."""
    expected = state_of(tree["number"])
    rounded = {**expected, "ema": expected["ema"].bfloat16().float()}  # by some of the rules
    return same(tree, expected) or same(tree, rounded)


@dataclass(frozen=True)
class Run:
    """The places of a round."""

    backend: Any
    places: dict[str, str]
    elsewhere: str
    folder: Path
    crowds: float  # share of the sessions

    def open(self, **options: Any) -> penstock.Checkpointer:
        """Open the run with the options of a session."""
        return penstock.Checkpointer.from_config({"backend": self.backend, "workers": 1, **options})


class _Actor:
    """A process that works on a run until it is killed, or for a number of operations."""

    def __init__(self, run: Run, options: Any, seed: int, send: Any, *, crowd: bool) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - no secret
        self._run, self._options, self._send, self._crowd = run, options, send, crowd
        self._numbers = iter(range(seed << 24, (seed + 1) << 24))

    def work(self, operations: int, weights: dict[str, int]) -> None:
        """Do a number of operations."""
        with self._run.open(**self._options) as self.ckpt:
            for _ in range(operations):
                (name,) = self._chance.choices([*weights], [*weights.values()])
                self._send("begins", op=name)
                try:
                    getattr(self, name)()
                except GONE:
                    self._send("gone", op=name)
                self._send("ends", op=name)

    def _problem(self, text: str) -> None:
        self._send("problem", text=text[:MOST_CHARS])

    def _step(self, *, may_go: bool = False) -> int:
        """Draw a step, often the latest; `may_go`: a step that may be overwritten or deleted."""
        steps = [s for s in self.ckpt.steps() if not (may_go and self._crowd) or s % KEEP_EVERY]
        if not steps:
            raise penstock.CheckpointNotFoundError("no step")  # noqa: EM101, TRY003
        return self._chance.choice([steps[-1], self._chance.choice(steps)])

    def load(self) -> None:
        step, tree = self._step(), state_of(0)
        if self._chance.random() < 0.5:  # noqa: PLR2004
            tree = self.ckpt.load(step)
        else:
            self.ckpt.restore(tree, step)
        if not is_whole(tree):
            self._problem(f"step {step} differs from its save")

    def verify(self) -> None:
        step = self._step()
        repair = len(self._run.places) > 1 and self._chance.random() < 0.5  # noqa: PLR2004
        if not (report := self.ckpt.verify(step, repair=repair)).ok:
            self._problem(f"step {step} is damaged: {report.damaged}")

    def prune(self) -> None:
        none_before = not self.ckpt.steps()
        for why in self.ckpt.prune().refused:
            # Prune deletes nothing of a run that has, or had, no step.
            if "not one commit record" not in why or not (none_before or not self.ckpt.steps()):
                self._problem(f"prune refused: {why}")

    def compact(self) -> None:
        how: dict[str, Any] = self._chance.choice([{}, {"everything": True}, {"steps": None}])
        steps = [self._step()] if "steps" in how else None
        try:
            self.ckpt.compact(steps, everything="everything" in how)
        except penstock.LostRaceError:
            self._send("lost", op="compact")  # two processes compact one step

    def copy(self) -> None:
        """Copy a step to another run, re-encoded or as is."""
        step = self._step()
        with closing(open_backend(self._run.elsewhere)) as target, closing(Workers(1)) as workers:
            try:
                if self._chance.random() < 0.5:  # noqa: PLR2004
                    config = load_config({"backend": self._run.elsewhere})
                    kept = {"selection": Selection(), "keep_codecs": True, "overwrite": True}
                    how, registry = Reencoding(config=config, **kept), default_registry()
                    copy_objects(
                        self.ckpt.open(step), target, how, registry=registry, workers=workers
                    )
                else:
                    source, record = self.ckpt._backend, self.ckpt._catalog.record(step)  # noqa: SLF001
                    CheckpointCopy(source, target, record, workers=workers, grace_s=86_400).run()
            except (penstock.StepExistsError, penstock.BusyError, penstock.LostRaceError):
                self._send("refused", op="copy")

    def save(self) -> None:
        steps = self.ckpt.steps()
        self._save((steps[-1] if steps else 0) + self._chance.randint(1, 2))

    def overwrite(self) -> None:
        self._save(self._step(may_go=True), overwrite=True)

    def _save(self, step: int, **how: Any) -> None:
        number, began_s = next(self._numbers), time.monotonic()
        retention = self._options["retention"]
        keep_last = retention["keep_last"] if retention else None
        self._send("saving", step=step, number=number, keep_last=keep_last)
        mode = self._chance.choice(["blocking", "async", "lazy"])
        try:
            state = state_of(number)
            handle = self.ckpt.save(state, step, mode=mode, **how)
            handle.durable.add_done_callback(partial(self._ended, step, number))
            if self._crowd or self._chance.random() < 0.8:  # noqa: PLR2004
                handle.committed.result()
                self._send("committed", step=step, number=number)
        except penstock.PenstockError as error:
            # Outside crowds compaction may bring a step back, and retention delete a new one.
            slow = self._crowd and time.monotonic() - began_s > CROWD_GRACE_S / 2
            unknown = isinstance(error, penstock.CommitUnknownError) and step % KEEP_EVERY
            if self._crowd and (isinstance(error, RACED) or slow or unknown):
                self._send("overtaken", op="save")
            elif not isinstance(error, penstock.StepExistsError) or how:
                raise

    def _ended(self, step: int, number: int, future: Any) -> None:
        error = future.exception()
        if error is None and "durable" in future.result().tiers:
            self._send("durable", step=step, number=number)
        elif error and not (self._crowd or isinstance(error, (*GONE, penstock.NotDrainedError))):
            self._problem(f"save {number} of step {step}: {type(error).__name__}: {error}")

    def delete(self) -> None:
        self._delete(self.ckpt.delete, lambda step: [step])

    def rewind(self) -> None:
        self._delete(self.ckpt.rewind, lambda step: [s for s in self.ckpt.steps() if s > step])

    def _delete(self, call: Any, doomed_by: Any) -> None:
        self.ckpt.wait()
        step = self._step(may_go=True)
        doomed = doomed_by(step)
        self._send("deleting", steps=doomed)
        call(step)
        self._send("deleted", steps=doomed)


class Round:
    """One run, session after session."""

    def __init__(self, run: Run, seed: int, seen: Counter[str]) -> None:
        self._run, self._seen, self._crowd = run, seen, False
        self._chance = random.Random(seed)  # noqa: S311 - no secret
        self.model = Model()
        self.problems: list[str] = []

    def go(self, end_s: float) -> None:
        """Work through the sessions until there is a problem."""
        for _ in range(SESSIONS):
            self._crowd = self._chance.random() < self._run.crowds
            self._doing: dict[str, str] = {}
            with closing(Reports()) as self._reports:
                (self._run_crowd if self._crowd else self._run_trainer)()
            if not self.problems:
                self._look()
            if self.problems or time.monotonic() > end_s:
                break
            if self._chance.random() < 0.25:  # noqa: PLR2004
                self._seen["times aged"] += 1
                for path in (path for path in self._run.folder.rglob("*") if path.is_file()):
                    then = path.stat().st_mtime - 25 * 3600
                    os.utime(path, (then, then))
            if len(self._run.places) > 1 and self._chance.random() < 0.2:  # noqa: PLR2004
                self._seen["fast tiers lost"] += 1
                shutil.rmtree(self._run.places["fast"].removeprefix("posix://"))
                self.model.lose_fast()
        if not self.problems:
            self._finish()

    def _start(self, who: str, options: dict[str, Any], *work: Any) -> int:
        seed, send = self._chance.getrandbits(24), partial(self._reports.say, who=who)
        self._doing[who] = ""

        def body() -> None:
            with timing_in_force(FAST):
                _Actor(self._run, options, seed, send, crowd=self._crowd).work(*work)

        return fork(who, self._reports, body)

    def _run_trainer(self) -> None:
        """Run a trainer, and perhaps a second process, until it ends or is killed."""
        chance = self._chance
        kills, beside, node = (chance.random() < share for share in (0.75, 0.5, 0.5))
        delay_s = chance.random() * chance.choice([0.3, 2.0, 6.0])
        count = 10_000 if kills else chance.randint(3, 12)
        trainer = self._start("trainer", self._drawn_options(), count, TRAINER)
        pids = [trainer, *([self._start("other", {}, 10_000, OTHER)] if beside else [])]
        hangs_s = time.monotonic() + HANGS_S
        strike_s, alive = hangs_s, True
        while alive and time.monotonic() < strike_s:
            self._hear(0.02, beside=beside)
            alive = os.waitid(os.P_PID, trainer, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            # A busy machine starts it slowly: the delay counts from its first operation.
            if kills and self._doing["trainer"] and strike_s == hangs_s:
                strike_s = time.monotonic() + delay_s
        if alive and strike_s == hangs_s:
            self.problems.append("the trainer hangs")
            show_where(trainer)
        copying = children_of(trainer) if alive else []
        for pid in pids:
            end(pid)
        self._seen["kills"] += alive
        for pid in copying:
            while Path(f"/proc/{pid}").exists() and time.monotonic() < hangs_s:
                if node:  # the node is lost, with the copying process
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
        self._seen["kills of a copying process"] += len(copying) * node
        self._hear(0, beside=beside)

    def _run_crowd(self) -> None:
        """Run several racing processes, and replace each killed one."""
        self.model.loosen([step for step in self.model.may if step % KEEP_EVERY])
        alive: dict[int, float] = {}  # when to kill each process
        for number in range(self._chance.randint(10, 40)):
            retention = self._chance.choice([None, {"keep_last": 4, "keep_every": KEEP_EVERY}])
            options = self._drawn_options() | {"retention": retention, "grace_s": CROWD_GRACE_S}
            pid = self._start(f"process {number}", options, 10_000, CROWD)
            alive[pid] = time.monotonic() + self._chance.random() * self._chance.choice([0.2, 3.0])
            while len(alive) >= 4 and not self.problems:  # noqa: PLR2004
                self._hear(0.02, beside=True)
                for due in [pid for pid, when_s in alive.items() if when_s < time.monotonic()]:
                    del alive[due]
                    self._seen["kills in a crowd"] += end(due) == signal.SIGKILL
        for pid in alive:
            end(pid)
        self._hear(0, beside=True)

    def _drawn_options(self) -> dict[str, Any]:
        pick, rules = self._chance.choice, self._chance.choice(RULES)
        self._seen[f"rules {rules}"] += 1
        deltas = {"every": pick([2, 4, 9]), "max_chain": pick([1, 2, 5])}
        return {
            "rules": [{"match": match, "codecs": codecs} for match, codecs in rules.items()],
            "share": pick([True, False]),
            "deltas": deltas | {"memory_bytes": pick([None, 0])},
            "retention": pick([None, None, None, {"keep_last": 2}, {"keep_last": 4}]),
            "chunk_bytes": pick([16384, 65536, 1 << 20]),
            "block_bytes": pick([4096, 16384]),
            "staging_bytes": pick([None, None, 1 << 20]),
        }

    def _hear(self, wait_s: float, *, beside: bool) -> None:
        for report in self._reports.hear(wait_s):
            who, what = report["who"], report["what"]
            kind = "crowd" if self._crowd else who
            if what == "begins":
                self._doing[who] = report["op"]
            elif what == "problem":
                self.problems.append(f"{who}, in {self._doing[who]}: {report['text']}")
            elif what in {"ends", "gone", "lost", "refused", "overtaken"}:
                self._seen[f"{kind}: {report['op']}{'' if what == 'ends' else ' ' + what}"] += 1
            if self._crowd:
                self.problems += self.model.hear_crowd(report)
            elif who == "trainer":
                self.model.hear(report, beside=beside)

    def _look(self) -> None:
        """Compare the run with the model, and read everything that each place lists."""
        try:
            with self._run.open() as ckpt:
                loaded = self._read(ckpt, "the run")
        except penstock.PenstockError as error:
            self.problems.append(f"the run cannot be read: {type(error).__name__}: {error}")
            return
        durable = dict(self.model.durable)
        self.problems += self.model.settle(loaded)
        for name, url in {**self._run.places, "elsewhere": self._run.elsewhere}.items():
            with penstock.Checkpointer(url, workers=1) as ckpt:
                here = self._read(ckpt, name)
            for step, number in here.items():
                if number not in self.model.begun[step]:
                    self.problems.append(f"step {step} in {name} is save {number} of another step")
            for step, number in durable.items() if name == "durable" else ():
                if loaded.get(step) == number != here.get(step):
                    self.problems.append(f"step {step} is durable as {number}: {here.get(step)}")

    def _read(self, ckpt: penstock.Checkpointer, where: str) -> dict[int, int]:
        numbers = {}
        for step in ckpt.steps():
            try:
                tree = ckpt.load(step)
                numbers[step] = tree["number"]
                if not is_whole(tree):
                    self.problems.append(f"step {step} in {where} differs from its save")
                self._seen["checkpoints compared"] += 1
            except penstock.PenstockError as error:
                self.problems.append(f"step {step} is listed in {where}, but not whole: {error}")
        return numbers

    def _finish(self) -> None:
        """Copy and prune everything: nothing may be left over."""
        with self._run.open() as ckpt:
            step = (ckpt.latest() or 0) + 1
            number = (1 << 48) + step
            ckpt.save(state_of(number), step).result()
            ckpt.wait()
        self.model.begun[step].add(number)
        self.model.may[step] = {number}
        time.sleep(0.05)  # longer than a tick of the file system clock
        for place in (self._run.backend, self._run.elsewhere):
            with penstock.Checkpointer(place, workers=1, grace_s=1e-6) as ckpt:
                if ckpt.steps():
                    report = ckpt.prune(everything=True)
                    self.problems += [f"prune refused: {why}" for why in report.refused]
        left = [name for url in self._run.places.values() for name in leftovers_of(url)]
        self.problems += [f"left over: {name}" for name in left]
        self._look()


def children_of(pid: int) -> list[int]:
    """Return the children of a process."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            pids += map(int, task.read_text().split())
    return pids


def leftovers_of(url: str) -> list[str]:
    """Return leftovers: unneeded blobs, temporary files, empty folders."""
    with closing(open_backend(url)) as backend:
        needed = survey_records(backend).needed
        names = [info.name for info in backend.list("") if info.name.startswith("data/")]
        left = [name for name in names if name.split("/")[1] not in needed]
    folder = Path(url.partition("://")[2])
    left += [str(path) for path in folder.rglob("~*")]
    return left + [str(path) for path in folder.glob("data/**/") if not any(path.iterdir())]


def drawn_run(options: argparse.Namespace, chance: random.Random) -> Run:
    """Draw the places of a round."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-kill-", dir=options.root))
    elsewhere = f"posix://{folder}/elsewhere"
    kind = chance.choice(["one", "tiers", "tiers"]) if options.kind == "all" else options.kind
    if kind != "tiers":
        url = f"{chance.choice(options.schemes)}://{folder}/one"
        return Run(url, {"one": url}, elsewhere, folder, 1 if kind == "crowd" else 0.3)
    places = {"fast": f"posix://{folder}/fast", "durable": f"posix://{folder}/durable"}
    backend = {
        "type": "tiered",
        **places,
        "keep_fast": chance.choice([None, 1, 2]),
        "drain_every": chance.choice([1, 1, 1, 2]),
        "drain_bytes_per_s": chance.choice([None, "100 MB", "10 MB"]),
        "drain_in": chance.choice(["thread", "process"]),
    }
    return Run(backend, places, elsewhere, folder, 0)


def main() -> None:
    """Run rounds, and print their operations and problems."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="at most")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(24))
    parser.add_argument("--root", type=Path, help="parent of the folders; default: temporary")
    parser.add_argument("--rounds", type=int, default=1_000_000, help="at most")
    parser.add_argument("--kind", choices=["one", "crowd", "tiers", "all"], default="all")
    options = parser.parse_args()
    options.schemes = ["posix"] if uring_missing() else ["posix", "uring"]
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    default_registry().listing()  # imports every plugin, so no child has to
    end_s, seen, wrong = time.monotonic() + options.seconds, Counter[str](), 0
    print(f"seed {options.seed}, for {options.seconds:.0f} s", flush=True)
    gc.freeze()
    for seed in range(options.seed, options.seed + options.rounds):
        if time.monotonic() > end_s:
            break
        chance = random.Random(seed)  # noqa: S311 - no secret
        run = drawn_run(options, chance)
        played = Round(run, chance.getrandbits(32), seen)
        played.go(end_s)
        seen[f"rounds in {' and '.join(run.places)}"] += 1
        if not played.problems:
            shutil.rmtree(run.folder)
            continue
        wrong += len(played.problems)
        print("\n".join(f"PROBLEM {text[:MOST_CHARS]}" for text in played.problems[:20]))
        print(f"seed {seed}: the run is left in {run.folder}. To repeat the round:")
        print(f"  python tools/kill.py --seed {seed} --rounds 1 --kind {options.kind}", flush=True)
    for what, count in sorted(seen.items()):
        print(f"  {count:6d} {what}")
    print(f"{wrong} problems")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
