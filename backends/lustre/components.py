"""The layout of a file, which maps its bytes to OSTs, and the layout's binary form.

The binary form is that of the extended attribute `lustre.lov`, from
`include/uapi/linux/lustre/lustre_user.h` of the Lustre sources (as of v2_17_57): `lov_user_md_v1`,
`lov_user_md_v3`, `lov_comp_md_v1` with `lov_comp_md_entry_v1`, `lov_foreign_md`. Sizes and
offsets agree with the assertions in `lustre/ptlrpc/wiretest.c` there. All structures are packed;
their byte order is that of the client, which the magic number shows.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Final, NoReturn

from penstock.core.errors import FormatError

LOV_ATTRIBUTE: Final = "lustre.lov"

MAGIC_V1: Final = 0x0BD10BD0
MAGIC_V3: Final = 0x0BD30BD0
MAGIC_SPECIFIC: Final = 0x0BD50BD0  # a folder's default that names its OSTs; laid out as V3
MAGIC_COMP_V1: Final = 0x0BD60BD0
MAGIC_FOREIGN: Final = 0x0BD70BD0
MAGIC_SEL: Final = 0x0BD80BD0  # self-extending; laid out as COMP_V1
_PLAIN: Final = (MAGIC_V1, MAGIC_V3, MAGIC_SPECIFIC)
_COMPOSITE: Final = (MAGIC_COMP_V1, MAGIC_SEL)
_KNOWN: Final = (*_PLAIN, *_COMPOSITE, MAGIC_FOREIGN)

_V1: Final = "II16xIHH"  # magic, pattern, object id, stripe size, stripe count, generation
_POOL_BYTES: Final = 16
_OBJECT: Final = "16xII"  # object id, generation, OST index
_COMP: Final = "IIIHHHB13x"  # magic, size, generation, flags, entries, mirrors - 1, ec
_ENTRY: Final = "IIQQIIIQ4x"  # id, flags, start, end, offset, size, generation, time
_COMP_BYTES: Final = 32
_ENTRY_BYTES: Final = 48
_OBJECT_BYTES: Final = 24

_PATTERN_RAID0: Final = 0x001
_PATTERN_MDT: Final = 0x100
_PATTERN_DEFAULT: Final = 0xFFFFFFFF
_PATTERN_RELEASED: Final = 0x80000000
_FLAG_STALE: Final = 0x01
_FLAG_INIT: Final = 0x10
_FLAG_EXTENSION: Final = 0x40
_FLAG_PARITY: Final = 0x80
_ALL_STRIPES_FROM: Final = 0xFFE0  # to 0xffff: over all OSTs, in a folder's default
_EOF: Final = (1 << 64) - 1
_EXTENSION_UNIT: Final = 1024
_MAGIC_BYTES: Final = 4
MAX_LAYOUT_BYTES: Final = 1 << 20  # the limit of attributes in a file system with `ea_inode`
ALL_STRIPES: Final = -1


@dataclass(frozen=True, slots=True)
class Component:
    """A range of a file and its striping.

    Attributes:
        start: The first byte.
        stop: The offset after the last byte; None means the end of the file.
        stripe_count: The number of stripes; 0 is the file system's default, `ALL_STRIPES` puts one
            stripe on every OST.
        stripe_bytes: The stripe size in bytes; 0 is the default.
        osts: The OST index of every stripe; empty until OSTs are assigned.
        on_mdt: Whether the bytes are on a metadata server (Data-on-MDT).
        stale: Whether the component's mirror lacks later writes.
        extension: Whether the component only extends the previous component, in steps of
            `stripe_bytes`.
        parity: Whether the component holds parity of other components, and no bytes of the file.
    """

    start: int = 0
    stop: int | None = None
    stripe_count: int = 1
    stripe_bytes: int = 0
    osts: tuple[int, ...] = ()
    on_mdt: bool = False
    stale: bool = False
    extension: bool = False
    parity: bool = False

    def covers(self, offset: int) -> bool:
        """Return whether the byte at `offset` is in the component's range."""
        return self.start <= offset and (self.stop is None or offset < self.stop)

    @property
    def striped(self) -> bool:
        """Whether the component has several stripes on OSTs."""
        return not self.on_mdt and self.stripe_count not in {0, 1}


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one file, or the default that a folder gives to new files.

    Attributes:
        components: The components, in stored order.
        foreign: Whether the bytes are outside Lustre. If so, there are no components.
    """

    components: tuple[Component, ...]
    foreign: bool = False

    def at(self, offset: int) -> Component | None:
        """Return the component that serves a read of `offset`; None if there is none."""
        serving = [
            c
            for c in self.components
            if c.covers(offset) and not (c.stale or c.extension or c.parity)
        ]
        return serving[0] if serving else None

    def ost_at(self, offset: int) -> int | None:
        """Return the index of the OST with the byte at `offset`; None if unknown or on the MDT."""
        component = self.at(offset)
        if component is None or not component.osts or component.on_mdt:
            return None
        if component.stripe_bytes <= 0:
            return component.osts[0] if len(component.osts) == 1 else None
        # Stripes are counted from the start of the file, not of the component (lov_offset.c).
        return component.osts[offset // component.stripe_bytes % len(component.osts)]

    @property
    def osts(self) -> tuple[int, ...]:
        """All OSTs with an object of the file, ascending; also those with stale bytes or parity."""
        return tuple(sorted({ost for c in self.components for ost in c.osts}))


def parse_layout(data: bytes, /) -> Layout:
    """Parse and validate the extended attribute `lustre.lov`.

    Raises:
        FormatError: The bytes are truncated, inconsistent or of an unknown kind.
    """
    if len(data) > MAX_LAYOUT_BYTES:
        _refuse(f"{len(data)} bytes are more than a layout can have")
    if len(data) < _MAGIC_BYTES:
        _refuse(f"{len(data)} bytes hold no magic number")
    order, magic = _byte_order(data)
    if magic == MAGIC_FOREIGN:
        (length,) = _unpack(order, "4xI8x", data, 0)
        if 16 + length > len(data):
            _refuse(f"a foreign value of {length} bytes does not fit")
        return Layout((), foreign=True)
    if magic in _PLAIN:
        return Layout((_plain(order, data, strict=False),))
    return _composite(order, data)


def _composite(order: str, data: bytes) -> Layout:
    _, size, _, _, entries, *_ = _unpack(order, _COMP, data, 0)
    table = _COMP_BYTES + entries * _ENTRY_BYTES
    if not table <= size <= len(data):
        _refuse(f"{entries} components in {size} of {len(data)} bytes")
    if not entries:
        _refuse("it has no component")
    components = tuple(
        _entry(order, data[:size], _COMP_BYTES + n * _ENTRY_BYTES, table) for n in range(entries)
    )
    return Layout(components)


def _entry(order: str, data: bytes, at: int, table: int) -> Component:
    number, flags, start, stop, offset, size, _, _ = _unpack(order, _ENTRY, data, at)
    if start >= stop:
        _refuse(f"component {number:#x} goes from {start} to {stop}")
    if offset < table or offset + size > len(data):
        _refuse(f"component {number:#x} is outside of the layout")
    blob = data[offset : offset + size]
    if size >= _MAGIC_BYTES and struct.unpack_from(order + "I", blob)[0] == MAGIC_FOREIGN:
        component = Component(stripe_count=0)
    else:
        component = _plain(order, blob, strict=bool(flags & _FLAG_INIT))
    extension = bool(flags & _FLAG_EXTENSION)
    return replace(
        component,
        start=start,
        stop=None if stop == _EOF else stop,
        # In an extension this field is the size of one step of growth, in KiB.
        stripe_bytes=component.stripe_bytes * (_EXTENSION_UNIT if extension else 1),
        osts=() if extension or not flags & _FLAG_INIT else component.osts,
        stale=bool(flags & _FLAG_STALE),
        extension=extension,
        parity=bool(flags & _FLAG_PARITY),
    )


def _plain(order: str, data: bytes, *, strict: bool) -> Component:
    """Parse version 1 or 3; with `strict`, the component must name the OSTs of its stripes."""
    magic, pattern, stripe_bytes, count, _ = _unpack(order, _V1, data, 0)
    if magic not in _PLAIN:
        _refuse(f"a component of the unknown kind {magic:#010x}")
    at = struct.calcsize(order + _V1)
    if magic != MAGIC_V1:
        if at + _POOL_BYTES > len(data):
            _refuse("it ends within the name of its pool")
        at += _POOL_BYTES
    if pattern == _PATTERN_DEFAULT:
        pattern = _PATTERN_RAID0
    on_mdt, released = bool(pattern & _PATTERN_MDT), bool(pattern & _PATTERN_RELEASED)
    objects = 0 if on_mdt or released or count >= _ALL_STRIPES_FROM else count
    room = (len(data) - at) // _OBJECT_BYTES
    if room < objects and (strict or len(data) != at):
        _refuse(f"{count} stripes, but only {room} objects")
    osts = tuple(
        _unpack(order, _OBJECT, data, at + n * _OBJECT_BYTES)[1] for n in range(min(objects, room))
    )
    if osts and not stripe_bytes:
        _refuse("stripes of no bytes")
    return Component(
        stripe_count=ALL_STRIPES if count >= _ALL_STRIPES_FROM else count,
        stripe_bytes=stripe_bytes,
        osts=osts,
        on_mdt=on_mdt,
    )


def _byte_order(data: bytes) -> tuple[str, int]:
    for order in ("<", ">"):
        (magic,) = struct.unpack_from(order + "I", data)
        if magic in _KNOWN:
            return order, magic
    (magic,) = struct.unpack_from("<I", data)
    msg = f"not a Lustre layout: the unknown kind {magic:#010x}"
    raise FormatError(msg, [LOV_ATTRIBUTE])


def _unpack(order: str, form: str, data: bytes, at: int) -> tuple[int, ...]:
    try:
        return struct.unpack_from(order + form, data, at)
    except struct.error as error:
        msg = f"not a Lustre layout: {len(data)} bytes are too few for the field at {at}"
        raise FormatError(msg, [LOV_ATTRIBUTE]) from error


def _refuse(what: str) -> NoReturn:
    msg = f"not a Lustre layout: {what}"
    raise FormatError(msg, [LOV_ATTRIBUTE])
