"""Chooses the interval between saves from measured times; pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.reporting.reports import SaveInterval
from penstock.core.units import counted, duration_text

if TYPE_CHECKING:
    from penstock.core.config.model import Schedule

_LEAST_SHARE = 0.25
"""The share of `overhead` that saves may always use, even if the log alone uses all of it."""

_LEAST_STEP_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured times of a run, in seconds.

    Attributes:
        step_s: The time of one training step, without saves and logs.
        blocked_s: The time that one save takes from the training thread, with waits at the fence.
        duration_s: The time from the call of `save` until the checkpoint is durable.
        due_s: The time per step in which the training thread asks whether a save is due.
        log_s: The time per step in which the training thread logs; None: the run does not log.
        replay_s: The time to replay one logged step; None: unknown.
        restore_s: The time to restore a checkpoint; None: unknown.
    """

    step_s: float
    blocked_s: float
    duration_s: float
    due_s: float = 0.0
    log_s: float | None = None
    replay_s: float | None = None
    restore_s: float | None = None


def interval_of(measured: Measured, schedule: Schedule) -> SaveInterval:
    """Return the interval between two saves, its reason, and what it costs and loses.

    With `every="auto"` the interval is at least as long as a save takes, as in CheckFreq (FAST'21),
    and long enough to keep within `overhead`. If the mean time between failures is known and
    Young's interval (1974), `sqrt(2 * blocked * mtbf)`, is longer, the result is Young's interval.
    With a log, a failure costs only the replay of the lost steps, so Young's interval is longer.
    The replay of one interval must then take at most `max_replay_s`, by default the time of a
    restore: a longer interval is shortened, but never below the two lower bounds.
    """
    step_s = max(measured.step_s, _LEAST_STEP_S)
    if isinstance(schedule.every, int):
        steps, why = schedule.every, f"every {counted(schedule.every, 'step')} as configured"
    else:
        steps, why = _chosen(measured, schedule, step_s)
    cost_s = measured.blocked_s / steps + measured.due_s + (measured.log_s or 0.0)
    lost = 1.0 if measured.log_s is not None else steps / 2 + measured.duration_s / step_s
    return SaveInterval(
        steps=steps,
        seconds=steps * step_s,
        why=why,
        overhead=cost_s / step_s,
        lost_steps=lost,
        lost_seconds=lost * step_s,
    )


def _chosen(measured: Measured, schedule: Schedule, step_s: float) -> tuple[int, str]:
    log_share = (measured.log_s or 0.0) / step_s
    left = schedule.overhead - log_share - measured.due_s / step_s
    share = max(left, schedule.overhead * _LEAST_SHARE)
    steps, why = _steps(measured.blocked_s / (share * step_s)), _overhead(schedule, log_share)
    if (least := _steps(measured.duration_s / step_s)) > steps:
        steps, why = least, f"the last save took {duration_text(measured.duration_s)}"
    shortest = steps
    if schedule.mtbf_s is not None:
        again_s = (measured.log_s is not None and measured.replay_s) or step_s
        young = _steps(math.sqrt(2 * measured.blocked_s * schedule.mtbf_s / (step_s * again_s)))
        if young > steps:
            mtbf = duration_text(schedule.mtbf_s)
            steps, why = young, f"Young's interval for an MTBF of {mtbf}"
    most_s = measured.restore_s if schedule.max_replay_s is None else schedule.max_replay_s
    if measured.log_s is not None and measured.replay_s and most_s is not None:
        most = max(shortest, int(most_s / measured.replay_s))
        if most < steps:
            steps, why = most, f"the log is replayed in at most {duration_text(most_s)}"
    return steps, why


def _overhead(schedule: Schedule, log_share: float) -> str:
    text = f"overhead of {100 * schedule.overhead:.3g} %"
    return f"{text}, and the log alone costs {100 * log_share:.2g} %" if log_share else text


def _steps(exact: float) -> int:
    """Round up to whole steps, at least one; ignore rounding errors of floating point."""
    return max(1, math.ceil(exact * (1 - 1e-12)))
