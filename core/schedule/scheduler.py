"""Measures steps and saves, and decides on rank 0 when the next save is due."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.rounds.posts import DuePost, decode, encode
from penstock.core.save import fence
from penstock.core.schedule.horizon import Horizon
from penstock.core.schedule.interval import Measured, interval_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.concurrency.timing import Clock
    from penstock.core.config.model import Schedule
    from penstock.core.ranks.group import RankGroup
    from penstock.core.reporting.reports import RestoreReport, SaveInterval, SaveReport

_STEPS = 32
"""How many of the newest measurements each median covers."""

_LEAST_STEPS = 5
"""The steps to measure before the second save is chosen: the first steps compile and warm up."""


class Scheduler:
    """Decides when saves are due. Only the training thread uses it, except for `reported`."""

    def __init__(self, schedule: Schedule, clock: Clock) -> None:
        """Prepare; nothing is measured before `is_due`."""
        self._schedule = schedule
        self._clock = clock
        self._group: RankGroup | None = None
        self._leads = False  # whether `is_due` is used, on rank 0
        self._horizon: Horizon | None = None
        self._answer: tuple[int, bool] | None = None  # the newest step; whether a save was due
        self._called_s = 0.0  # when `is_due` was last called
        self._spent_s = 0.0  # the time in saves, at their fences, and in logs
        self._spent_before_s = 0.0  # `_spent_s` at the last call of `is_due`
        self._save_began_s = 0.0  # `_saves_s` when the last save was due
        self._saves_s = 0.0  # the time in saves and at their fences
        self._waited_s = fence.waited_s()
        self._step_s: deque[float] = deque(maxlen=_STEPS)
        self._due_s: deque[float] = deque(maxlen=_STEPS)
        self._log_s: deque[float] = deque(maxlen=_STEPS)
        self._chosen = self._choose_at = 0  # the step of the next save; when to choose again
        self._duration_s = 0.0
        self._replay_s: float | None = None
        self._restore_s: float | None = None

    def is_due(
        self, step: int, find_group: Callable[[], RankGroup | None], is_over: Callable[[], bool]
    ) -> bool:
        """Return whether a save is due at `step`, the same on every rank.

        Args:
            step: The step.
            find_group: Returns the ranks that save together, or None if this process saves alone.
                Called only at the first step, because it is slow.
            is_over: Returns whether no save is in flight.

        Raises:
            ConfigError: `find_group` does not find the other ranks.
            RankError: Rank 0 does not reach this step.
            CoordinationError: The store of the job cannot be reached.
        """
        if self._answer is None:
            self._group = find_group()
            self._leads = self._group is None or self._group.place.rank == 0
        self._measure_step(step)
        if self._answer is not None and self._answer[0] == step:
            return self._answer[1]
        if isinstance(self._schedule.every, int):
            due = step % self._schedule.every == 0
        else:
            due = self._agreed(step, self._group, is_over)
        self._due_s.append(self._clock.monotonic_s() - self._called_s)
        if due:
            self._save_began_s = self._saves_s
        self._answer = step, due
        return due

    @contextmanager
    def measuring(self, *, log: bool = False) -> Iterator[None]:
        """Add the time of the block to the cost of saves or, with `log`, of logs."""
        began_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            seconds = self._clock.monotonic_s() - began_s
            self._spent_s += seconds
            if log:
                self._log_s.append(seconds)
            else:
                self._saves_s += seconds

    def restored(self, report: RestoreReport) -> None:
        """Record how long a restore took, and how long its replay of the log took."""
        self._restore_s = report.seconds["total"]
        if report.replayed_steps:
            self._replay_s = report.seconds["replay"] / report.replayed_steps

    def reported(self, report: SaveReport) -> SaveReport:
        """Record the times of a committed save; return its report with the chosen interval.

        For the save thread.
        """
        self._duration_s = report.seconds["total"]
        if not self._leads or not self._step_s:
            return report
        # A blocking save has not returned yet, so `_saves_s` does not have its time.
        return replace(report, interval=self._interval(report.seconds["blocked"]))

    def _measure_step(self, step: int) -> None:
        now_s = self._clock.monotonic_s()
        self._count_fence()
        if self._answer is not None and step > self._answer[0]:
            spent_s = self._spent_s - self._spent_before_s
            steps = step - self._answer[0]
            self._step_s.append((now_s - self._called_s - spent_s) / steps)
        self._called_s, self._spent_before_s = now_s, self._spent_s

    def _count_fence(self) -> None:
        """Count the time that optimizer steps waited at the fence."""
        waited_s = fence.waited_s()
        self._spent_s += waited_s - self._waited_s
        self._saves_s += waited_s - self._waited_s
        self._waited_s = waited_s

    def _agreed(self, step: int, group: RankGroup | None, is_over: Callable[[], bool]) -> bool:
        """Return rank 0's decision for `step`; the other ranks read it from its promises."""
        horizon = self._horizon
        if horizon is None or step < horizon.saved:  # the first step, or training went back
            if group is not None:
                group.need_store()
            number, due = 0 if horizon is None else horizon.number + 1, True
        else:
            number, due = horizon.number + 1, self._is_due(horizon, step, group, is_over)
        if due:
            horizon = self._horizon = Horizon.after(step, number)
        assert horizon is not None
        if group is not None and self._leads:
            while horizon.is_short(step):
                self._promise(horizon, step, group, is_over)
        return due

    def _is_due(
        self, horizon: Horizon, step: int, group: RankGroup | None, is_over: Callable[[], bool]
    ) -> bool:
        if group is None:
            wanted = self._wanted(horizon, step, is_over)
            return wanted is not None and step >= wanted
        while (due := horizon.is_due(step)) is None:
            if self._leads:
                self._promise(horizon, step, group, is_over)
            else:
                what = f"whether a save is due at step {step}"
                horizon.take(decode(DuePost, group.wait_for_rank_0(horizon.key, what)))
        return due

    def _promise(
        self, horizon: Horizon, step: int, group: RankGroup, is_over: Callable[[], bool]
    ) -> None:
        promise = horizon.next_promise(step, self._wanted(horizon, step, is_over))
        group.post(horizon.key, encode(promise))
        horizon.take(promise)

    def _wanted(self, horizon: Horizon, step: int, is_over: Callable[[], bool]) -> int | None:
        """Return the step of the next save; None: not known yet."""
        # At the step at which a save is due, `is_over` is true because that save has not begun.
        if step == horizon.saved or len(self._step_s) < _LEAST_STEPS or not is_over():
            self._choose_at = 0
            return None
        if step >= self._choose_at:  # not at each step: it takes 0.1 ms of cold code
            self._chosen = horizon.saved + self._interval().steps
            self._choose_at = step + max(1, (self._chosen - step) // 4)
        return self._chosen

    def _interval(self, least_blocked_s: float = 0.0) -> SaveInterval:
        blocked_s = max(self._saves_s - self._save_began_s, least_blocked_s)
        measured = Measured(
            step_s=_median(self._step_s),
            blocked_s=blocked_s,
            duration_s=self._duration_s,
            due_s=_median(self._due_s),
            log_s=_median(self._log_s) if self._log_s else None,
            replay_s=self._replay_s,
            restore_s=self._restore_s,
        )
        return interval_of(measured, self._schedule)


def _median(values: deque[float]) -> float:
    ordered = sorted(values.copy())
    return ordered[len(ordered) // 2]
