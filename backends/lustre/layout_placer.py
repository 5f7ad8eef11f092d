"""The placer: sets the layout of every new file under one root, and reads those of open ones."""

from __future__ import annotations

import errno
import logging
import os
import time
import zlib
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from penstock.backends.local.transfer import TRANSFER_BYTES
from penstock.backends.lustre.components import parse_layout
from penstock.backends.lustre.lfs import LfsAnswer, existing_folder, parse_df
from penstock.backends.lustre.policy import Demand, Striping, plan_striping
from penstock.core.errors import (
    CapabilityError,
    FormatError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
)
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from penstock.backends.local.failures import Advise
    from penstock.backends.local.namespace import Birth
    from penstock.backends.lustre import LustreConfig
    from penstock.backends.lustre.components import Layout
    from penstock.backends.lustre.lfs import LustreClient
    from penstock.backends.lustre.policy import Ost
    from penstock.core.types import ByteRange

log = logging.getLogger("penstock")

MIN_CUT_BYTES: Final = 4 << 20  # smaller stripes are not worth a request of their own

FREE_SPACE_IS_GOOD_FOR_S: Final = 600.0  # `lfs df` asks every OST, which is too slow for each blob
_DOM_BYTES: Final = "64K"
_SHOWN: Final = 8  # OSTs in one message


def cut_bytes(layout: Layout | None, /) -> int:
    """Return the size at whose multiples requests are cut, so that each goes to one OST.

    0 if requests are not cut: the layout is unknown, or its stripes are too small or uneven.
    """
    if layout is None:
        return 0
    sizes = {c.stripe_bytes for c in layout.components if c.striped and c.osts}
    # Components may differ in stripe size: the smallest one serves if it divides all others.
    smallest = min(sizes, default=0)
    if smallest < MIN_CUT_BYTES or smallest % PAGE_BYTES or any(s % smallest for s in sizes):
        return 0
    return smallest


class LayoutPlacer:
    """Decides and sets the layout of every new file under one root.

    Threads share it without a lock, since a forked child could not release a lock that a thread of
    its parent held. Two threads may both ask `lfs df`.
    """

    def __init__(
        self, client: LustreClient, root: str, config: LustreConfig, ranks: tuple[int, int]
    ) -> None:
        self._client = client
        self._root = root
        self._config = config
        self._ranks = ranks
        self._osts: tuple[Ost, ...] = ()
        self._asked_s: float | None = None
        self._warned: set[str] = set()

    def blob(self, name: str, size_hint: int | None) -> Birth | None:
        """Return the function that creates a blob's file; None takes the folder's default."""
        if self._config.stripe_count == "inherit":
            return None
        striping = self._striping(name, size_hint)
        return lambda path: self._place(path, striping)

    def record(self) -> Birth | None:
        """Return the function that creates a record's file; None takes the folder's default."""
        kind = self._config.records
        if kind == "dom":
            layout = ("-E", _DOM_BYTES, "-L", "mdt", "-E", "-1", "-c", "1")
            return lambda path: self._set_or_inherit(path, *layout)
        if kind == "auto" and self._spreads_records:
            return lambda path: self._set_or_inherit(path, "-c", "1")
        return None

    def layout(self, file: int | str) -> Layout | None:
        """Return the layout of an open blob, or the default of a folder; None if it is not known.

        Raises:
            OSError: The file system failed.
        """
        data = self._client.layout_attribute(file)
        try:
            return None if data is None else parse_layout(data)
        except FormatError as error:
            self._warn_once("a layout is not understood, so requests are not cut at stripes", error)
            return None

    def adviser(self, layout: Layout | None) -> Advise:
        """Return a function that names the OST of a failed write to a file of `layout`."""

        def advise(error: OSError, where: ByteRange | None) -> str:
            osts: tuple[Ost, ...] = ()
            if error.errno == errno.ENOSPC:
                # This runs in the engine's thread, so other transfers are reaped only afterwards.
                # But the blob is lost, and older figures would name the wrong OST.
                osts = self._free_space(max_age_s=0.0)
            return about_osts(error.errno or 0, layout, where, osts)

        return advise

    # -- below --------------------------------------------------------------------------------

    def _striping(self, name: str, size_hint: int | None) -> Striping:
        config = self._config
        writers, writer = self._ranks
        folder, _, leaf = name.rpartition("/")
        demand = Demand(
            blob_bytes=size_hint,
            writers=writers,
            writer=writer,
            io_bytes=TRANSFER_BYTES,
            in_flight=config.parallel,
            salt=zlib.crc32(f"{folder} {leaf.rpartition('.')[2]}".encode()),
        )
        osts: tuple[Ost, ...] = ()
        if config.stripe_count == "auto" and not config.pool:
            osts = self._free_space(max_age_s=FREE_SPACE_IS_GOOD_FOR_S)
        planned = plan_striping(demand, osts)
        if isinstance(config.stripe_count, int):
            planned = Striping(config.stripe_count, planned.stripe_bytes)
        if config.stripe_bytes != "auto":
            planned = replace(planned, stripe_bytes=config.stripe_bytes)
        return planned

    def _place(self, path: str, striping: Striping) -> None:
        """Create the file by the plan; else with OSTs of the server's choice; else by default."""
        common = ["-c", str(striping.stripe_count), "-S", str(striping.stripe_bytes)]
        if self._config.pool:
            common += ["-p", self._config.pool]
        if striping.osts:
            named = self._setstripe(path, *common, "-o", ",".join(map(str, striping.osts)))
            if named.code == 0:
                return
            self._warn_once("OSTs cannot be named, so the server chooses", _complaint(named))
        self._set_or_inherit(path, *common, "-i", "-1")

    def _set_or_inherit(self, path: str, *layout: str) -> None:
        answer = self._setstripe(path, *layout)
        if answer.code == 0:
            return
        self._refuse_if_final(path, answer)
        self._warn_once(
            "layouts cannot be set, so files get the folder's default", _complaint(answer)
        )
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))

    def _setstripe(self, path: str, *arguments: str) -> LfsAnswer:
        try:
            answer = self._client.lfs("setstripe", *arguments, path)
        except CapabilityError as error:  # there is no such program
            return LfsAnswer(errno.ENOSYS, "", str(error))
        if answer.code != 0:
            with suppress(FileNotFoundError):
                os.unlink(path)  # it may have been created without the layout
        elif answer.complaint:
            # Where an administrator reserves layouts, `lfs` warns, and creates a plain file.
            self._warn_once("lfs setstripe warns", answer.complaint)
        if answer.code == errno.ENOENT and _is_gone(os.path.dirname(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return answer

    def _refuse_if_final(self, path: str, answer: LfsAnswer) -> None:
        folder, leaf = os.path.split(path)
        named = os.path.relpath(os.path.join(os.path.realpath(folder), leaf), self._root)
        where = f"cannot create {named} under {self._root}"
        if "pool" in answer.complaint.lower() and self._config.pool:
            msg = (
                f"{where} in the OST pool {self._config.pool!r}: {_complaint(answer)}; "
                "'lfs pool_list' shows the pools there are"
            )
            raise StorageError(msg)
        if answer.code == errno.ENOSPC:
            osts = self._free_space(max_age_s=0.0)
            free = ", ".join(
                f"OST {ost.index} (OST{ost.index:04x}): {ost.free_bytes / 1e6:,.1f} MB"
                for ost in sorted(osts, key=lambda ost: ost.free_bytes)[:4]
            )
            msg = f"{where}: no room for its objects; least free: {free or 'unknown'}; make room"
            raise StorageFullError(msg)

    def _free_space(self, *, max_age_s: float) -> tuple[Ost, ...]:
        if self._asked_s is not None and time.monotonic() - self._asked_s < max_age_s:
            return self._osts
        try:
            self._osts = parse_df(self._client.lfs("df", self._root).text)
        except (CapabilityError, FormatError, StorageTimeoutError) as error:
            self._osts = ()
            self._warn_once("the OSTs are not known, so their choice is the server's", error)
        self._asked_s = time.monotonic()
        return self._osts

    @cached_property
    def _spreads_records(self) -> bool:
        """Whether a small file with the default of the folder would lie on several OSTs."""
        folder = existing_folder(self._root)  # a new one takes over its parent's default
        top = folder
        while not os.path.ismount(top):
            top = os.path.dirname(top)
        try:
            # A folder without a default has that of the file system, which is its top folder's.
            default = self.layout(folder) or self.layout(top)
        except OSError as error:
            self._warn_once(f"the default layout of {folder} is not known", error)
            return False
        first = default.at(0) if default is not None else None
        return first is not None and first.striped

    def _warn_once(self, topic: str, reason: object) -> None:
        # By topic alone: a reason names a file, so it differs for each blob.
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning("lustre: %s: %s", topic, reason)


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


def _complaint(answer: LfsAnswer) -> str:
    lines = [line.strip() for line in answer.complaint.splitlines() if line.strip()]
    return lines[0] if lines else f"lfs ended with {answer.code}"


def _is_gone(folder: str) -> bool:
    """Return whether an open folder was removed, as its link in /proc shows."""
    return os.readlink(folder).endswith(" (deleted)")


def _named(ost: int, free: dict[int, int]) -> str:
    name = f"OST {ost} (OST{ost:04x})"
    return f"{name} with {free[ost] / 1e6:,.1f} MB free" if ost in free else name
