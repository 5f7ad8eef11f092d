"""The copy that releases the GIL."""

import pytest

from penstock.core.abc import copy_bytes


def test_the_whole_source_goes_to_the_start_of_the_target():
    target = bytearray(b"......")
    copy_bytes(memoryview(target), memoryview(b"abcd"))
    assert target == b"abcd.."


@pytest.mark.parametrize("target", [bytearray(b"..."), b"......"], ids=["short", "read-only"])
def test_an_unsuitable_target_is_refused_untouched(target):
    before = bytes(target)
    with pytest.raises(ValueError, match=r"broadcast|read-only"):
        copy_bytes(memoryview(target), memoryview(b"abcd"))
    assert target == before
