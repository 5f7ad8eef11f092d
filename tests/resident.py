"""The resident memory of a test."""

from pathlib import Path

import pytest

measured = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="Linux measures the peak"
)


def peak_bytes(call):
    """How far the resident memory rises while `call` runs."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(key):
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if key in one)
    return int(line.split()[1]) << 10
