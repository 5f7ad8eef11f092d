"""Advice on layouts: which OST an error is about, and the effect of a folder's default."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from penstock.backends.lustre.layout import ALL_STRIPES

if TYPE_CHECKING:
    from penstock.backends.lustre.layout import Layout
    from penstock.backends.lustre.policy import Ost
    from penstock.core.types import ByteRange

BIG_BLOB_BYTES: Final = 4 << 30
_SHOWN: Final = 8


def about_osts(
    number: int, layout: Layout | None, where: ByteRange | None, osts: tuple[Ost, ...]
) -> str:
    """Return a sentence that names the OSTs of a failed write, with free space if they are full.

    A file on a full OST fails with ENOSPC while the file system as a whole has room.

    Args:
        number: The `errno`.
        layout: The layout of the file.
        where: The bytes that could not be written; None means any bytes of the file.
        osts: The OSTs with their free space now, as far as known.
    """
    if layout is None or number == errno.EDQUOT:  # a quota is not a matter of single OSTs
        return ""
    if where is None:
        touched = layout.osts
    else:
        ends = (layout.ost_at(where.start), layout.ost_at(max(where.start, where.stop - 1)))
        touched = tuple(sorted({ost for ost in ends if ost is not None}))
    if not touched:
        return ""
    free = {ost.index: ost.free_bytes for ost in osts}
    touched = tuple(sorted(touched, key=lambda ost: (free.get(ost, 0), ost)))
    named = ", ".join(_named(ost, free) for ost in touched[:_SHOWN])
    more = f" and {len(touched) - _SHOWN} more" if len(touched) > _SHOWN else ""
    sentence = f"the bytes lie on {named}{more}"
    if number != errno.ENOSPC or not free:
        return sentence
    roomiest = max(free, key=lambda ost: free[ost])
    return (
        f"{sentence}; of {len(free)} OSTs, {_named(roomiest, free)} has the most: a full OST stops "
        "a file though others have room ('lfs df' shows them)"
    )


def about_default(
    layout: Layout | None, *, blob_bytes: int | None, blobs_inherit: bool, records_inherit: bool
) -> str:
    """Return a sentence on the harm of a folder's default layout to new files; empty if none."""
    if layout is None or not layout.components:
        return ""
    widest = max(
        (c.stripe_count for c in layout.components if not (c.extension or c.parity)),
        key=lambda count: 1 << 31 if count == ALL_STRIPES else count,
        default=1,
    )
    if records_inherit and stripes_records_widely(layout):
        every = "every OST" if layout.components[0].stripe_count == ALL_STRIPES else "many OSTs"
        return (
            f"its default layout puts even small files on {every}; set records='auto' or "
            "'lfs setstripe -c 1' on the folder"
        )
    if blobs_inherit and widest in {0, 1} and (blob_bytes or 0) >= BIG_BLOB_BYTES:
        return (
            f"its default layout puts a blob of {(blob_bytes or 0) / 1e9:.0f} GB on one OST; set "
            "stripe_count='auto'"
        )
    return ""


def stripes_records_widely(layout: Layout | None) -> bool:
    """Return whether a small file with this default would lie on several OSTs."""
    first = layout.at(0) if layout is not None else None
    return first is not None and first.striped


def _named(ost: int, free: dict[int, int]) -> str:
    name = f"OST {ost} (OST{ost:04x})"
    return f"{name} with {free[ost] / 1e6:,.1f} MB free" if ost in free else name
