"""`units`: sizes and times as users read and write them."""

import pytest

from penstock.core.units import seconds_of, size_text


def test_sizes_are_shown_in_binary_units():
    for size, text in [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (3 << 40, "3.0 TiB"),
        (1 << 80, "1048576.0 EiB"),
    ]:
        assert size_text(size) == text


def test_times_are_read_with_and_without_a_unit():
    found = [seconds_of(text) for text in ("90", "90s", "1.5 min", "24h", " 7d ")]
    assert found == [90, 90, 90, 86_400, 604_800]
    for text in ("", "soon", "-1s", "nan", "1 year", "1_0"):
        with pytest.raises(ValueError, match="is not a time such as"):
            seconds_of(text)
