"""Layouts as the kernel shows them: every kind is read, and all else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.backends.lustre.structures import (
    BIG,
    EOF,
    INIT,
    LITTLE,
    MDT,
    OVERSTRIPING,
    RAID0,
    RELEASED,
    STALE,
    composite,
    foreign,
    plain,
)

from penstock.backends.lustre.components import parse_layout
from penstock.core.errors import FormatError

MIB = 1 << 20


def test_the_documented_example_of_two_components():
    # The comment above lov_dump_comp_v1 in liblustreapi.c: 264 bytes, blobs at 128 and 184.
    data = composite(
        (1, INIT, 0, MIB, plain([0], size=MIB)),
        (2, INIT, MIB, EOF, plain([1, 0], size=MIB)),
    )
    assert len(data) == 264
    layout = parse_layout(data)
    assert [(c.start, c.stop, c.osts) for c in layout.components] == [
        (0, MIB, (0,)),
        (MIB, None, (1, 0)),
    ]
    # Stripes count from the start of the file: byte 1 MiB is the second stripe.
    assert [layout.ost_at(n * MIB) for n in range(4)] == [0, 0, 1, 0]


def test_a_stale_mirror_serves_no_reads():
    layout = parse_layout(
        composite(
            (0x10001, INIT | STALE, 0, EOF, plain([4])),
            (0x20002, INIT, 0, EOF, plain([9])),
            mirrors=2,
        )
    )
    assert layout.ost_at(123) == 9
    assert layout.osts == (4, 9)


def test_non_layouts_are_refused():
    for data, what in [
        (b"", "no magic"),
        (b"\x00\x00\xd1\x0b" + bytes(60), "unknown kind"),
        (plain([1], magic=0x0BD20BD0), "unknown kind 0x0bd20bd0"),  # JOIN_V1
        (plain([1, 2])[:-1], "2 stripes, but only 1"),
        (plain([1])[:20], "too few for"),
        (plain([1], pool=b"pool")[:40], "pool"),
        (plain([1, 2], size=0), "no bytes"),
        (composite((1, INIT, 0, EOF, plain([1])))[:100], "in 136 of 100 bytes"),
        (composite((1, INIT, 5, 5, plain([1]))), "from 5 to 5"),
        (composite((1, INIT, 0, EOF, plain(count=4))), "4 stripes, but only 0"),
        (composite(), "no component"),
        (foreign(b"daos")[:-1], "does not fit"),
        (plain([1]) + bytes(2 << 20), "more than a layout can have"),
    ]:
        with pytest.raises(FormatError, match=what):
            parse_layout(data)


def test_a_component_cannot_lie_outside_or_on_the_table():
    good = bytearray(composite((1, INIT, 0, EOF, plain([1]))))
    for offset in (0, 79, 137, 0xFFFFFFFF):
        bad = bytearray(good)
        bad[32 + 24 : 32 + 28] = offset.to_bytes(4, "little")
        with pytest.raises(FormatError, match="outside"):
            parse_layout(bytes(bad))


PLAIN = st.builds(
    plain,
    st.lists(st.integers(0, 0xFFFFFFFF), max_size=5),
    size=st.sampled_from([0, 65536, MIB, 0xFFFF0000]),
    count=st.none() | st.integers(0, 0xFFFF),
    pool=st.none() | st.binary(max_size=15),
    pattern=st.sampled_from([RAID0, MDT, RAID0 | RELEASED, RAID0 | OVERSTRIPING, 0xFFFFFFFF]),
    order=st.sampled_from([LITTLE, BIG]),
)
PART = st.tuples(
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 0xFF),
    st.integers(0, EOF),
    st.integers(0, EOF),
    PLAIN | st.binary(max_size=60),
)
ANY = PLAIN | st.lists(PART, max_size=4).map(lambda parts: composite(*parts))


@given(ANY | st.binary(max_size=300), st.data())
def test_any_input_bytes_are_safe(data, draw):
    data = bytearray(data)
    for _ in range(draw.draw(st.integers(0, 3)) if data else 0):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    data = bytes(data[: draw.draw(st.integers(0, len(data)))])
    try:
        layout = parse_layout(data)
    except FormatError:
        return
    assert layout.foreign or layout.components
    assert sum(len(c.osts) for c in layout.components) * 24 <= max(1, len(layout.components)) * (
        len(data)
    )
    for component in layout.components:
        assert component.stop is None or component.start < component.stop
        assert not component.osts or component.stripe_bytes > 0
        layout.ost_at(component.start)


@given(
    st.lists(st.integers(0, 1999), min_size=1, max_size=12),
    st.integers(1, 64).map(lambda n: n * 65536),
    st.integers(0, 1 << 40),
)
def test_every_byte_is_placed_as_raid_0(osts, size, offset):
    layout = parse_layout(plain(osts, size=size))
    assert layout.ost_at(offset) == osts[(offset // size) % len(osts)]
