"""A run that is used, crashed and cut off from power at will, against a plain dict."""

from __future__ import annotations

import functools
import random

import pytest
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
from tests.integration.atomic.crash_scenarios import (
    BEFORE,
    BOTH,
    CHAINED,
    DAY_S,
    ENCODED,
    RAW,
    carries,
    check_no_garbage,
    contents,
    job,
    mortal,
    opened,
    save,
    three_steps,
)

from penstock import CheckpointNotFoundError, StepExistsError
from penstock.testing.powercut import Disk, PowerCut

LEFT_ALONE = -2

modes = st.sampled_from(["blocking", "async", "lazy"])
rules = st.sampled_from([RAW, ENCODED, BOTH, CHAINED, CHAINED])
BEST = {"keep_best": 2, "best_metric": "mark", "best_mode": "max"}
retentions = st.sampled_from(
    [None, {"keep_last": 1}, {"keep_last": 2, "keep_every": 3}, BEST, {"keep_last": 2, **BEST}]
)
picks = st.integers(0, 7)
marks = st.integers(0, 3)
# Seeds of the survivors of a power cut; None: only the process dies.
powers = st.none() | st.integers(0, 1 << 30)


@functools.cache
def run_of_three_steps():
    disk = Disk()
    three_steps(disk)
    return disk


class Runs(RuleBasedStateMachine):
    """`run` is the required content: step -> the number that all of its state carries. The number
    of effects of a save depends on threads, so the time of deaths does, too: no rule has a
    precondition, since hypothesis would have to find the same ones enabled again.
    """

    @initialize(chains=rules, retention=retentions, empty=st.booleans())
    def start(self, chains, retention, empty):
        self.options = {**chains, "retention": retention}
        self.disk = Disk() if empty else run_of_three_steps().copy()
        self.run = {} if empty else BEFORE
        self.number = len(self.run)
        self.marks = {} if empty else {2: 2}  # by number, which is unique per save
        self.open()

    def open(self):
        self.ckpt = opened(PowerCut(self.disk), **self.options)
        self.restored_from = None
        self.has_saved = False

    def close(self):
        with mortal():
            self.ckpt.close()

    def pick(self, number):
        """Some existing step, or None."""
        return sorted(self.run)[number % len(self.run)] if self.run else None

    def next_step(self, skipped=0):
        return max(self.run, default=0) + 1 + skipped

    #
    # -- an action's effect on the dict: all contents allowed on the way, the last one permanent ---

    def after_save(self, step):
        ends = [self.run]
        if not self.has_saved:  # overdue retention of an earlier process
            for doomed in self.doomed(self.run, protected={step, self.restored_from}):
                ends.append({s: n for s, n in ends[-1].items() if s != doomed})
        self.has_saved = True
        self.committed_at = len(ends)
        ends.append({**ends[-1], step: self.number})
        for doomed in self.doomed(ends[-1], protected={step, self.restored_from}):
            ends.append({s: n for s, n in ends[-1].items() if s != doomed})
        return ends

    def after_deletes(self, steps):
        ends = [self.run]
        for step in steps:
            ends.append({s: n for s, n in ends[-1].items() if s != step})
        return ends

    def doomed(self, run, *, protected):
        keep = self.options["retention"]
        if keep is None:
            return []
        steps = sorted(run)
        kept = protected | set(steps[-keep.get("keep_last", 1) :])
        every = keep.get("keep_every")
        if "keep_best" in keep:
            marked = [s for s in steps if self.marks.get(run[s]) is not None]
            kept |= {*sorted(marked, key=lambda s: (self.marks[run[s]], s))[-keep["keep_best"] :]}
        return [s for s in steps if s not in kept and not (every and s % every == 0)]

    # -- completed actions ----------------------------------------------------------------------

    @rule(mode=modes, skipped=st.integers(0, 1))
    def save(self, mode, skipped):
        self.do(*self.saving(self.next_step(skipped), mode=mode))

    @rule(mode=modes, pick=picks)
    def overwrite(self, mode, pick):
        self.do(*self.overwriting(self.pick(pick), mode=mode))

    @rule(pick=picks)
    def delete(self, pick):
        self.do(*self.deleting(self.pick(pick)))

    @rule(pick=picks)
    def rewind(self, pick):
        self.do(*self.rewinding(self.pick(pick)))

    @rule(age_s=st.sampled_from([0, 2 * DAY_S]))
    def prune(self, age_s):
        self.disk.advance(age_s)
        self.ckpt.prune()
        if age_s:
            # Or leftovers of a crash right before its record stay, and all before the first record.
            assert not self.ckpt.prune(everything=True).refused
            check_no_garbage(PowerCut(self.disk), steps=len(self.run))

    @rule(pick=picks, mark=marks)
    def annotate(self, pick, mark):
        if self.run:
            step = self.pick(pick)
            self.ckpt.annotate(step, {"mark": mark})
            self.marks[self.run[step]] = mark

    def do(self, act, ends):
        act()
        self.settle()
        self.run = ends[-1]

    def settle(self):
        self.ckpt.wait()
        if self.ckpt._saver.job is not None:
            self.ckpt._saver.job.released.wait()

    def saving(self, step, **options):
        self.number += 1
        number = self.number

        def act():
            save(self.ckpt, step, number, **options)
            self.promised = committed_at

        ends = self.after_save(step)
        committed_at = self.committed_at
        return act, ends

    def overwriting(self, step, **options):
        """Also of a missing step."""
        step = self.next_step() if step is None else step
        return self.saving(step, overwrite=True, **options)

    def deleting(self, step):
        if step is None:
            return lambda: None, [self.run]
        return lambda: self.ckpt.delete(step), self.after_deletes([step])

    def rewinding(self, step):
        if step is None:
            return lambda: None, [self.run]
        later = sorted((s for s in self.run if s > step), reverse=True)
        return lambda: self.ckpt.rewind(step), self.after_deletes(later)

    # -- interrupted actions --------------------------------------------------------------------

    @rule(mode=modes, effect=st.integers(1, 12), power=powers)
    def die_in_save(self, mode, effect, power):
        self.die_during(*self.saving(self.next_step(), mode=mode), effect, power)

    @rule(mode=modes, pick=picks, effect=st.integers(1, 14), power=powers)
    def die_in_overwrite(self, mode, pick, effect, power):
        self.die_during(*self.overwriting(self.pick(pick), mode=mode), effect, power)

    @rule(pick=picks, effect=st.integers(1, 3), power=powers)
    def die_in_delete(self, pick, effect, power):
        self.die_during(*self.deleting(self.pick(pick)), effect, power)

    @rule(pick=picks, effect=st.integers(1, 6), power=powers)
    def die_in_rewind(self, pick, effect, power):
        self.die_during(*self.rewinding(self.pick(pick)), effect, power)

    @rule(effect=st.integers(1, 6), power=powers)
    def die_in_prune(self, effect, power):
        self.disk.advance(2 * DAY_S)
        self.die_during(self.ckpt.prune, [self.run], effect, power)

    @rule(pick=picks, mark=marks, effect=st.integers(1, 2), power=powers)
    def die_in_annotate(self, pick, mark, effect, power):
        if self.run:
            step = self.pick(pick)
            returned = []

            def act():
                self.ckpt.annotate(step, {"mark": mark})
                returned.append(mark)

            self.die_during(act, [self.run], effect, power)
            found = self.ckpt.info(step).metadata.get("mark")
            assert found in (returned or {self.marks.get(self.run[step]), mark})
            self.marks[self.run[step]] = found

    def die_during(self, act, ends, effect, power):
        self.promised = 0
        self.disk.cut_in(effect)
        with mortal():
            act()
            self.settle()
        died = self.disk.dead
        self.disk.cut_in(None)
        self.go_on(power)
        found = self.contents()
        assert found in ends[self.promised if died else -1 :]
        self.run = found

    @rule(power=powers)
    def die_at_rest(self, power):
        self.go_on(power)

    def go_on(self, power):
        """Another process opens the remains."""
        dead = self.disk
        left = dead.copy() if power is None else dead.cut(random.Random(power))
        self.close()
        self.disk = left
        self.open()

    def contents(self):
        """By another process: retention spares the step that its own process restored."""
        with opened(PowerCut(self.disk)) as ckpt:
            return contents(ckpt)

    # -- checks ---------------------------------------------------------------------------------

    @rule(pick=picks, part=st.sampled_from([None, "model", "optimizer", "number"]))
    def restore(self, pick, part):
        if not self.run:
            return
        step = self.pick(pick)
        live = job()
        live.fill(LEFT_ALONE)
        before = live.optimizer.state_dict()["param_groups"]
        self.ckpt.restore(live.state, step, include=part)
        self.restored_from = step
        expected = {
            name: self.run[step] if part in {None, name} else LEFT_ALONE
            for name in ("model", "optimizer", "number")
        }
        moments = [t for of in live.optimizer.state.values() for t in of.values()]
        assert all(carries(t, expected["model"]) for t in live.model.parameters())
        assert all(carries(t, expected["optimizer"]) for t in moments)
        assert live.state["number"] == expected["number"]
        assert live.optimizer.state_dict()["param_groups"] == before

    @rule(pick=picks)
    def verify(self, pick):
        if self.run:
            report = self.ckpt.verify(self.pick(pick))
            assert report.ok, report.damaged

    @rule(step=st.integers(0, 12))
    def refuse(self, step):
        """A missing step cannot be used, and an existing one not be saved again."""
        if step not in self.run:
            for use in (self.ckpt.load, self.ckpt.delete, self.ckpt.rewind, self.ckpt.verify):
                with pytest.raises(CheckpointNotFoundError):
                    use(step)
        if step <= max(self.run, default=-1):
            with pytest.raises(StepExistsError):
                self.ckpt.save({"number": 1}, step)

    @invariant()
    def holds_what_it_should(self):
        assert self.ckpt.steps() == sorted(self.run)
        assert self.ckpt.latest() == max(self.run, default=None)
        for step, number in self.run.items():
            assert self.ckpt.info(step).metadata.get("mark") == self.marks.get(number)

    def teardown(self):
        if not hasattr(self, "ckpt"):
            return
        try:
            assert self.contents() == self.run
            self.disk.advance(2 * DAY_S)
            self.ckpt.prune(everything=True)
            check_no_garbage(PowerCut(self.disk), steps=len(self.run))
        finally:
            self.close()


def explore(count, steps, **options):
    run_state_machine_as_test(
        Runs,
        settings=settings(
            deadline=None, max_examples=examples(count), stateful_step_count=steps, **options
        ),
    )


def test_a_run_matches_a_dict_after_any_death():
    explore(5, 15, derandomize=True)


@pytest.mark.slow
def test_a_run_matches_a_dict_in_long_runs():
    explore(40, 20, derandomize=False)
