"""A process that dies at any effect on the store: old or new, whole, no permanent leftovers."""

from __future__ import annotations

import pytest
from tests.integration.atomic.crash_scenarios import (
    DAY_S,
    check_run,
    each_scenario,
    littered,
    mortal,
    opened,
)

from penstock.testing.faults import EFFECTS, CrashAt
from penstock.testing.powercut import Disk, PowerCut

# One of each kind of call; `test_power_cut` has others in the quick run.
QUICK = ["save lazy both", "first save", "rewind two generations", "end of a chain"]


@pytest.mark.parametrize(
    "operations",
    [("publish", "delete"), pytest.param(EFFECTS, marks=pytest.mark.slow)],
    ids=["records", "all"],
)
@each_scenario(*QUICK)
def test_a_crash_before_any_effect_leaves_old_or_new(scenario, operations):
    prepared = scenario.prepared()
    found, points = [], 0
    while True:
        disk = prepared.copy()
        dying = CrashAt(PowerCut(disk), points + 1, operations=operations)
        promised = scenario.run(dying)
        found.append(check_run(disk, scenario.ends[promised if dying.crashed else -1 :]))
        if not dying.crashed:
            break
        points += 1
    assert points, "there was nothing to crash at"
    print(f"{scenario.name}: {points} crash points")
    # Every end was reached: the crashes were at the decisive points.
    assert all(end in found for end in scenario.ends)


def test_a_clock_probe_is_deleted_by_the_next_prune():
    disk = Disk()
    littered(disk)
    dying = CrashAt(PowerCut(disk), 1, after=True, operations=["publish"])
    with mortal(), opened(dying) as ckpt:
        ckpt.prune()
    assert dying.crashed
    assert PowerCut(disk).list("clock/")
    disk.advance(2 * DAY_S)
    with opened(PowerCut(disk)) as ckpt:
        ckpt.prune()
    assert not PowerCut(disk).list("clock/")
