"""The advice on layouts in errors and warnings."""

import errno

from penstock.backends.lustre.backend import about_default, about_osts
from penstock.backends.lustre.components import ALL_STRIPES, Component, Layout
from penstock.backends.lustre.policy import Ost
from penstock.core.types import ByteRange

MIB = 1 << 20
STRIPED = Layout((Component(stripe_count=2, stripe_bytes=16 * MIB, osts=(3, 26)),))
OSTS = (Ost(3, 500 * 10**9), Ost(26, 1_500_000), Ost(7, 900 * 10**9))


def test_a_full_ost_is_named_with_free_space():
    text = about_osts(errno.ENOSPC, STRIPED, ByteRange(16 * MIB, 32 * MIB), OSTS)
    assert "OST 26 (OST001a) with 1.5 MB free" in text
    assert "OST 3 " not in text
    assert "OSTs is OST 7 (OST0007) with 900,000.0 MB free" in text


def test_no_ost_is_named_without_a_known_culprit():
    for number, layout in [
        (errno.EDQUOT, STRIPED),
        (errno.ENOSPC, None),
        (errno.ENOSPC, Layout((Component(),))),
    ]:
        assert about_osts(number, layout, ByteRange(0, 4096), OSTS) == ""


def default(count, **component):
    return Layout((Component(stripe_count=count, stripe_bytes=MIB, **component),))


ALWAYS = {"blob_bytes": 64 << 30, "blobs_inherit": True, "records_inherit": True}


def test_a_wide_default_hurts_records():
    for count, advice in [(ALL_STRIPES, "every OST"), (16, "many OSTs")]:
        assert advice in about_default(default(count), **ALWAYS)
        assert about_default(default(count), **ALWAYS | {"records_inherit": False}) == ""
