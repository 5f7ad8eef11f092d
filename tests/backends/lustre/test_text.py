"""The output of new and old versions of `lfs` reads the same; nonsense is refused."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.lustre.components import Component, Layout
from penstock.backends.lustre.lfs import parse_df, parse_getstripe
from penstock.backends.lustre.policy import Ost
from penstock.core.errors import FormatError

MIB = 1 << 20

PLAIN = """/mnt/lustre/file1
lmm_stripe_count:  2
lmm_stripe_size:   1048576
lmm_pattern:       raid0
lmm_layout_gen:    0
lmm_stripe_offset: 1
lmm_pool:          flash
\tobdidx\t\t objid\t\t objid\t\t group
\t     1\t          4711\t       0x1267\t             0\t
\t    12\t          4711\t       0x1267\t   0x2c0000401\t

"""

YAML = """lmm_stripe_count:  2
lmm_stripe_size:   1048576
lmm_pattern:       raid0
lmm_layout_gen:    0
lmm_stripe_offset: 1
lmm_pool:          flash
lmm_objects:
      - l_ost_idx: 1
        l_fid:     0x100010000:0x2:0x0
      - l_ost_idx: 12
        l_fid:     0x1000c0000:0x2:0x0
"""

COMPOSITE = """  lcm_layout_gen:    3
  lcm_mirror_count:  2
  lcm_entry_count:   3
  components:
  - lcme_id:             65537
    lcme_mirror_id:      1
    lcme_flags:          init
    lcme_extent.e_start: 0
    lcme_extent.e_end:   1048576
    sub_layout:
      lmm_stripe_count:  0
      lmm_stripe_size:   1048576
      lmm_pattern:       mdt
      lmm_layout_gen:    0
      lmm_stripe_offset: 0
  - lcme_id:             65538
    lcme_mirror_id:      1
    lcme_flags:          init
    lcme_extent.e_start: 1048576
    lcme_extent.e_end:   EOF
    sub_layout:
      lmm_stripe_count:  2
      lmm_stripe_size:   1048576
      lmm_pattern:       raid0
      lmm_layout_gen:    0
      lmm_stripe_offset: 1
      lmm_objects:
      - 0: { l_ost_idx:   1, l_fid: [0x100010000:0x2:0x0] }
      - 1: { l_ost_idx: 0x2, l_fid: [0x100020000:0x3:0x0] }
  - lcme_id:             131073
    lcme_mirror_id:      2
    lcme_flags:          init,stale,nosync
    lcme_timestamp:      'Mon May 4 00:00:00 2020'
    lcme_extent.e_start: 0
    lcme_extent.e_end:   EOF
    sub_layout:
      lmm_stripe_count:  -1
      lmm_stripe_size:   1048576
      lmm_pattern:       raid0
      lmm_layout_gen:    0
      lmm_stripe_offset: -1
"""


def test_a_plain_file_reads_the_same_in_both_forms():
    for text in [PLAIN, YAML]:
        component = Component(stripe_count=2, stripe_bytes=MIB, osts=(1, 12))
        assert parse_getstripe(text) == Layout((component,))


@given(st.text(max_size=400) | st.sampled_from([PLAIN, YAML, COMPOSITE]), st.data())
def test_any_input_text_is_safe(text, draw):
    if text:
        at = draw.draw(st.integers(0, len(text) - 1))
        text = (
            text[:at] + draw.draw(st.text(max_size=9)) + text[at + draw.draw(st.integers(0, 9)) :]
        )
    for parse in (parse_getstripe, parse_df):
        try:
            parse(text)
        except FormatError:
            continue


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
