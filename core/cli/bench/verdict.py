"""The conclusions from a sweep: the limit, and the options that are better than the default.

Tested in `tests/core/cli/test_bench.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from penstock.core.cli.bench.measurement import label_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.cli.bench.measurement import Figures, Report, Row

Work: TypeAlias = Literal["save", "restore", "partial"]

NOISE = 0.05
"""A difference of medians up to this share counts as noise."""
_NEAR = 0.9  # of the raw limit, or of all cores
_LEAST_ROUNDS = 2  # one round does not show the noise
_WAITING = "waiting between requests"
_WORK: tuple[Work, ...] = ("save", "restore", "partial")


@dataclass(frozen=True, slots=True)
class Choice:
    """An option that is better than the default.

    Attributes:
        row: The option with its value.
        gains: By kind of work, the median speed as a multiple of the default's.
    """

    row: Row
    gains: dict[Work, float]


def raw_limits(report: Report) -> tuple[float, float]:
    """Return the highest write speed and read speed of a plain loop, in bytes per second."""
    return (
        max(raw.write_bytes_per_s for raw in report.raw),
        max(raw.read_bytes_per_s for raw in report.raw),
    )


def limit_of(report: Report) -> str:
    """Describe what limits saves and restores, with advice if they mostly wait."""
    write, read = raw_limits(report)
    default = report.rows[0].median
    save = _reason(report, "save", default.save_bytes_per_s / write, default.save_cores)
    restore = _reason(report, "restore", default.restore_bytes_per_s / read, default.restore_cores)
    verdict = f"{save[0].upper()}{save[1:]}, and {restore}."
    reasons = (("saves", save), ("restores", restore))
    waiting = [works for works, reason in reasons if reason.startswith(_WAITING)]
    if not waiting:
        return verdict
    compared = any(len(row.rounds) >= _LEAST_ROUNDS for row in report.rows[1:])
    works = " or ".join(waiting)
    advice = f"No option that was tried makes {works} faster: try a larger state (--size)"
    return f"{verdict} {advice if compared else 'Try other options: raise --seconds'}."


def _reason(report: Report, work: Work, share: float, cores: float) -> str:
    reached = f"{share:.0%} of the raw limit"
    busy = f"{cores:.1f} of {report.cores:g} cores busy"
    if share >= _NEAR:
        return f"the store limits {work}s ({reached})"
    if cores >= _NEAR * report.cores:
        return f"the CPU limits {work}s ({busy}, {reached})"
    default, *others = report.rows
    faster = [row for row in others if _is_faster(row, default, work)]
    if faster:
        best = max(faster, key=lambda row: _gain(row, default, work))
        gain = f"{_gain(best, default, work):.2f} times as fast with"
        label = label_of(best.option, best.value)
        return f"the configuration limits {work}s ({gain} {label}, {reached})"
    return f"{_WAITING} limits {work}s ({busy}, {reached})"


def choices(report: Report) -> list[Choice]:
    """Return the best value of each option, if it is better than the default.

    A value is better if the median of some kind of work (save, restore, partial read) is faster
    than the default's by more than `NOISE` and by more than the rounds of either case differ, and
    no kind of work is slower by more than `NOISE`. Both cases need two rounds. It would not
    suffice that all rounds of a value are faster: among dozens of values, chance makes some so.
    """
    default, *others = report.rows
    best: dict[str, Choice] = {}
    for row in others:
        if row.kind not in {"engine", "backend"} or row.option is None:
            continue
        gains: dict[Work, float] = {work: _gain(row, default, work) for work in _WORK}
        better = any(_is_faster(row, default, work) for work in _WORK)
        if not better or min(gains.values()) < 1 - NOISE:
            continue
        choice = Choice(row, gains)
        if row.option not in best or _total(choice) > _total(best[row.option]):
            best[row.option] = choice
    return list(best.values())


def _total(choice: Choice) -> float:
    return choice.gains["save"] * choice.gains["restore"] * choice.gains["partial"]


def _gain(row: Row, default: Row, work: Work) -> float:
    return _rate(row.median, work) / _rate(default.median, work)


def _is_faster(row: Row, default: Row, work: Work) -> bool:
    if min(len(row.rounds), len(default.rounds)) < _LEAST_ROUNDS:
        return False
    gain = _rate(row.median, work) - _rate(default.median, work)
    spread = max(_spread(row.rounds, work), _spread(default.rounds, work))
    return gain > spread and _gain(row, default, work) > 1 + NOISE


def _spread(rounds: Iterable[Figures], work: Work) -> float:
    rates = [_rate(figures, work) for figures in rounds]
    return max(rates) - min(rates)


def _rate(figures: Figures, work: Work) -> float:
    if work == "save":
        return figures.save_bytes_per_s
    return figures.restore_bytes_per_s if work == "restore" else 1 / figures.partial_s
