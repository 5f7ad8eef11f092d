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
"""The part of the overhead that saves may always cost, even if logs alone cost all of it."""

_LEAST_STEP_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured times of a run, in seconds.

    Attributes:
        step_s: One step of training, without saves and logs.
        blocked_s: What one save costs the training thread, waits at the fence included.
        duration_s: From the call of `save` until the checkpoint is durable.
        due_s: What asking whether a save is due costs the training thread at each step.
        log_s: What logging one step costs the training thread; None: the run does not log.
        replay_s: Replaying one logged step; None: not known.
        restore_s: Restoring a checkpoint; None: not known.
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

    With `"auto"`: at least the duration of a save, as in CheckFreq (FAST'21), and at least as long
    as `overhead` demands. If the mean time between failures is known, Young's interval (1974)
    `sqrt(2 * blocked * mtbf)`, if that is longer. With a log, a failure costs the replay of a step
    instead of the step, and the replay of one interval takes at most `max_replay_s`, or else the
    time of a restore, if the overhead allows it.
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
    """Return whole steps, at least one; an error of rounding adds none."""
    return max(1, math.ceil(exact * (1 - 1e-12)))
