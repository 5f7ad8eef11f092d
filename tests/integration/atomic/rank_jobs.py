"""Jobs of several ranks on one root; one rank of each is killed or stopped at random.

    python -m tests.integration.atomic.rank_jobs --kills 100 --seconds 600

Two jobs of two to four ranks save and restore on one root. A rank of each, often rank 0, is killed
(SIGKILL) or stopped (SIGSTOP) at a random moment; the others must name it, a job of fewer ranks
starts at once, and a stopped rank is woken later. A pruner and a reader work at the same time, and
are killed and replaced. In half of the jobs rank 0 hosts the store of the job, as without torchrun.
Exits with 1 on any error.
"""

from __future__ import annotations

import argparse
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

# The C++ library prints a stack at each call to a store that ended with its rank 0.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

from tests.integration.atomic import forked_ranks
from tests.integration.atomic.forked_savers import OPTIONS, make
from tests.integration.atomic.forking import Reports, end, fork, show_where
from tests.integration.support import same, uring_missing

from penstock import Checkpointer, CheckpointNotFoundError, PenstockError
from penstock.core.catalog.survey import survey_run
from penstock.core.format.records import blob_uid
from penstock.core.plugins.registry import default_registry

KEEP_EVERY = 10  # retention keeps the multiples of it
GRACE_S = 2.0
JOBS = 2
# A rank without a report for this long hangs. The promise is 1.25 times the timeout, but many
# processes share few cores here.
LIMIT_S = 20 * forked_ranks.RANK_TIMEOUT_S


@dataclass
class Job:
    """A job of several ranks; a signal strikes one.

    Attributes:
        name: Its name in messages and on its hosts.
        server: The process that hosts its store, as an agent does; None: rank 0 does.
        pids: The processes of its ranks that have not ended.
        victim: The struck rank.
        how: The signal.
        strike_s: When to strike; None: not all ranks are ready yet.
        struck_s: When it was struck; None: not yet.
        heard_s: When each rank last reported, or was woken.
        wake_s: When the victim is woken; None: it does not sleep.
    """

    name: str
    server: int | None
    pids: dict[int, int]
    victim: int
    how: signal.Signals
    strike_s: float | None = None
    struck_s: float | None = None
    heard_s: dict[int, float] = field(default_factory=dict)
    wake_s: float | None = None

    @property
    def lacks_one(self):
        """Whether its victim is still out, and other ranks have yet to notice."""
        is_back = self.how is signal.SIGSTOP and self.wake_s is None
        return self.struck_s is not None and not is_back and bool(self.pids.keys() - {self.victim})


def prune(ckpt, chance, say):
    report = ckpt.prune(everything=True)
    if report.refused:
        say("problem", text=f"prune refused: {report.refused}")
    time.sleep(chance.random() * 0.05)


def read(ckpt, chance, say):
    """Restore the latest step or verify any, and report the latest, which never goes back."""
    try:
        if chance.random() < 0.5:
            target = make(0)
            ckpt.restore(target)
            if not same(target, make(target["number"])):
                say("problem", text=f"a restore is torn, of save {target['number']}")
        elif (steps := ckpt.steps()) and not (report := ckpt.verify(chance.choice(steps))).ok:
            say("problem", text=f"damaged: {report.damaged}")
    except CheckpointNotFoundError:
        say("gone")
    say("latest", step=ckpt.latest() or 0)


class Jobs:
    """Runs jobs on one root, and strikes them."""

    def __init__(self, root, seed):
        self.root, self.chance, self.reports = root, random.Random(seed), Reports()
        self.schemes = ["posix"] if uring_missing() else ["posix", "uring"]
        self.jobs, self.numbers, self.latest = {}, itertools.count(), 0
        self.helpers = {}  # pid: body, when to kill it
        self.started, self.kept = set(), {}  # (step, number); step: (number, uid)
        self.counts, self.strikes, self.problems = Counter(), Counter(), []
        self.known = []  # seconds until a rank knew of the lost one, and the reason

    def run(self, kills, seconds):
        """Strike this many times, or for this long."""
        end_s = time.monotonic() + seconds
        while self.strikes.total() < kills and time.monotonic() < end_s and not self.problems:
            while sum(job.struck_s is None for job in self.jobs.values()) < JOBS:
                self.start_job(self.chance.randint(2, 4))
            for pid in [p for p, (_, when_s) in self.helpers.items() if when_s < time.monotonic()]:
                del self.helpers[pid]
                end(pid)
            for body in {prune, read} - {body for body, _ in self.helpers.values()}:
                pid = fork(body.__name__, self.reports, partial(self.help, body))
                self.helpers[pid] = body, time.monotonic() + 10 * self.chance.random()
            self.look(self.jobs)
        # All notice the lost rank: or late ones would be counted too rarely.
        end_s = time.monotonic() + 2 * forked_ranks.RANK_TIMEOUT_S
        while time.monotonic() < end_s and not self.problems:
            if not (lost := {name: job for name, job in self.jobs.items() if job.lacks_one}):
                break
            self.look(lost)
        ranks = [pid for job in self.jobs.values() for pid in [*job.pids.values(), job.server]]
        for pid in filter(None, [*ranks, *self.helpers]):
            end(pid)
        self.listen(0)
        self.reports.close()

    def help(self, body):
        chance = random.Random(os.getpid())
        with Checkpointer(f"posix://{self.root}", grace_s=GRACE_S, **OPTIONS) as ckpt:
            while True:
                body(ckpt, chance, self.reports.say)

    def start_job(self, world_size):
        name, seed = f"job{next(self.numbers)}", self.chance.getrandbits(32)
        url = f"{self.chance.choice(self.schemes)}://{self.root}"
        ready, is_ready = os.pipe()

        def be(rank, port=None):
            def say(what, **more):
                now_s = time.monotonic()  # one clock for all; the parent may listen late
                self.reports.say(what, job=name, **({"rank": rank, "at_s": now_s} | more))

            store = forked_ranks.serve(is_ready) if port is None else forked_ranks.reach(port)
            forked_ranks.Rank(
                url, store, name, rank=rank, world_size=world_size, seed=seed, say=say,
                grace_s=GRACE_S,
            ).run()  # fmt: skip

        def start(rank, body):
            return fork(f"rank {rank} of {name}", self.reports, body)

        alone = self.chance.random() < 0.5
        first = start(0, partial(forked_ranks.serve_forever, is_ready) if alone else partial(be, 0))
        port = int(os.read(ready, 16))
        os.close(ready)
        os.close(is_ready)
        server, pids = (first, {}) if alone else (None, {0: first})
        for rank in range(len(pids), world_size):
            pids[rank] = start(rank, partial(be, rank, port))
        how = self.chance.choice([signal.SIGKILL, signal.SIGSTOP])
        victim = self.chance.choice([0, self.chance.randrange(world_size)])
        self.jobs[name] = Job(name, server, pids, victim, how)

    def listen(self, wait_s):
        for message in self.reports.hear(wait_s):
            what, step = message["what"], message.get("step")
            self.counts[what] += 1
            if what == "started":
                self.started.add((step, message["number"]))
            elif what == "durable" and step % KEEP_EVERY == 0:
                save = message["number"], message["uid"]
                if self.kept.setdefault(step, save) != save:
                    self.problems.append(f"step {step} was won twice")
            elif what == "problem":
                self.problems.append(message["text"])
            elif what == "latest":
                if step < self.latest:
                    self.problems.append(f"the latest went back to {step}")
                self.latest = step
            job = self.jobs.get(message.get("job"))
            if job and message["rank"] in job.pids:
                self.hear(job, message)

    def hear(self, job, message):
        """Record the report of a rank of a job."""
        rank, now_s, what = message["rank"], message["at_s"], message["what"]
        before_s, job.heard_s[rank] = job.heard_s.get(rank, now_s), now_s
        if len(job.heard_s) == len(job.pids) and job.strike_s is None:
            job.strike_s = now_s + self.chance.random() * 1.5
        if what not in {"lost", "unknown"} or rank == job.victim:
            return
        if job.struck_s is not None and job.heard_s.get(job.victim, 0.0) <= job.struck_s:
            with_store = " with the store" if job.server is None and not job.victim else ""
            who = f"{job.how.name} of rank {job.victim}{with_store}, as rank {rank} knew"
            self.known.append((now_s - max(before_s, job.struck_s), f"{who}: {message['cause']}"))
        if what == "lost":
            if message["host"] not in {f"{job.name}-{message['named']}", ""}:
                self.problems.append(f"rank {rank} of {job.name} names a wrong host: {message}")
            # A rank without CPU time on a busy machine stalls like a stopped one.
            named = {job.victim: "the lost rank", -1: "nobody"}.get(message["named"], "another")
            self.counts[f"named {named}"] += 1

    def look(self, jobs):
        """Listen for a moment, then strike, wake, and check which ranks have ended or hang."""
        self.listen(0.02)
        for job in list(jobs.values()):
            now_s = time.monotonic()
            if job.struck_s is None:
                if job.strike_s is not None and now_s >= job.strike_s:
                    self.strike(job, now_s)
                continue
            if job.wake_s is not None and now_s >= job.wake_s:
                os.kill(job.pids[job.victim], signal.SIGCONT)
                job.wake_s, job.heard_s[job.victim] = None, now_s
            for rank, pid in list(job.pids.items()):
                if rank == job.victim and job.wake_s is not None:
                    continue
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del job.pids[rank]
                    if status:
                        self.problems.append(f"rank {rank} of {job.name} ended with {status}")
                elif now_s - max(job.heard_s[rank], job.struck_s) > LIMIT_S:
                    self.problems.append(f"rank {rank} of {job.name} hangs: {job}")
                    show_where(pid)
            if not job.pids:
                if job.server is not None:
                    end(job.server)
                del self.jobs[job.name]

    def strike(self, job, now_s):
        pid = job.pids[job.victim]
        os.kill(pid, job.how)
        job.struck_s = now_s
        self.strikes[f"{job.how.name} of {'another' if job.victim else 'rank 0'}"] += 1
        fewer = len(job.pids) - 1
        if job.how is signal.SIGSTOP:
            job.wake_s = now_s + self.chance.random() * self.chance.choice([2, 12])
        else:
            os.waitpid(pid, 0)
            del job.pids[job.victim]
        if fewer > 1:
            self.start_job(fewer)  # while the others notice, and a stopped one sleeps

    def check(self):
        """Add all errors of the remaining run."""
        time.sleep(0.05)  # longer than a tick of the file system's clock
        with Checkpointer(f"posix://{self.root}", **OPTIONS, grace_s=1e-6) as ckpt:
            self.check_steps(ckpt)
            report = ckpt.prune(everything=True)
            self.problems += [f"prune refuses: {why}" for why in report.refused]
            self.problems += [f"prune leaves {name}" for name in garbage(self.root, ckpt)]
            self.check_steps(ckpt)
        with Checkpointer(f"posix://{self.root}", **OPTIONS) as ckpt:
            ckpt.save(make(1), (ckpt.latest() or 0) + 1, mode="blocking")
            if not same(ckpt.load(), make(1)):
                self.problems.append("the next save is not what was saved")

    def check_steps(self, ckpt):
        steps = ckpt.steps()
        for step in steps:
            try:
                info = ckpt.info(step)
                number = info.metadata["number"]
                if (step, number) not in self.started:
                    self.problems.append(f"step {step} holds save {number}, which nobody began")
                if not same(ckpt.load(step), make(number)):
                    self.problems.append(f"step {step} is torn")
                if not (report := ckpt.verify(step)).ok:
                    self.problems.append(f"step {step} is damaged: {report.damaged}")
                if self.kept.get(step, (number, info.uid)) != (number, info.uid):
                    self.problems.append(f"step {step} is not what was durable")
            except PenstockError as error:
                self.problems.append(f"step {step}: {type(error).__name__}: {error}")
        gone = sorted(self.kept.keys() - {*steps})
        self.problems += [f"step {step} was durable, and is gone" for step in gone]


def garbage(root, ckpt):
    """Return files and empty folders that no commit record explains."""
    survey = survey_run(ckpt._backend)
    lent = survey.used - survey.named  # of deleted checkpoints that are bases of later ones
    left = []
    for folder, folders, files in os.walk(root):
        names = Path(folder).relative_to(root).parts
        ours = names[:1] == ("commits",) or (len(names) > 1 and names[1] in survey.named)
        paths = ["/".join([*names, file]) for file in files]
        left += [p for p in paths if "~" in p or not (ours or blob_uid(p) in lent)]
        if not folders and not files and len(names) > 1:
            left.append("/".join(names) + "/")
    return left


def main():
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="at most")
    parser.add_argument("--seconds", type=float, default=600, help="at most")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(24))
    parser.add_argument("--root", type=Path, help="parent of the root; default: temporary")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    default_registry().listing()  # imports every plugin, so that no child has to
    parent = Path(tempfile.mkdtemp(prefix="penstock-ranks-", dir=options.root))
    print(f"seed {options.seed}, under {parent}", flush=True)
    jobs = Jobs(parent / "run", options.seed)
    jobs.run(options.kills, options.seconds)
    jobs.check()
    print(f"{jobs.strikes.total()} kills: {json.dumps(jobs.strikes)}, {json.dumps(jobs.counts)}")
    print(f"{len(jobs.known)} times a rank knew of a lost one, the slowest of a time-out of "
          f"{forked_ranks.RANK_TIMEOUT_S:g} s:")  # fmt: skip
    for took_s, why in sorted(jobs.known, reverse=True)[:5]:
        print(f"    {took_s:.2f} s, {why[:120]}")
    for problem in jobs.problems[:20]:
        print(f"  PROBLEM {problem}")
    print(f"{len(jobs.problems)} problems")
    if not jobs.problems:
        shutil.rmtree(parent)
    return bool(jobs.problems)


if __name__ == "__main__":
    sys.exit(main())
