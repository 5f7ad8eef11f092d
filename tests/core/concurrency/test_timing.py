"""Timeouts and clocks."""

import threading

from penstock.core.concurrency.timing import Timing, current_timing, timing_in_force
from penstock.testing.hasty import FAST


def test_a_timing_applies_within_its_block_in_all_threads():
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
