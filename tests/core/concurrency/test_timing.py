"""The lengths of waits, and the clocks."""

import dataclasses
import threading

import pytest

from penstock.core.concurrency.timing import SYSTEM_CLOCK, Timing, current_timing, timing_in_force
from penstock.testing.hasty import FAST, ShiftedClock


def test_a_timing_is_in_force_within_its_block_and_in_all_threads():
    default = current_timing()
    seen = []
    with timing_in_force(FAST) as outer, timing_in_force(Timing(poll_s=7)) as inner:
        assert current_timing() is inner
        thread = threading.Thread(target=lambda: seen.append(current_timing()))
        thread.start()
        thread.join()
        assert seen == [inner]
        assert outer is FAST
    assert current_timing() is default == Timing()


def test_a_fixture_puts_other_waits_in_force(waits):
    assert waits(poll_s=3) is current_timing() == Timing(poll_s=3)
    assert waits(FAST, release_s=1) == dataclasses.replace(FAST, release_s=1) == current_timing()


def test_no_length_of_a_wait_is_without_its_unit():
    names = {field.name for field in dataclasses.fields(Timing)} - {"clock"}
    assert all(name.endswith("_s") for name in names)


@pytest.mark.parametrize("name", ["monotonic_s", "boot_s", "wall_s"])
def test_a_clock_can_be_moved(name):
    clock = ShiftedClock(1000)
    before = getattr(SYSTEM_CLOCK, name)()
    assert getattr(clock, name)() >= before + 1000
    clock.ahead_s = lambda: -5000
    assert getattr(clock, name)() < before


def test_records_hold_the_wall_clocks_time_in_utc():
    class Still(ShiftedClock):
        def wall_s(self):
            return 1_767_225_600.9

    assert Still().now_iso() == "2026-01-01T00:00:00Z"
