"""The allowed contents of a run after its processes were killed, by their reports."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

KEEP_EVERY = 10
"""A crowd neither deletes nor overwrites a multiple of it, so a committed save of one must stay."""


@dataclass
class Model:
    """The allowed contents of a run, by the reports of its processes."""

    # The numbers of saves that each step may hold; None: it may be missing.
    may: dict[int, set[int | None]] = field(default_factory=lambda: defaultdict(lambda: {None}))
    # All numbers ever saved at a step, and the one reported durable.
    begun: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    durable: dict[int, int] = field(default_factory=dict)

    def hear(self, report, *, beside: bool):
        """Record a trainer's actions; `beside`: another process compacts at that time."""
        what, step = report["what"], report.get("step", 0)
        if what == "saving":
            self.may[step].add(report["number"])
            self.begun[step].add(report["number"])
            self.durable.pop(step, None)
            older = sorted(s for s, may in self.may.items() if may != {None} and s != step)
            keep_last = report["keep_last"]
            for old in older[: -(keep_last - 1) or None] if keep_last else ():
                self.may[old].add(None)  # retention may delete it, whether this save commits or not
        elif what == "committed":
            self.may[step] = {report["number"]}
        elif what == "durable" and self.may[step] <= {report["number"], None}:
            self.durable[step] = report["number"]
        for step in report.get("steps", ()):
            self.durable.pop(step, None)
            # A compaction that commits at that moment may bring a step back (docs/chains.md).
            self.may[step] = {None, *(self.may[step] if what == "deleting" or beside else ())}

    def hear_crowd(self, report):
        """Record the actions of a process of a crowd, and return its errors."""
        what, step, number = (report.get(key) for key in ("what", "step", "number"))
        if what == "saving":
            self.begun[step].add(number)
            if None in self.may[step]:
                self.may[step].add(number)
        elif what == "committed" and step % KEEP_EVERY == 0:
            if None not in self.may[step]:
                return [f"step {step} was won twice"]
            self.may[step] = {number}
        return []

    def loosen(self, steps):
        """Record that these steps may be lost, or hold any of their saves."""
        for step in steps:
            self.may[step].update({None}, self.begun[step])

    def lose_fast(self):
        """Record that the whole fast tier is lost."""
        self.loosen([s for s, may in self.may.items() if may - {None} != {self.durable.get(s)}])

    def settle(self, found):
        """Compare with the number that each step holds, and continue from there."""
        wrong = [
            f"step {step} holds {found.get(step)}, and may hold {self.may[step]}"
            for step in sorted({*found, *self.may})
            if found.get(step) not in self.may[step]
        ]
        for step in {*found, *self.may}:
            self.may[step] = {found.get(step)}
        self.durable = {step: n for step, n in self.durable.items() if found.get(step) == n}
        return wrong
