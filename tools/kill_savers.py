"""Kills processes that save, prune, delete and restore in one run, and looks what is left.

    python tools/kill_savers.py --kills 1000 --seconds 600
    python tools/kill_savers.py --ranks --kills 100 --seconds 600

Several savers work on one run at once, beside them a pruner, a deleter and a reader; each is
killed (SIGKILL) at a random moment and replaced. Every state says which save it belongs to, so a
checkpoint that is whole but wrong is found too. Ends with 1 where anything was wrong.

With `--ranks` two jobs of two to four ranks each save and restore on one root. One rank of each,
often rank 0, is killed or stopped (SIGSTOP) at a random moment; the others have to name it, a job
of fewer ranks begins at once, and who was stopped is woken later. A pruner and a reader go on. In
half of the jobs, by chance, rank 0 hosts the store of the job, as it does without torchrun.
"""

from __future__ import annotations

import argparse
import faulthandler
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
from functools import partial
from pathlib import Path

# Of a rank 0 that takes the store with it the C++ library prints a stack at each call.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.integration.atomic import forked_ranks  # noqa: E402
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
JOBS = 2  # of several ranks at once
# A rank that says nothing for so long hangs. The promise is 1.25 times the time-out, but so many
# processes may share few cores.
LIMIT_S = 20 * forked_ranks.RANK_TIMEOUT_S


@dataclass
class Seen:
    """What the processes of a run said before they were killed."""

    started: set[tuple[int, int]] = field(default_factory=set)  # step, number
    durable: dict[int, tuple[int, str]] = field(default_factory=dict)  # step: number, uid
    kept: dict[int, tuple[int, str]] = field(default_factory=dict)  # the same, never deleted
    counts: Counter = field(default_factory=Counter)
    kills: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    known: list[tuple[float, str]] = field(default_factory=list)
    """The seconds until ranks knew that one was lost, and who was lost, who knew, and why."""

    def hear(self, message: dict) -> None:
        """Take in one message."""
        self.counts[message["what"]] += 1
        if message["what"] == "started":
            self.started.add((message["step"], message["number"]))
        elif message["what"] == "durable":
            save = (message["number"], message["uid"])
            self.durable[message["step"]] = save
            if message["step"] % KEEP_EVERY == 0:
                if self.kept.get(message["step"], save) != save:
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


def watcher(ckpt: Checkpointer, chance: random.Random, say: object) -> None:
    """Read as the reader does, and tell the latest step, which never goes back."""
    reader(ckpt, chance, say)
    say("latest", step=ckpt.latest() or 0)


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


# -- jobs of several ranks -------------------------------------------------------------------------


@dataclass
class RankJob:
    """A job of several ranks, of which one will be killed or stopped.

    Attributes:
        name: Its name in messages and on its hosts.
        server: The process that hosts its store, as an agent does; None: rank 0 does.
        pids: The processes of its ranks; who has ended is gone.
        victim: The rank that is struck.
        how: The signal.
        strike_s: When; None: not all ranks are ready yet.
        struck_s: When it was struck; None: not yet.
        heard_s: When each rank said something last, or was woken.
        sleeps_until_s: When the victim is woken; None: it does not sleep.
    """

    name: str
    server: int | None
    pids: dict[int, int]
    victim: int
    how: signal.Signals
    strike_s: float | None = None
    struck_s: float | None = None
    heard_s: dict[int, float] = field(default_factory=dict)
    sleeps_until_s: float | None = None

    def hear(self, message: dict, seen: Seen) -> None:
        """Take in what one of its ranks says."""
        rank, now_s = message["rank"], message["at_s"]
        if rank not in self.pids:
            return  # its last words
        before_s, self.heard_s[rank] = self.heard_s.get(rank, now_s), now_s
        if len(self.heard_s) == len(self.pids) and self.strike_s is None:
            self.strike_s = now_s
        if message["what"] not in {"lost", "unknown"} or rank == self.victim:
            return
        if self.struck_s is not None and self.heard_s.get(self.victim, 0.0) <= self.struck_s:
            with_store = " with the store" if self.server is None and not self.victim else ""
            who = f"{self.how.name} of rank {self.victim}{with_store}, as rank {rank} knew"
            seen.known.append((now_s - max(before_s, self.struck_s), f"{who}: {message['cause']}"))
        if message["what"] == "unknown":
            return
        if message["host"] not in {f"{self.name}-{message['named']}", ""}:
            seen.problems.append(f"rank {rank} of {self.name} names a wrong host: {message}")
        # A rank that gets no time of a busy machine stands still as well as one that was stopped.
        named = {self.victim: "the lost rank", -1: "nobody"}.get(message["named"], "another")
        seen.counts[f"named {named}"] += 1

    @property
    def lacks_one(self) -> bool:
        """Whether its lost rank is not back, and others are there that have to notice it."""
        is_back = self.how is signal.SIGSTOP and self.sleeps_until_s is None
        return self.struck_s is not None and not is_back and bool(self.pids.keys() - {self.victim})

    def ends(self, rank: int, seen: Seen) -> bool:
        """Whether a rank has ended; how it did is looked at."""
        pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
        if pid and status:
            seen.problems.append(f"rank {rank} of {self.name} ended with status {status}")
        return bool(pid)


class RankJobs:
    """Two jobs of several ranks on one root, each with fewer ranks where one has lost a rank."""

    def __init__(self, root: Path, kinds: list[str], seed: int) -> None:
        """Prepare; nothing is started."""
        self.seen = Seen()
        self._root, self._kinds = root, kinds
        self._chance = random.Random(seed)  # noqa: S311
        self._jobs: dict[str, RankJob] = {}
        self._numbers = itertools.count()
        self._readable, self._writable = os.pipe()
        self._text = b""
        self._others: dict[int, tuple[str, float]] = {}  # pid of pruner or watcher: role, its end
        self._latest = 0

    def run(self, kills: int, seconds: float) -> Seen:
        """Strike so many ranks, or for so long; what they said."""
        end_s = time.monotonic() + seconds
        while (
            self.seen.kills.total() < kills and time.monotonic() < end_s and not self.seen.problems
        ):
            while sum(job.struck_s is None for job in self._jobs.values()) < JOBS:
                self._start(self._chance.randint(2, 4))
            self._keep_others()
            self._listen(0.02)
            for job in list(self._jobs.values()):
                self._go_on(job)
        self._wait_until_known()
        for job in self._jobs.values():
            for pid in [*job.pids.values(), job.server]:
                if pid is not None:
                    end(pid)
        for pid in self._others:
            end(pid)
        self._listen(0)
        os.close(self._readable)
        os.close(self._writable)
        return self.seen

    def _wait_until_known(self) -> None:
        """Let all notice who is lost: else those that know late are counted the least often."""
        end_s = time.monotonic() + 2 * forked_ranks.RANK_TIMEOUT_S
        while time.monotonic() < end_s and not self.seen.problems:
            lost = [job for job in self._jobs.values() if job.lacks_one]
            if not lost:
                return
            self._listen(0.02)
            for job in lost:
                self._go_on(job)

    def _start(self, world_size: int) -> None:
        name, seed = f"job{next(self._numbers)}", self._chance.getrandbits(32)
        url = f"{self._chance.choice(self._kinds)}://{self._root}"
        ready, told = os.pipe()

        def be(rank: int, port: int | None = None) -> None:
            def say(what: str, **more: object) -> None:
                now_s = time.monotonic()  # one clock for all; this process may listen late
                message = {"what": what, "job": name, "rank": rank, "at_s": now_s, **more}
                os.write(self._writable, json.dumps(message).encode() + b"\n")

            faulthandler.register(signal.SIGUSR1)
            try:
                forked_ranks.Rank(
                    url,
                    forked_ranks.serve(told) if port is None else forked_ranks.reach(port),
                    name,
                    rank=rank,
                    world_size=world_size,
                    seed=seed,
                    say=say,
                    grace_s=GRACE_S,
                ).run()
            except BaseException as error:
                say("problem", text=f"rank {rank} of {name}: {type(error).__name__}: {error}")
                raise

        alone = self._chance.random() < 0.5  # noqa: PLR2004
        first = fork(partial(forked_ranks.serve_for_ever, told) if alone else partial(be, 0))
        port = int(os.read(ready, 16))
        os.close(ready)
        os.close(told)
        server, pids = (first, {}) if alone else (None, {0: first})
        for rank in range(len(pids), world_size):
            pids[rank] = fork(partial(be, rank, port))
        how = self._chance.choice([signal.SIGKILL, signal.SIGSTOP])
        victim = self._chance.choice([0, self._chance.randrange(world_size)])
        self._jobs[name] = RankJob(name, server, pids, victim, how)

    def _keep_others(self) -> None:
        """Keep a pruner and a watcher alive, each for some seconds."""
        now_s = time.monotonic()
        for pid in [pid for pid, (_, end_s) in self._others.items() if end_s <= now_s]:
            del self._others[pid]
            end(pid)
        for role in {"pruner", "watcher"} - {role for role, _ in self._others.values()}:
            url, seed = f"posix://{self._root}", self._chance.getrandbits(32)
            pid = fork(partial(work, role, url, seed, self._writable))
            self._others[pid] = role, now_s + 10 * self._chance.random()

    def _listen(self, wait_s: float) -> None:
        while select.select([self._readable], [], [], wait_s)[0]:
            *lines, self._text = (self._text + os.read(self._readable, 1 << 16)).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self.seen.hear(message)
                if message["what"] == "latest":
                    if message["step"] < self._latest:
                        self.seen.problems.append(f"the latest went back to {message['step']}")
                    self._latest = message["step"]
                elif job := self._jobs.get(message.get("job", "")):
                    job.hear(message, self.seen)
            wait_s = 0

    def _go_on(self, job: RankJob) -> None:
        now_s = time.monotonic()
        if job.struck_s is None:
            if job.strike_s is not None and now_s >= job.strike_s + self._delay_s(job):
                self._strike(job, now_s)
            return
        if job.sleeps_until_s is not None and now_s >= job.sleeps_until_s:
            os.kill(job.pids[job.victim], signal.SIGCONT)
            job.sleeps_until_s = None
            job.heard_s[job.victim] = now_s
        for rank in list(job.pids):
            if rank == job.victim and job.sleeps_until_s is not None:
                continue
            if job.ends(rank, self.seen):
                del job.pids[rank]
            elif now_s - max(job.heard_s[rank], job.struck_s) > LIMIT_S:
                self.seen.problems.append(f"rank {rank} of {job.name} hangs: {job}")
                os.kill(job.pids[rank], signal.SIGUSR1)  # prints where
                time.sleep(1)
        if not job.pids:
            if job.server is not None:
                end(job.server)
            del self._jobs[job.name]

    def _delay_s(self, job: RankJob) -> float:
        return random.Random(job.name).random() * 1.5  # noqa: S311

    def _strike(self, job: RankJob, now_s: float) -> None:
        pid = job.pids[job.victim]
        os.kill(pid, job.how)
        job.struck_s = now_s
        self.seen.kills[f"{job.how.name} of {'rank 0' if not job.victim else 'another'}"] += 1
        if job.how is signal.SIGSTOP:
            job.sleeps_until_s = now_s + self._chance.random() * self._chance.choice([2, 12])
        else:
            os.waitpid(pid, 0)
            del job.pids[job.victim]
        fewer = len(job.pids) - (job.how is signal.SIGSTOP)
        if fewer > 1:
            self._start(fewer)  # while the others find out, and a stopped one sleeps


def end(pid: int) -> None:
    """Kill a process, and wait for it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


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
    parser.add_argument("--ranks", action="store_true", help="jobs of several ranks")
    parser.add_argument("--root", type=Path, help="parent of the roots; default: temporary")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("penstock").propagate = False  # what matters is told with the problem
    logging.getLogger("penstock").addHandler(logging.NullHandler())
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
        kills = options.kills // len(wanted) + (number < options.kills % len(wanted))
        limit_s, seed = options.seconds / len(wanted), options.seed + number
        if options.ranks:
            seen = RankJobs(parent / kind, kinds, seed).run(kills, limit_s)
        else:
            seen = run(parent / kind, kinds, kills=kills, seconds=limit_s, seed=seed)
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
        if seen.known:
            limit = f"{forked_ranks.RANK_TIMEOUT_S:g} s"
            print(f"  {len(seen.known)} times a rank knew of a lost one; of {limit} the slowest:")
            for took_s, why in sorted(seen.known, reverse=True)[:5]:
                print(f"    {took_s:.2f} s, {why[:120]}")
        for problem in problems[:20]:
            print(f"  PROBLEM {problem}")
    if wrong == 0:
        shutil.rmtree(parent)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
