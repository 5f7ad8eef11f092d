"""The interval between saves, from measured times."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.config.model import Schedule
from penstock.core.schedule.interval import Measured, interval_of

seconds = st.floats(1e-4, 1e4)
measured_times = st.builds(
    Measured,
    step_s=seconds,
    blocked_s=seconds,
    duration_s=seconds,
    due_s=st.floats(0.0, 1e-3),
    log_s=st.none() | seconds,
    replay_s=st.none() | seconds,
    restore_s=st.none() | seconds,
)
schedules = st.builds(
    Schedule,
    overhead=st.floats(1e-3, 1.0),
    mtbf_s=st.none() | st.floats(1.0, 1e7),
    max_replay_s=st.none() | seconds,
)


def times(**more):
    return Measured(**{"step_s": 1.0, "blocked_s": 0.02, "duration_s": 0.5} | more)


@given(measured_times, schedules)
def test_saves_never_cost_more_than_the_overhead_nor_overlap(measured, schedule):
    chosen = interval_of(measured, schedule)
    logs = (measured.due_s + (measured.log_s or 0.0)) / measured.step_s
    least = max(schedule.overhead - logs, schedule.overhead / 4)
    assert chosen.overhead <= (logs + least) * (1 + 1e-9)
    assert chosen.steps * measured.step_s >= measured.duration_s * (1 - 1e-9)
    assert chosen.steps >= 1
    assert chosen.why


@given(measured_times, schedules)
def test_without_failures_to_expect_the_interval_is_the_shortest_allowed(measured, schedule):
    schedule = Schedule(overhead=schedule.overhead)
    steps = interval_of(measured, schedule).steps
    logs = (measured.due_s + (measured.log_s or 0.0)) / measured.step_s
    least = max(schedule.overhead - logs, schedule.overhead / 4)
    shorter = steps - 1
    assert (
        shorter == 0
        or measured.blocked_s / (shorter * measured.step_s) > least * (1 - 1e-9)
        or shorter * measured.step_s < measured.duration_s * (1 + 1e-9)
    )


@given(measured_times, schedules)
def test_a_costlier_save_never_makes_the_interval_shorter(measured, schedule):
    costlier = Measured(
        step_s=measured.step_s, blocked_s=2 * measured.blocked_s, duration_s=measured.duration_s
    )
    plain = Measured(
        step_s=measured.step_s, blocked_s=measured.blocked_s, duration_s=measured.duration_s
    )
    assert interval_of(costlier, schedule).steps >= interval_of(plain, schedule).steps


@pytest.mark.parametrize(
    ("measured", "options", "steps", "why"),
    [
        (times(), {}, 2, "overhead of 1 %"),
        (times(), {"overhead": 0.002}, 10, "overhead of 0.2 %"),
        (times(duration_s=12.0), {}, 12, "the last save took 12 s"),
        (times(), {"mtbf_s": 10800}, 21, "Young's interval for an MTBF of 3 h"),
        (times(blocked_s=5.0, step_s=10.0), {"overhead": 0.035, "mtbf_s": 10800}, 33, "Young's"),
        (times(), {"mtbf_s": 60}, 2, "overhead of 1 %"),
        (times(), {"every": 100}, 100, "every 100 steps as configured"),
        (times(log_s=0.005), {}, 4, "overhead of 1 %, and the log alone costs 0.5 %"),
        (times(log_s=0.5), {}, 8, "overhead of 1 %, and the log alone costs 50 %"),
    ],
)
def test_interval_and_reason(measured, options, steps, why):
    chosen = interval_of(measured, Schedule(**options))
    assert chosen.steps == steps
    assert chosen.why.startswith(why)


def test_replay_of_a_log_costs_less_than_its_steps_so_saves_may_be_rarer():
    schedule = Schedule(mtbf_s=10800)
    logged = times(log_s=0.001, replay_s=0.1)
    assert interval_of(logged, schedule).steps == math.ceil(math.sqrt(2 * 0.02 * 10800 / 0.1))


@pytest.mark.parametrize(
    ("options", "steps"), [({}, 20), ({"max_replay_s": 4.0}, 40), ({"max_replay_s": 0.01}, 3)]
)
def test_replay_takes_no_longer_than_a_restore_or_the_option(options, steps):
    measured = times(log_s=0.001, replay_s=0.1, restore_s=2.0)
    assert interval_of(measured, Schedule(mtbf_s=10800, **options)).steps == steps


def test_crash_loses_half_an_interval_and_a_save_but_only_one_step_with_a_log():
    plain = interval_of(times(step_s=2.0), Schedule(every=100))
    assert (plain.lost_steps, plain.lost_seconds) == (50.25, 100.5)
    assert plain.overhead == pytest.approx(0.0001)
    logged = interval_of(times(step_s=2.0, log_s=0.02), Schedule(every=100))
    assert (logged.lost_steps, logged.lost_seconds) == (1.0, 2.0)
    assert logged.overhead == pytest.approx(0.0101)
