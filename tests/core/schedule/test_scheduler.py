"""Measuring steps and saves of one process, on a clock that the test moves."""

from dataclasses import replace

import pytest
from tests.core.reporting.test_reports import REPORT

from penstock.core.concurrency.timing import CountedClock
from penstock.core.config.model import Schedule
from penstock.core.reporting.reports import RestoreReport
from penstock.core.schedule.scheduler import Scheduler


class Training:
    """Trains and saves by `is_due`, in seconds of its own clock."""

    def __init__(self, step_s=1.0, blocked_s=0.1, duration_s=2.0, log_s=None, **schedule):
        self.clock = CountedClock()
        self.scheduler = Scheduler(Schedule(**schedule), self.clock)
        self.step_s, self.blocked_s, self.duration_s = step_s, blocked_s, duration_s
        self.log_s = log_s
        self.saved, self.reports = [], []
        self.over_s = 0.0
        self.in_calls_s = 0.0

    def is_over(self):
        return self.clock.monotonic_s() >= self.over_s

    def is_due(self, step):
        return self.scheduler.is_due(step, lambda: None, self.is_over)

    def call(self, seconds, **options):
        with self.scheduler.measuring(**options):
            self.clock.advance(seconds)
        self.in_calls_s += seconds

    def run(self, steps):
        for step in steps:
            self.clock.advance(self.step_s)
            if self.is_due(step):
                assert self.is_over(), "the last save is still in flight"
                self.over_s = self.clock.monotonic_s() + self.duration_s
                self.call(self.blocked_s)
                times = {"total": self.duration_s, "blocked": self.blocked_s}
                self.saved.append(step)
                self.reports.append(self.scheduler.reported(replace(REPORT, seconds=times)))
            elif self.log_s is not None:
                self.call(self.log_s, log=True)
        return self


def test_first_call_is_due_and_the_next_saves_keep_the_overhead():
    training = Training().run(range(7, 100))
    assert training.saved == [7, 17, 27, 37, 47, 57, 67, 77, 87, 97]
    assert training.reports[-1].interval.why == "overhead of 1 %"
    assert training.reports[0].interval is None, "no step was measured yet"


@pytest.mark.parametrize("step_s", [0.02, 0.08, 0.25, 3.0])
@pytest.mark.parametrize("log_s", [None, 0.0001])
def test_overhead_is_the_bound_also_when_the_store_becomes_ten_times_slower(step_s, log_s):
    training = Training(step_s=step_s, log_s=log_s, blocked_s=0.01, duration_s=step_s)
    training.run(range(3000))
    before_s, began_s = training.in_calls_s, training.clock.monotonic_s()
    assert before_s / (began_s - before_s) <= 0.0101 + 0.1 / began_s
    training.blocked_s, training.duration_s = 0.1, 10 * step_s
    last = training.saved[-1]
    training.run(range(3000, 20_000))
    spent_s = training.in_calls_s - before_s
    share = spent_s / (training.clock.monotonic_s() - began_s - spent_s)
    assert share <= 0.0101
    assert training.saved[-1] > last
    if step_s < 1:  # else every save fits into a few steps
        assert share > 0.008


def test_a_save_is_never_due_before_the_last_one_is_durable():
    training = Training(blocked_s=0.0, duration_s=12.0).run(range(100))
    assert training.saved[:4] == [0, 12, 24, 36]
    assert training.reports[-1].interval.why == "the last save took 12 s"


def test_interval_follows_the_length_of_a_step():
    training = Training().run(range(100))
    assert training.saved[-1] - training.saved[-2] == 10
    training.step_s = 0.1
    training.run(range(100, 1000))
    assert training.saved[-1] - training.saved[-2] == 100


def test_a_step_that_is_asked_for_twice_has_one_answer():
    training = Training().run(range(10))
    due = [training.is_due(10) for _ in range(3)]
    assert due == [True] * 3
    assert not training.is_due(11)


def test_first_step_after_training_went_back_is_due():
    training = Training().run(range(50)).run(range(42, 44))
    assert training.saved[-1] == 40
    training.run(range(12, 20))
    assert training.saved[-1] == 12


def test_number_of_steps_is_kept():
    training = Training(every=25).run(range(1, 101))
    assert training.saved == [25, 50, 75, 100]
    assert training.reports[-1].interval.why == "every 25 steps as configured"


def test_replay_of_the_log_takes_no_longer_than_the_last_restore():
    training = Training(log_s=0.001, blocked_s=0.05, mtbf_s=1e6)
    restored = RestoreReport(
        step=4, restored=(), missing=(), unexpected=(), values={}, matched_by=None,
        bytes_needed=1, bytes_read=1, bytes_metadata=1, engine="memory", direct_io=False,
        seconds={"total": 3.0, "replay": 2.0}, replayed_steps=20,
    )  # fmt: skip
    training.scheduler.restored(restored)
    training.run(range(100))
    assert training.saved[1:] == [30, 60, 90]
    assert training.reports[-1].interval.why == "the log is replayed in at most 3 s"


def test_report_has_no_interval_unless_it_is_asked_whether_a_save_is_due():
    assert Training().scheduler.reported(REPORT).interval is None
