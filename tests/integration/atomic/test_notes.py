"""A process that dies while adding metadata: old or new, and never a damaged checkpoint."""

from __future__ import annotations

import random

import pytest
from tests.effort import every
from tests.integration.atomic.crash_scenarios import (
    BEFORE,
    CHAINED,
    DAY_S,
    check_no_garbage,
    contents,
    mortal,
    opened,
    three_links,
    three_steps,
)

from penstock.testing.faults import EFFECTS, CrashAt
from penstock.testing.powercut import Disk, PowerCut

OLD, NEW = {"mark": 2}, {"mark": 2, "loss": 0.5}


@pytest.fixture(scope="module")
def prepared():
    disk = Disk()
    three_steps(disk)
    return disk


def check(disk, allowed):
    with opened(PowerCut(disk)) as ckpt:
        assert contents(ckpt) == BEFORE
        found = ckpt.info(2).metadata
        assert found in allowed
        disk.advance(2 * DAY_S)
        assert not ckpt.prune().refused
        assert ckpt.info(2).metadata == found
        check_no_garbage(PowerCut(disk), steps=3)
    return found


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_crash_at_any_effect_of_annotate_leaves_old_or_new(prepared, after):
    found, points = [], 0
    while True:
        disk = prepared.copy()
        dying = CrashAt(PowerCut(disk), points + 1, operations=EFFECTS, after=after)
        with mortal(), opened(dying) as ckpt:
            ckpt.annotate(2, {"loss": 0.5})
        found.append(check(disk, [OLD, NEW] if dying.crashed else [NEW]))
        if not dying.crashed:
            break
        points += 1
    assert points == 1
    assert found == ([NEW, NEW] if after else [OLD, NEW])


def test_power_cut_at_any_effect_of_annotate_leaves_old_or_new(prepared):
    found, points = [], 0
    while True:
        disk = prepared.copy(cut_at=points + 1)
        with mortal(), opened(PowerCut(disk)) as ckpt:
            ckpt.annotate(2, {"loss": 0.5})
        over = not disk.dead
        allowed = [NEW] if over else [OLD, NEW]
        found += [check(left, allowed) for left in disk.cuts(random.Random(points), most=6)]
        if over:
            break
        points += 1
    assert OLD in found
    assert NEW in found


def test_crash_in_a_compaction_loses_no_annotation():
    prepared = Disk()
    three_links(prepared)
    points = 0
    while True:
        disk = prepared.copy()
        dying = CrashAt(PowerCut(disk), points + 1, operations=EFFECTS)
        with mortal(), opened(dying, **CHAINED) as ckpt:
            ckpt.compact([2, 3])
        with opened(PowerCut(disk)) as ckpt:
            assert contents(ckpt) == BEFORE
            assert ckpt.info(2).metadata == OLD
            disk.advance(2 * DAY_S)
            ckpt.prune()
            assert ckpt.info(2).metadata == OLD
            check_no_garbage(PowerCut(disk), steps=3)
        if not dying.crashed:
            break
        points += every(3)
    assert points > 10
