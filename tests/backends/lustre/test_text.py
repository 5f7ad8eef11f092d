"""The output of `lfs df` is read; nonsense is refused."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.lustre.lfs import parse_df
from penstock.backends.lustre.policy import Ost
from penstock.core.errors import FormatError

# From lfs-df(1), with bytes as `lfs df` prints them without -h.
DF = """UUID                   1K-blocks        Used   Available Use% Mounted on
testfs-MDT0000_UUID     13631488     1258291    11534336  10% /testfs[MDT:0]
testfs-OST0000_UUID   3865470566  3113851289   614150144  84% /testfs[OST:0]
testfs-OST0001_UUID   3865470566  3328599654   495452160  87% /testfs[OST:1] D
testfs-OST0002_UUID   3865470566  3221225472   598002892  84% /testfs[OST:2] DR
OST0003             : inactive device
OST0004             : Resource temporarily unavailable
testfs-OST00ff_UUID   5798205849  5261334937   437878784  92% /mnt/a b[OST:255]

filesystem_summary:  17394617547 14925011352  2145483980  88% /testfs
"""


def test_df_shows_the_free_space_and_the_state_of_every_ost():
    assert parse_df(DF) == (
        Ost(0, 614150144 << 10),
        Ost(1, 495452160 << 10, "D"),
        Ost(2, 598002892 << 10, "DR"),
        Ost(255, 437878784 << 10),
    )


@given(st.text(max_size=400) | st.just(DF), st.data())
def test_no_text_at_all_does_any_harm(text, draw):
    if text:
        at = draw.draw(st.integers(0, len(text) - 1))
        cut = at + draw.draw(st.integers(0, 9))
        text = text[:at] + draw.draw(st.text(max_size=9)) + text[cut:]
    try:
        parse_df(text)
    except FormatError:
        return
