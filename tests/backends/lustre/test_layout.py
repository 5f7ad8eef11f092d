"""Layouts as the kernel shows them: every kind is read, and nothing else is believed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.backends.lustre.structures import (
    BIG,
    EOF,
    EXTENSION,
    INIT,
    LITTLE,
    MDT,
    OVERSTRIPING,
    PARITY,
    RAID0,
    RELEASED,
    STALE,
    composite,
    foreign,
    plain,
)

from penstock.backends.lustre.components import ALL_STRIPES, Component, Layout, parse_layout
from penstock.core.errors import FormatError

MIB = 1 << 20


def test_version_1_names_the_ost_of_every_stripe():
    layout = parse_layout(plain([7, 3, 5], size=MIB))
    assert layout == Layout((Component(stripe_count=3, stripe_bytes=MIB, osts=(7, 3, 5)),))
    assert [layout.ost_at(n * MIB) for n in range(4)] == [7, 3, 5, 7]
    assert layout.ost_at(MIB - 1) == 7
    assert layout.osts == (3, 5, 7)


def test_bytes_as_a_hexdump_shows_them():
    # lov_user_md_v1 with two stripes of 4 MiB on OSTs 258 and 2, written out by hand.
    data = bytes.fromhex(
        "d00bd10b 01000000 0200000000000000 0000000000000000 00004000 0200 0300"
        "1100000000000000 0000000000000000 00000000 02010000"
        "1200000000000000 0000000000000000 00000000 02000000"
    )
    assert parse_layout(data).components[0] == Component(
        stripe_count=2, stripe_bytes=4 * MIB, osts=(258, 2)
    )


def test_version_3_has_a_pool():
    for pool in (b"flash", b"fifteen-letters"):
        assert parse_layout(plain([1], pool=pool)).components[0].osts == (1,)


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


def test_a_mirror_that_is_stale_serves_no_reads():
    layout = parse_layout(
        composite(
            (0x10001, INIT | STALE, 0, EOF, plain([4])),
            (0x20002, INIT, 0, EOF, plain([9])),
            mirrors=2,
        )
    )
    assert layout.ost_at(123) == 9
    assert layout.osts == (4, 9)


def test_data_on_the_metadata_server_lies_on_no_ost():
    layout = parse_layout(
        composite(
            (1, INIT, 0, 64 << 10, plain(pattern=MDT, size=64 << 10, count=0)),
            (2, 0, 64 << 10, EOF, plain(count=2)),
        )
    )
    assert layout.components[0].on_mdt
    assert not layout.components[0].striped
    assert layout.ost_at(0) is None
    assert layout.ost_at(1 << 20) is None  # not yet instantiated
    assert layout.osts == ()


def test_an_extension_counts_in_kib_and_serves_nothing():
    layout = parse_layout(
        composite(
            (1, INIT, 0, 256 * MIB, plain([2])),
            (2, EXTENSION, 256 * MIB, EOF, plain(size=64 << 10, count=1)),
            magic=0x0BD80BD0,
        )
    )
    assert layout.components[1].extension
    assert layout.components[1].stripe_bytes == 64 * MIB
    assert layout.at(300 * MIB) is None


def test_parity_serves_no_reads():
    data = composite((1, INIT, 0, EOF, plain([2])), (2, INIT | PARITY, 0, EOF, plain([3])))
    assert parse_layout(data).ost_at(0) == 2


def test_a_foreign_layout_has_no_components():
    assert parse_layout(foreign(b"daos://pool")) == Layout((), foreign=True)
    inside = composite((1, INIT, 0, EOF, foreign(b"hsm")))
    assert parse_layout(inside).ost_at(0) is None


def test_a_released_file_has_no_objects():
    component = parse_layout(plain(count=3, pattern=RAID0 | RELEASED)).components[0]
    assert component.osts == ()


def test_a_folder_may_ask_for_every_ost():
    for count in [0xFFFF, 0xFFE0]:
        component = parse_layout(plain(count=count, size=0)).components[0]
        assert component.stripe_count == ALL_STRIPES
        assert component.striped


def test_a_folder_may_name_its_osts():
    component = parse_layout(plain([6, 2], pool=b"", magic=0x0BD50BD0)).components[0]
    assert component.osts == (6, 2)


def test_overstriping_puts_several_stripes_on_one_ost():
    layout = parse_layout(plain([1, 1, 2, 2], pattern=RAID0 | OVERSTRIPING))
    assert layout.osts == (1, 2)
    assert layout.ost_at(3 * MIB) == 2


def test_the_other_byte_order_is_read_too():
    assert parse_layout(plain([5, 6], pool=b"p", order=BIG)) == parse_layout(
        plain([5, 6], pool=b"p")
    )
    part = (0x10002, INIT, MIB, 9 * MIB, plain([5], order=BIG))
    twin = (0x10002, INIT, MIB, 9 * MIB, plain([5]))
    assert parse_layout(composite(part, order=BIG)) == parse_layout(composite(twin))
    assert parse_layout(foreign(b"x", order=BIG)).foreign


def test_what_is_no_layout_is_refused():
    for data, what in [
        (b"", "no magic"),
        (b"\x00\x00\xd1\x0b" + bytes(60), "unknown kind"),
        (plain([1], magic=0x0BD20BD0), "unknown kind 0x0bd20bd0"),  # JOIN_V1
        (plain([1, 2])[:-1], "2 stripes, but only 1"),
        (plain([1])[:20], "end before"),
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
def test_no_bytes_at_all_do_any_harm(data, draw):
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
def test_every_byte_is_where_raid_0_puts_it(osts, size, offset):
    layout = parse_layout(plain(osts, size=size))
    assert layout.ost_at(offset) == osts[(offset // size) % len(osts)]
