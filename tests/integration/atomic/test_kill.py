"""Processes really killed during saves: all listed steps are whole, old or new."""

from __future__ import annotations

import random
import signal
import subprocess
import sys

import pytest
import torch
from tests.integration.atomic.crash_scenarios import check_no_garbage
from tests.integration.atomic.forked_savers import STEP, Forker, make
from tests.integration.atomic.run_model import KEEP_EVERY, Model
from tests.integration.support import ROOT, checkpointer, same

from penstock.testing.faults import OPERATIONS

KEEP_LAST = 2


@pytest.fixture(scope="module")
def killer():
    with Forker() as forker:

        def kill(**request):
            answer = forker.ask("kill", **request)
            assert answer["signal"] == signal.SIGKILL, "it ended by itself"
            return answer

        yield kill


class Watch:
    """A run of successive savers, and its required contents after each kill."""

    def __init__(self, root, kind, *, overwrite=False, share=False):
        self.url = f"{kind}://{root}"
        self.root = root
        self.overwrite = overwrite
        self.share = share
        self.number = 1
        self.done = None
        self.in_the_middle = 0
        self.olds = self.news = 0
        self.most = 0  # steps that existed at once
        self.collected = ()
        self.borrowed = set()  # kinds of borrowed blobs

    def kill(self, killer, **how):
        request = {"commits": 0, "delay_s": 0.0, "crash": None, **how}
        retention = None if self.overwrite else {"keep_last": KEEP_LAST}
        answer = killer(
            url=self.url, overwrite=self.overwrite, number=self.number, retention=retention,
            share=self.share, **request,
        )  # fmt: skip
        self.done = answer["done"] or self.done
        self.check(answer["started"])

    def check(self, started):
        """`started` is the number of the last started save, None without one."""
        with checkpointer(f"posix://{self.root}") as ckpt:
            steps = ckpt.steps()
            for step in steps:
                number = ckpt.info(step).metadata["number"]
                assert same(ckpt.load(step), make(number)), f"step {step} is torn"
                assert step == (STEP if self.overwrite else number)
                borrowed = {blob.name for blob in ckpt._catalog.record(step).borrowed}
                self.borrowed |= {name.rpartition(".")[2] for name in borrowed}
            if self.done is not None:
                assert steps, "what was durable is gone"
            if not steps:
                return
            report = ckpt.verify()
            assert report.ok, report.damaged
            target = make(0)
            ckpt.restore(target)
            latest = target["number"]
            assert latest in {self.done, started}, "neither the old nor the new"
            assert len(steps) >= min(self.most, KEEP_LAST), "retention took what is still needed"
            self.most = max(self.most, len(steps))
            if started is not None and started != self.done:
                self.in_the_middle += 1
                self.news += latest == started
                self.olds += latest == self.done
            self.done = latest
            self.number = max(latest, started or 0) + 1

    def save_on(self):
        """A following process saves, and deletes the leftovers of dead ones."""
        with checkpointer(self.url, grace_s=1e-6) as ckpt:
            report = ckpt.prune(everything=True)
            self.collected = report.uids
            assert not report.refused
            latest = ckpt.latest()
            assert same(ckpt.load(), make(ckpt.info().metadata["number"]))
            check_no_garbage(ckpt._backend, steps=len(ckpt.steps()))
        with checkpointer(self.url) as ckpt:
            ckpt.save(make(99), latest + 1, mode="blocking")
            assert same(ckpt.load(), make(99))


RUNS = {
    "retention": {},
    "overwrite": {"overwrite": True},
    "shared": {"share": True},
    "shared overwrite": {"overwrite": True, "share": True},
}


@pytest.mark.parametrize(
    "how",
    ["shared", *(pytest.param(h, marks=pytest.mark.slow) for h in ("retention", "overwrite"))],
)
def test_a_saver_killed_at_any_call_of_the_store_leaves_the_old_or_the_new(
    how, kind, killer, tmp_path
):
    watch = Watch(tmp_path / "root", kind, **RUNS[how])
    watch.kill(killer, commits=3)
    # Two saves make some fifty calls; every fourth of them, others in each variant.
    shift = 2 * (kind == "uring") + watch.overwrite
    for call in range(1 + shift, 45, 4):
        watch.kill(killer, crash=[call, (call + shift) % 2 == 0, OPERATIONS])
    assert watch.in_the_middle >= 3
    watch.save_on()
    assert watch.collected, "no saver was killed while it wrote"
    # Unchanged data is raw, slightly changed data is encoded.
    assert watch.borrowed == ({"raw", "enc"} if watch.share else {"enc"})


@pytest.mark.parametrize(
    "overwrite", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["retention", "overwrite"]
)
def test_publishing_the_commit_record_decides_existence(overwrite, kind, killer, tmp_path):
    watch = Watch(tmp_path / "root", kind, overwrite=overwrite)
    watch.kill(killer, commits=2)
    for number, record in enumerate(["intent", "part", "index", "commit record"], start=1):
        for after in (False, True):
            olds, news = watch.olds, watch.news
            watch.kill(killer, crash=[number, after, ["publish"]])
            committed = record == "commit record" and after
            assert (watch.olds - olds, watch.news - news) == ((0, 1) if committed else (1, 0))


@pytest.mark.parametrize(
    ("how", "times"),
    [
        ("overwrite", 3),
        *(pytest.param(h, 6, marks=pytest.mark.slow) for h in ("retention", "shared overwrite")),
    ],
)
def test_a_saver_killed_at_a_random_moment_leaves_the_old_or_the_new(
    how, times, kind, killer, tmp_path
):
    watch = Watch(tmp_path / "root", kind, **RUNS[how])
    chance = random.Random(f"{kind} {how}")
    for _ in range(times):
        watch.kill(killer, commits=chance.randrange(3), delay_s=chance.random() * 0.02)
    watch.save_on()


def test_the_check_finds_a_torn_checkpoint(tmp_path):
    watch = Watch(tmp_path / "root", "posix")
    torn = make(4)
    torn["raw"][1000:] = 5
    with checkpointer(watch.url) as ckpt:
        ckpt.save(torn, 4, mode="blocking", metadata={"number": 4})
    with pytest.raises(AssertionError, match="torn"):
        watch.check(4)
    with checkpointer(watch.url) as ckpt:
        ckpt.save(make(2), 9, mode="blocking", metadata={"number": 9})
        assert isinstance(ckpt.load(9)["raw"], torch.Tensor)
    with pytest.raises(AssertionError, match="torn"):
        watch.check(9)


def saved(model, step, number, keep_last=None):
    model.hear(
        {"what": "saving", "step": step, "number": number, "keep_last": keep_last}, beside=False
    )
    model.hear({"what": "committed", "step": step, "number": number}, beside=False)


def test_the_model_of_a_run_finds_a_lost_and_a_wrong_checkpoint():
    model = Model()
    saved(model, 1, 11)
    saved(model, 2, 22)
    assert model.settle({1: 11, 2: 22}) == []
    assert model.settle({1: 22}) == [
        "step 1 holds 22, and may hold {11}",
        "step 2 holds None, and may hold {22}",
    ]
    saved(model, 3, 33, keep_last=1)
    assert model.settle({3: 33}) == []


def test_the_model_of_a_crowd_finds_a_step_won_twice():
    model = Model()
    for number in (1, 2):
        model.hear_crowd({"what": "saving", "step": KEEP_EVERY, "number": number})
    assert model.hear_crowd({"what": "committed", "step": KEEP_EVERY, "number": 1}) == []
    assert model.hear_crowd({"what": "committed", "step": KEEP_EVERY, "number": 2})
    assert model.settle({KEEP_EVERY: 2}) == ["step 10 holds 2, and may hold {1}"]


def run_for_some_seconds(*command):
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 problems" in done.stdout
    return done.stdout


@pytest.mark.slow
def test_savers_a_pruner_a_deleter_and_a_reader_killed_at_random_leave_a_whole_run(tmp_path):
    printed = run_for_some_seconds(
        "tools/kill.py", "--kind", "crowd", "--seconds", "10", "--root", tmp_path
    )
    assert " kills in a crowd\n" in printed
    assert " crowd: save\n" in printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "tiers"])
def test_interleaved_and_killed_operations_match_a_dict(kind, tmp_path):
    printed = run_for_some_seconds(
        "tools/kill.py", "--kind", kind, "--seconds", "20", "--root", tmp_path
    )
    assert " kills\n" in printed


@pytest.mark.slow
@pytest.mark.multirank
def test_ranks_killed_stopped_and_woken_at_random_leave_a_whole_run(tmp_path):
    module = "tests.integration.atomic.rank_jobs"
    printed = run_for_some_seconds(
        "-m", module, "--kills", "5", "--seconds", "20", "--root", tmp_path
    )
    assert '"durable"' in printed
    assert "times a rank knew of a lost one" in printed
