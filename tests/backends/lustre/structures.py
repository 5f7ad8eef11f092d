"""The structures of `lustre_user.h` (v2_17_57) as C declares them, to build layouts byte by byte.

Declared with ctypes, so nothing here shares a line with the parser under test.
"""

import ctypes
from ctypes import c_char, c_uint8, c_uint16, c_uint32, c_uint64


def packed(name, *fields, order=ctypes.LittleEndianStructure):
    return type(name, (order,), {"_pack_": 1, "_fields_": list(fields)})


def declare(order):
    """The structures in one byte order."""
    ost_id = ("oi", c_uint64 * 2)
    ost_data = packed(
        "lov_user_ost_data_v1",
        ost_id,
        ("l_ost_gen", c_uint32),
        ("l_ost_idx", c_uint32),
        order=order,
    )
    common = [
        ("lmm_magic", c_uint32),
        ("lmm_pattern", c_uint32),
        ("lmm_oi", c_uint64 * 2),
        ("lmm_stripe_size", c_uint32),
        ("lmm_stripe_count", c_uint16),
        ("lmm_layout_gen", c_uint16),
    ]
    v1 = packed("lov_user_md_v1", *common, order=order)
    v3 = packed("lov_user_md_v3", *common, ("lmm_pool_name", c_char * 16), order=order)
    foreign = packed(
        "lov_foreign_md",
        ("lfm_magic", c_uint32),
        ("lfm_length", c_uint32),
        ("lfm_type", c_uint32),
        ("lfm_flags", c_uint32),
        order=order,
    )
    entry = packed(
        "lov_comp_md_entry_v1",
        ("lcme_id", c_uint32),
        ("lcme_flags", c_uint32),
        ("e_start", c_uint64),
        ("e_end", c_uint64),
        ("lcme_offset", c_uint32),
        ("lcme_size", c_uint32),
        ("lcme_layout_gen", c_uint32),
        ("lcme_time_and_id", c_uint64),
        ("lcme_dstripe_count", c_uint8),
        ("lcme_cstripe_count", c_uint8),
        ("lcme_compr", c_uint8 * 2),
        order=order,
    )
    comp = packed(
        "lov_comp_md_v1",
        ("lcm_magic", c_uint32),
        ("lcm_size", c_uint32),
        ("lcm_layout_gen", c_uint32),
        ("lcm_flags", c_uint16),
        ("lcm_entry_count", c_uint16),
        ("lcm_mirror_count", c_uint16),
        ("lcm_ec_count", c_uint8),
        ("lcm_padding3", c_uint8),
        ("lcm_padding1", c_uint16 * 2),
        ("lcm_padding2", c_uint64),
        order=order,
    )
    sizes = [ctypes.sizeof(s) for s in (ost_data, v1, v3, foreign, entry, comp)]
    assert sizes == [24, 32, 48, 16, 48, 32]  # wiretest.c
    return ost_data, v1, v3, foreign, entry, comp


LITTLE = declare(ctypes.LittleEndianStructure)
BIG = declare(ctypes.BigEndianStructure)
EOF = (1 << 64) - 1
INIT, STALE, EXTENSION, PARITY = 0x10, 0x01, 0x40, 0x80
RAID0, MDT, RELEASED, OVERSTRIPING = 0x1, 0x100, 0x80000000, 0x200


def plain(osts=(), *, size=1 << 20, count=None, pool=None, pattern=RAID0, magic=None, order=LITTLE):
    """A plain layout; `pool` makes it version 3."""
    ost_data, v1, v3, *_ = order
    kind = v1 if pool is None else v3
    head = kind(
        lmm_magic=magic or (0x0BD10BD0 if pool is None else 0x0BD30BD0),
        lmm_pattern=pattern,
        lmm_stripe_size=size,
        lmm_stripe_count=len(osts) if count is None else count,
    )
    if pool is not None:
        head.lmm_pool_name = pool
    return bytes(head) + b"".join(bytes(ost_data(l_ost_idx=index)) for index in osts)


def composite(*parts, mirrors=1, magic=0x0BD60BD0, order=LITTLE):
    """A composite layout of `(id, flags, start, end, blob)`."""
    *_, entry, comp = order
    at = 32 + 48 * len(parts)
    table = blobs = b""
    for number, flags, start, end, blob in parts:
        table += bytes(
            entry(
                lcme_id=number,
                lcme_flags=flags,
                e_start=start,
                e_end=end,
                lcme_offset=at + len(blobs),
                lcme_size=len(blob),
            )
        )
        blobs += blob
    head = comp(
        lcm_magic=magic,
        lcm_size=at + len(blobs),
        lcm_entry_count=len(parts),
        lcm_mirror_count=mirrors - 1,
    )
    return bytes(head) + table + blobs


def foreign(value, *, order=LITTLE):
    """A layout that is not Lustre's."""
    return bytes(order[3](lfm_magic=0x0BD70BD0, lfm_length=len(value))) + value
