"""Kills processes that save, prune, delete and restore in one run, and looks what is left.

    python tools/kill_savers.py --kills 1000 --seconds 600
    python tools/kill_savers.py --ranks --kills 100 --seconds 600

Several savers work on one run at once, beside them a pruner, a deleter and a reader; each is
killed (SIGKILL) at a random moment and replaced. Every state says which save it belongs to, so a
checkpoint that is whole but wrong is found too. Ends with 1 where anything was wrong.

With `--ranks` two jobs of two to four ranks each save and restore on one root. One rank of each,
often rank 0, is killed or stopped (SIGSTOP) at a random moment; the others have to name it, a job
of fewer ranks begins at once, and a stopped rank is woken later. A pruner and a reader continue. In
half of the jobs, by chance, rank 0 hosts the store of the job, as it does without torchrun.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

# Of a rank 0 that takes the store with it the C++ library prints a stack at each call.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

from killing import Reports, end, fork, parser, show_where
from tests.integration.atomic import forked_ranks
from tests.integration.atomic.forked_savers import OPTIONS, make
from tests.integration.support import same, uring_missing

from penstock import (
    Checkpointer,
    CheckpointNotFoundError,
    CommitUnknownError,
    LostRaceError,
    PenstockError,
    SaveAbortedError,
    StepExistsError,
)
from penstock.core.catalog.survey import survey_run
from penstock.core.format.records import blob_uid
from penstock.core.plugins.registry import default_registry

KEEP_EVERY = 10
"""Nobody deletes or overwrites a multiple of it, so a durable save of one must stay."""
GRACE_S = 2.0
ROLES = ("saver", "saver", "saver", "pruner", "deleter", "reader")
LARGEST_NUMBER = 1 << 24  # float32 holds it exactly
SPARE_STEPS = 4  # that the deleter leaves
JOBS = 2  # of several ranks at once
# A rank that reports nothing for so long hangs. The promise is 1.25 times the time-out, but so many
# processes may share few cores.
LIMIT_S = 20 * forked_ranks.RANK_TIMEOUT_S


@dataclass
class Seen:
    """What the processes of a run reported before they were killed."""

    started: set[tuple[int, int]] = field(default_factory=set)  # step, number
    kept: dict[int, tuple[int, str]] = field(default_factory=dict)  # step: number, uid
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
        elif message["what"] == "durable" and message["step"] % KEEP_EVERY == 0:
            save = (message["number"], message["uid"])
            if self.kept.setdefault(message["step"], save) != save:
                self.problems.append(f"step {message['step']} was won twice")
        elif message["what"] == "problem":
            self.problems.append(message["text"])


# -- the processes ---------------------------------------------------------------------------------


def work(role: str, url: str, seed: int, reports: Reports) -> None:
    """Be one of the processes until killed."""
    chance, options = random.Random(seed), {}  # noqa: S311
    if role == "saver":
        options["share"] = chance.random() < 0.75  # noqa: PLR2004
        if chance.random() < 0.5:  # noqa: PLR2004
            options["retention"] = {"keep_last": SPARE_STEPS, "keep_every": KEEP_EVERY}
    with Checkpointer(url, grace_s=GRACE_S, **(OPTIONS | options)) as ckpt:
        reports.say(role)
        while True:
            globals()[role](ckpt, chance, reports.say)


def saver(ckpt: Checkpointer, chance: random.Random, say: Any) -> None:
    """Save at a next step, or over one that may be replaced."""
    steps = ckpt.steps()
    step = (steps[-1] if steps else 0) + chance.randint(1, 3)
    spare = [s for s in steps if s % KEEP_EVERY]
    overwrite = bool(spare) and chance.random() < 0.25  # noqa: PLR2004
    if overwrite:
        step = chance.choice(spare)
    number, mode = chance.randrange(1, LARGEST_NUMBER), chance.choice(["blocking", "async"])
    began = time.monotonic()
    say("started", step=step, number=number)
    how = {"mode": mode, "overwrite": overwrite, "metadata": {"number": number}}
    try:
        report = ckpt.save(make(number), step, **how).result()
    except (StepExistsError, LostRaceError):
        say("overtaken")
    except SaveAbortedError:
        say("too slow")
    except CommitUnknownError:
        if step % KEEP_EVERY == 0:
            raise
        say("unknown")  # the winner's record was deleted before it could be read
    except PenstockError as error:
        if time.monotonic() - began < GRACE_S / 2:
            raise
        say("too slow", text=str(error))  # its data may have been pruned meanwhile
    else:
        say("durable", step=step, number=number, uid=report.uid)


def pruner(ckpt: Checkpointer, chance: random.Random, say: Any) -> None:
    """Collect what the killed ones have left."""
    report = ckpt.prune(everything=True)
    if report.refused:
        say("problem", text=f"prune refused: {report.refused}")
    say("pruned" if report.uids else "pruned nothing")
    time.sleep(chance.random() * 0.05)


def deleter(ckpt: Checkpointer, chance: random.Random, say: Any) -> None:
    """Delete a checkpoint, unless there are few."""
    spare = [step for step in ckpt.steps() if step % KEEP_EVERY]
    if len(spare) > SPARE_STEPS:
        try:
            ckpt.delete(chance.choice(spare))
        except CheckpointNotFoundError:
            return
        say("deleted")
    time.sleep(chance.random() * 0.02)


def reader(ckpt: Checkpointer, chance: random.Random, say: Any) -> None:
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


def watcher(ckpt: Checkpointer, chance: random.Random, say: Any) -> None:
    """Read as the reader does, and report the latest step, which never goes back."""
    reader(ckpt, chance, say)
    say("latest", step=ckpt.latest() or 0)


# -- the killer ------------------------------------------------------------------------------------


class Crowd:
    """Several processes that work on one root until they are killed."""

    def __init__(self, root: Path, kinds: list[str], seed: int) -> None:
        """Prepare; nothing is started."""
        self.seen = Seen()
        self._root, self._kinds = root, kinds
        self._chance = random.Random(seed)  # noqa: S311
        self._reports = Reports()
        self._alive: dict[int, tuple[str, float]] = {}  # pid: role, when to kill it

    def run(self, kills: int, seconds: float) -> Seen:
        """Kill so many processes, or for so long; what they reported."""
        end_s = time.monotonic() + seconds
        while self.seen.kills.total() < kills and time.monotonic() < end_s:
            self._turn()
            if self.seen.problems:
                break
        self._finish()
        for pid in list(self._alive):
            self._kill(pid)
        self._listen(0)
        self._reports.close()
        return self.seen

    def _turn(self) -> None:
        for role in ROLES[len(self._alive) :]:
            self._start(role)
        self._listen(min(when for _, when in self._alive.values()) - time.monotonic())
        for pid in self._due():
            role = self._alive[pid][0]
            status = self._kill(pid)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                self.seen.kills[role] += 1
            else:
                self.seen.problems.append(f"a {role} ended by itself, with status {status}")
            self._start(role)

    def _finish(self) -> None:
        """Do what is left to do before the rest is killed."""

    def _start(self, role: str, life_s: float | None = None) -> None:
        url, seed = f"{self._chance.choice(self._kinds)}://{self._root}", self._chance.random()
        pid = fork(role, self._reports, lambda: work(role, url, int(seed * 2**32), self._reports))
        if life_s is None:
            # Half of them soon: most of what can be torn happens in the first save.
            life_s = self._chance.random() * self._chance.choice([0.06, 0.5])
        self._alive[pid] = role, time.monotonic() + life_s

    def _due(self) -> list[int]:
        now_s = time.monotonic()
        return [pid for pid, (_, when) in self._alive.items() if when <= now_s]

    def _kill(self, pid: int) -> int:
        del self._alive[pid]
        return end(pid)

    def _listen(self, wait_s: float) -> None:
        for message in self._reports.hear(wait_s):
            self.seen.hear(message)


# -- jobs of several ranks -------------------------------------------------------------------------


@dataclass
class RankJob:
    """A job of several ranks, of which one will be killed or stopped.

    Attributes:
        name: Its name in messages and on its hosts.
        server: The process that hosts its store, as an agent does; None: rank 0 does.
        pids: The processes of its ranks that have not ended.
        victim: The rank that is struck.
        how: The signal.
        strike_s: When; None: not all ranks are ready yet.
        struck_s: When it was struck; None: not yet.
        heard_s: When each rank reported something last, or was woken.
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
        """Take in what one of its ranks reports."""
        rank, now_s = message["rank"], message["at_s"]
        if rank not in self.pids:
            return  # it has ended
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


class RankJobs(Crowd):
    """Two jobs of several ranks on one root, each with fewer ranks where one has lost a rank."""

    def __init__(self, root: Path, kinds: list[str], seed: int) -> None:
        """Prepare; nothing is started."""
        super().__init__(root, kinds, seed)
        self._jobs: dict[str, RankJob] = {}
        self._numbers = itertools.count()
        self._latest = 0

    def _turn(self) -> None:
        while sum(job.struck_s is None for job in self._jobs.values()) < JOBS:
            self._start_job(self._chance.randint(2, 4))
        for pid in self._due():
            self._kill(pid)
        for role in {"pruner", "watcher"} - {role for role, _ in self._alive.values()}:
            self._start(role, 10 * self._chance.random())
        self._listen(0.02)
        for job in list(self._jobs.values()):
            self._look_after(job)

    def _finish(self) -> None:
        """Let all notice who is lost: else those that know late are counted the least often."""
        end_s = time.monotonic() + 2 * forked_ranks.RANK_TIMEOUT_S
        while time.monotonic() < end_s and not self.seen.problems:
            lost = [job for job in self._jobs.values() if job.lacks_one]
            if not lost:
                break
            self._listen(0.02)
            for job in lost:
                self._look_after(job)
        for job in self._jobs.values():
            for pid in [*job.pids.values(), job.server]:
                if pid is not None:
                    end(pid)

    def _start_job(self, world_size: int) -> None:
        name, seed = f"job{next(self._numbers)}", self._chance.getrandbits(32)
        url = f"{self._chance.choice(self._kinds)}://{self._root}"
        ready, told = os.pipe()

        def be(rank: int, port: int | None = None) -> None:
            def say(what: str, **more: Any) -> None:
                now_s = time.monotonic()  # one clock for all; this process may listen late
                self._reports.say(what, job=name, **({"rank": rank, "at_s": now_s} | more))

            store = forked_ranks.serve(told) if port is None else forked_ranks.reach(port)
            forked_ranks.Rank(
                url, store, name, rank=rank, world_size=world_size, seed=seed, say=say,
                grace_s=GRACE_S,
            ).run()  # fmt: skip

        def start(rank: int, body: Any) -> int:
            return fork(f"rank {rank} of {name}", self._reports, body)

        alone = self._chance.random() < 0.5  # noqa: PLR2004
        serve = partial(forked_ranks.serve_for_ever, told) if alone else partial(be, 0)
        first = start(0, serve)
        port = int(os.read(ready, 16))
        os.close(ready)
        os.close(told)
        server, pids = (first, {}) if alone else (None, {0: first})
        for rank in range(len(pids), world_size):
            pids[rank] = start(rank, partial(be, rank, port))
        how = self._chance.choice([signal.SIGKILL, signal.SIGSTOP])
        victim = self._chance.choice([0, self._chance.randrange(world_size)])
        self._jobs[name] = RankJob(name, server, pids, victim, how)

    def _listen(self, wait_s: float) -> None:
        for message in self._reports.hear(wait_s):
            self.seen.hear(message)
            if message["what"] == "latest":
                if message["step"] < self._latest:
                    self.seen.problems.append(f"the latest went back to {message['step']}")
                self._latest = message["step"]
            elif job := self._jobs.get(message.get("job", "")):
                job.hear(message, self.seen)

    def _look_after(self, job: RankJob) -> None:
        now_s = time.monotonic()
        if job.struck_s is None:
            delay_s = random.Random(job.name).random() * 1.5  # noqa: S311
            if job.strike_s is not None and now_s >= job.strike_s + delay_s:
                self._strike(job, now_s)
            return
        if job.sleeps_until_s is not None and now_s >= job.sleeps_until_s:
            os.kill(job.pids[job.victim], signal.SIGCONT)
            job.sleeps_until_s = None
            job.heard_s[job.victim] = now_s
        self._look_at_ranks(job, now_s)
        if not job.pids:
            if job.server is not None:
                end(job.server)
            del self._jobs[job.name]

    def _look_at_ranks(self, job: RankJob, now_s: float) -> None:
        for rank, rank_pid in list(job.pids.items()):
            if rank == job.victim and job.sleeps_until_s is not None:
                continue
            pid, status = os.waitpid(rank_pid, os.WNOHANG)
            if pid:
                del job.pids[rank]
                if status:
                    text = f"rank {rank} of {job.name} ended with status {status}"
                    self.seen.problems.append(text)
            elif now_s - max(job.heard_s[rank], job.struck_s) > LIMIT_S:
                self.seen.problems.append(f"rank {rank} of {job.name} hangs: {job}")
                show_where(rank_pid)

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
            self._start_job(fewer)  # while the others find out, and a stopped one sleeps


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


def main() -> int:
    """Run and print."""
    parsed = parser(__doc__, 600)
    parsed.add_argument("--kills", type=int, default=1000, help="in all, over the kinds")
    parsed.add_argument("--kind", choices=["posix", "uring", "mixed", "all"], default="all")
    parsed.add_argument("--ranks", action="store_true", help="jobs of several ranks")
    options = parsed.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    wanted = ["posix", "uring", "mixed"] if options.kind == "all" else [options.kind]
    if missing := uring_missing():
        print(f"only posix: io_uring is missing: {missing}")
        wanted = ["posix"]
    default_registry().listing()  # imports every plugin, so that no child has to
    parent = Path(tempfile.mkdtemp(prefix="penstock-kills-", dir=options.root))
    print(f"seed {options.seed}, under {parent}", flush=True)
    # All runs before the first check: that starts threads, and a fork would not be whole.
    runs = []
    for number, kind in enumerate(wanted):
        began = time.monotonic()
        kinds = ["posix", "uring"] if kind == "mixed" else [kind]
        kills = options.kills // len(wanted) + (number < options.kills % len(wanted))
        crowd = (RankJobs if options.ranks else Crowd)(parent / kind, kinds, options.seed + number)
        seen = crowd.run(kills, options.seconds / len(wanted))
        runs.append((kind, seen, time.monotonic() - began))
    wrong = 0
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
