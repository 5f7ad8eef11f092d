"""Kills processes that save, prune, delete and restore in one run, and looks what is left.

    python tools/kill_savers.py --kills 1000 --seconds 600

Several savers work on one run at once, beside them a pruner, a deleter and a reader; each is
killed (SIGKILL) at a random moment and replaced. Every state says which save it belongs to, so a
checkpoint that is whole but wrong is found too. Ends with 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.integration.atomic.forked_savers import OPTIONS, fork, make  # noqa: E402
from tests.integration.support import same, uring_missing  # noqa: E402

from penstock import (  # noqa: E402
    Checkpointer,
    CheckpointNotFoundError,
    CommitUnknownError,
    LostRaceError,
    PenstockError,
    SaveAbortedError,
    StepExistsError,
)
from penstock.core.catalog.survey import survey_run  # noqa: E402
from penstock.core.format.records import blob_uid  # noqa: E402
from penstock.core.plugins.registry import default_registry  # noqa: E402

KEEP_EVERY = 10
"""Nobody deletes or overwrites a multiple of it, so a durable save of one must stay."""
GRACE_S = 2.0
ROLES = ("saver", "saver", "saver", "pruner", "deleter", "reader")
LARGEST_NUMBER = 1 << 24  # float32 holds it exactly
SPARE_STEPS = 4  # that the deleter leaves


@dataclass
class Seen:
    """What the processes of a run said before they were killed."""

    started: set[tuple[int, int]] = field(default_factory=set)  # step, number
    durable: dict[int, tuple[int, str]] = field(default_factory=dict)  # step: number, uid
    kept: dict[int, tuple[int, str]] = field(default_factory=dict)  # the same, never deleted
    counts: Counter = field(default_factory=Counter)
    kills: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def hear(self, message: dict) -> None:
        """Take in one message."""
        self.counts[message["what"]] += 1
        if message["what"] == "started":
            self.started.add((message["step"], message["number"]))
        elif message["what"] == "durable":
            save = (message["number"], message["uid"])
            self.durable[message["step"]] = save
            if message["step"] % KEEP_EVERY == 0:
                if message["step"] in self.kept:
                    self.problems.append(f"step {message['step']} was won twice")
                self.kept[message["step"]] = save
        elif message["what"] == "problem":
            self.problems.append(message["text"])


class Warnings(logging.Handler):
    """The last that Penstock warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: deque[str] = deque(maxlen=3)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep its text."""
        self.texts.append(record.getMessage())


# -- the processes ---------------------------------------------------------------------------------


def work(role: str, url: str, seed: int, report: int) -> None:
    """Be one of the processes until killed."""
    chance = random.Random(seed)  # noqa: S311

    def say(what: str, **more: object) -> None:
        os.write(report, json.dumps({"what": what, **more}).encode() + b"\n")

    said = Warnings()
    logging.getLogger("penstock").addHandler(said)
    try:
        with Checkpointer(url, grace_s=GRACE_S, **(OPTIONS | options_of(role, chance))) as ckpt:
            say(role)
            while True:
                globals()[role](ckpt, chance, say)
    except BaseException as error:
        text = f"{role}: {type(error).__name__}: {error}; logged: {list(said.texts)}"
        say("problem", text=text[:2000])
        raise


def options_of(role: str, chance: random.Random) -> dict:
    """Every other saver keeps the run short by retention; three of four share, too."""
    if role != "saver":
        return {}
    options: dict = {"share": chance.random() < 0.75}  # noqa: PLR2004
    if chance.random() < 0.5:  # noqa: PLR2004
        options["retention"] = {"keep_last": SPARE_STEPS, "keep_every": KEEP_EVERY}
    return options


def saver(ckpt: Checkpointer, chance: random.Random, say: object) -> None:
    """Save at a next step, or over one that may be replaced."""
    steps = ckpt.steps()
    step = (steps[-1] if steps else 0) + chance.randint(1, 3)
    spare = [s for s in steps if s % KEEP_EVERY]
    overwrite = bool(spare) and chance.random() < 0.25  # noqa: PLR2004
    if overwrite:
        step = chance.choice(spare)
    number = chance.randrange(1, LARGEST_NUMBER)
    began = time.monotonic()
    say("started", step=step, number=number)
    try:
        report = ckpt.save(
            make(number),
            step,
            mode=chance.choice(["blocking", "async"]),
            overwrite=overwrite,
            metadata={"number": number},
        ).result()
    except (StepExistsError, LostRaceError):
        say("overtaken")
    except SaveAbortedError:
        say("too slow")
    except CommitUnknownError:
        if step % KEEP_EVERY == 0:
            raise
        say("unknown")  # who won was deleted before it could be read
    except PenstockError as error:
        if time.monotonic() - began < GRACE_S / 2:
            raise
        say("too slow", text=str(error))  # its data may have been pruned under its hands
    else:
        say("durable", step=step, number=number, uid=report.uid)


def pruner(ckpt: Checkpointer, chance: random.Random, say: object) -> None:
    """Collect what the killed ones have left."""
    report = ckpt.prune(everything=True)
    if report.refused:
        say("problem", text=f"prune refused: {report.refused}")
    say("pruned" if report.uids else "pruned nothing")
    time.sleep(chance.random() * 0.05)


def deleter(ckpt: Checkpointer, chance: random.Random, say: object) -> None:
    """Delete a checkpoint, unless there are few."""
    spare = [step for step in ckpt.steps() if step % KEEP_EVERY]
    if len(spare) > SPARE_STEPS:
        try:
            ckpt.delete(chance.choice(spare))
        except CheckpointNotFoundError:
            return
        say("deleted")
    time.sleep(chance.random() * 0.02)


def reader(ckpt: Checkpointer, chance: random.Random, say: object) -> None:
    """Restore the latest, or verify any; all that may happen is that it goes away meanwhile."""
    try:
        if chance.random() < 0.5:  # noqa: PLR2004
            target = make(0)
            ckpt.restore(target)
            if not same(target, make(target["number"])):
                say("problem", text=f"a restore is torn, of save {target['number']}")
            say("restored")
        elif steps := ckpt.steps():
            report = ckpt.verify(chance.choice(steps))
            if not report.ok:
                say("problem", text=f"damaged: {report.damaged}")
            say("verified")
    except CheckpointNotFoundError:
        say("gone")


# -- the killer ------------------------------------------------------------------------------------


def run(  # noqa: C901 - starts, listens and kills in one loop
    root: Path, kinds: list[str], *, kills: int, seconds: float, seed: int
) -> Seen:
    """Kill so many processes, or for so long; what they said."""
    chance = random.Random(seed)  # noqa: S311
    seen = Seen()
    readable, writable = os.pipe()
    alive: dict[int, tuple[str, float]] = {}  # pid: role, when to kill it
    text = b""
    roles = itertools.cycle(ROLES)
    end = time.monotonic() + seconds

    def start(role: str) -> None:
        url, number = f"{chance.choice(kinds)}://{root}", chance.getrandbits(32)
        pid = fork(lambda: work(role, url, number, writable))
        # Half of them soon: most of what can be torn happens in the first save.
        life_s = chance.random() * chance.choice([0.06, 0.5])
        alive[pid] = (role, time.monotonic() + life_s)

    def listen(wait_s: float) -> None:
        nonlocal text
        while select.select([readable], [], [], wait_s)[0]:
            *lines, text = (text + os.read(readable, 1 << 16)).split(b"\n")
            for line in lines:
                seen.hear(json.loads(line))
            wait_s = 0

    def kill(pid: int) -> None:
        role, _ = alive.pop(pid)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            seen.kills[role] += 1
        else:
            seen.problems.append(f"a {role} ended by itself, with status {status}")

    while seen.kills.total() < kills and time.monotonic() < end and not seen.problems:
        while len(alive) < len(ROLES):
            start(next(roles))
        listen(max(0.0, min(when for _, when in alive.values()) - time.monotonic()))
        now = time.monotonic()
        for pid in [pid for pid, (_, when) in alive.items() if when <= now]:
            role = alive[pid][0]
            kill(pid)
            start(role)
    for pid in list(alive):
        kill(pid)
    listen(0)
    os.close(readable)
    os.close(writable)
    return seen


# -- what must hold --------------------------------------------------------------------------------


def check(root: Path, seen: Seen) -> list[str]:
    """Everything that is wrong with the run that was left behind."""
    problems = list(seen.problems)
    time.sleep(0.05)  # longer than the clock of the file system stands still
    with Checkpointer(f"posix://{root}", **OPTIONS, grace_s=1e-6) as ckpt:
        problems += wrong_checkpoints(ckpt, seen)
        report = ckpt.prune(everything=True)
        problems += [f"prune refuses: {why}" for why in report.refused]
        seen.counts["uids left to prune"] = len(report.uids)
        borrowed = [r.borrowed for r in survey_run(ckpt._backend).records.values()]  # noqa: SLF001
        seen.counts["steps that borrow"] = sum(map(bool, borrowed))
        seen.counts["steps that share"] = sum(  # what moves a little is encoded
            any(blob.name.endswith(".raw") for blob in blobs) for blobs in borrowed
        )
        problems += [f"garbage that prune leaves: {path}" for path in garbage(root, ckpt)]
        problems += [f"after prune: {problem}" for problem in wrong_checkpoints(ckpt, seen)]
    with Checkpointer(f"posix://{root}", **OPTIONS) as ckpt:
        ckpt.save(make(1), (ckpt.latest() or 0) + 1, mode="blocking")
        if not same(ckpt.load(), make(1)):
            problems.append("the next save is not what was saved")
    return problems


def wrong_checkpoints(ckpt: Checkpointer, seen: Seen) -> list[str]:
    """Whatever is listed must be whole and of its step; what was durable must be listed."""
    problems = []
    steps = ckpt.steps()
    for step in steps:
        try:
            info = ckpt.info(step)
            number = info.metadata["number"]
            if (step, number) not in seen.started:
                problems.append(f"step {step} holds save {number}, which nobody began")
            if not same(ckpt.load(step), make(number)):
                problems.append(f"step {step} is torn")
            if not (report := ckpt.verify(step)).ok:
                problems.append(f"step {step} is damaged: {report.damaged}")
            if seen.kept.get(step, (number, info.uid)) != (number, info.uid):
                problems.append(f"step {step} is not what was durable")
        except PenstockError as error:
            problems.append(f"step {step}: {type(error).__name__}: {error}")
    problems += [f"step {s} was durable, and is gone" for s in sorted(seen.kept.keys() - {*steps})]
    return problems


def garbage(root: Path, ckpt: Checkpointer) -> list[str]:
    """Files and empty folders that no commit record explains."""
    survey = survey_run(ckpt._backend)  # noqa: SLF001 - there is no public list of what is needed
    uids = survey.named
    lent = survey.used - uids  # of deleted checkpoints that later ones are encoded against
    left = []
    for folder, folders, files in os.walk(root):
        names = Path(folder).relative_to(root).parts
        ours = names[:1] == ("commits",) or (len(names) > 1 and names[1] in uids)
        for file in files:
            name = "/".join([*names, file])
            if file.startswith("~") or not (ours or blob_uid(name) in lent):
                left.append(name)
        if not folders and not files and len(names) > 1:
            left.append("/".join(names) + "/")
    return left


# --------------------------------------------------------------------------------------------------


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="in all, over the kinds")
    parser.add_argument("--seconds", type=float, default=600, help="at most, over the kinds")
    parser.add_argument("--kind", choices=["posix", "uring", "mixed", "all"], default="all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--root", type=Path, help="parent of the roots; default: temporary")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("penstock").propagate = False  # what matters is told with the problem
    wanted = ["posix", "uring", "mixed"] if options.kind == "all" else [options.kind]
    if missing := uring_missing():
        print(f"only posix: io_uring is missing: {missing}")
        wanted = ["posix"]
    default_registry().listing()  # imports every plugin, so that no child has to
    parent = Path(tempfile.mkdtemp(prefix="penstock-kills-", dir=options.root))
    wrong = 0
    print(f"seed {options.seed}, under {parent}", flush=True)
    # All runs before the first check: that starts threads, and a fork would not be whole.
    runs = []
    for number, kind in enumerate(wanted):
        began = time.monotonic()
        kinds = ["posix", "uring"] if kind == "mixed" else [kind]
        seen = run(
            parent / kind,
            kinds,
            kills=options.kills // len(wanted) + (number < options.kills % len(wanted)),
            seconds=options.seconds / len(wanted),
            seed=options.seed + number,
        )
        runs.append((kind, seen, time.monotonic() - began))
    for kind, seen, seconds in runs:
        problems = check(parent / kind, seen)
        wrong += len(problems)
        print(
            f"{kind}: {seen.kills.total()} kills in {seconds:.0f} s {json.dumps(seen.kills)}\n"
            f"  {json.dumps(seen.counts)}\n"
            f"  {len(seen.kept)} kept steps, {len(problems)} problems",
            flush=True,
        )
        for problem in problems[:20]:
            print(f"  PROBLEM {problem}")
    if wrong == 0:
        shutil.rmtree(parent)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
