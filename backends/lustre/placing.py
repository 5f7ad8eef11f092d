"""The layout of new files, set before their first byte: `lfs setstripe` creates the file.

Lustre fixes a file's layout at its creation, or at its first write at the latest.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.backends.lustre.client import existing_folder
from penstock.backends.lustre.layout import ALL_STRIPES, parse_layout
from penstock.backends.lustre.policy import Demand, Striping, plan_striping
from penstock.backends.lustre.text import parse_df, parse_getstripe
from penstock.core.errors import (
    CapabilityError,
    FormatError,
    PenstockError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
)

if TYPE_CHECKING:
    from penstock.backends.local.failures import Advise
    from penstock.backends.local.namespace import Birth
    from penstock.backends.lustre.client import LfsAnswer, LustreClient
    from penstock.backends.lustre.config import LustreConfig
    from penstock.backends.lustre.layout import Layout
    from penstock.backends.lustre.policy import Ost
    from penstock.core.types import ByteRange

log = logging.getLogger("penstock")

FREE_SPACE_IS_GOOD_FOR_S: Final = 600.0  # `lfs df` asks every OST, which is too slow for each blob
BIG_BLOB_BYTES: Final = 4 << 30  # a blob of this size is slow on one OST
_DOM_BYTES: Final = "64K"
_SHOWN: Final = 8  # OSTs in one message


class LayoutPlacer:
    """Decides and sets the layout of every new file under one root."""

    def __init__(
        self, client: LustreClient, root: str, config: LustreConfig, ranks: tuple[int, int]
    ) -> None:
        self._client = client
        self._root = root
        self._config = config
        self._ranks = ranks
        self._lock = threading.Lock()  # guards the fields below
        self._osts: tuple[Ost, ...] = ()
        self._asked_s: float | None = None
        self._default: Layout | None = None
        self._default_known = False
        self._warned: set[str] = set()

    def blob(self, name: str, size_hint: int | None, io_bytes: int) -> Birth | None:
        """Return the function that creates a blob's file; None takes the folder's default."""
        config = self._config
        inherit = config.stripe_count == "inherit"
        self._advise_on_default(size_hint, blobs_inherit=inherit)
        if inherit:
            return None
        striping = self._striping(name, size_hint, io_bytes)
        return lambda path: self._place(path, striping)

    def record(self) -> Birth | None:
        """Return the function that creates a record's file; None takes the folder's default."""
        kind = self._config.records
        if kind == "dom":
            layout = ("-E", _DOM_BYTES, "-L", "mdt", "-E", "-1", "-c", "1")
            return lambda path: self._set_or_inherit(path, *layout)
        if kind == "auto" and stripes_records_widely(self._folder_default()):
            return lambda path: self._set_or_inherit(path, "-c", "1")
        return None

    def layout(self, fd: int, name: str, *, ask_lfs: bool) -> Layout | None:
        """Return the layout of an open blob; None if it is not known.

        Args:
            fd: The open file.
            name: The name of the blob.
            ask_lfs: Whether to run `lfs` if the kernel does not show the layout.

        Raises:
            OSError: The file system failed.
        """
        data = self._client.layout_attribute(fd)
        try:
            if data is not None:
                return parse_layout(data)
            return self._shown_layout(os.path.join(self._root, name)) if ask_lfs else None
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

    def _striping(self, name: str, size_hint: int | None, io_bytes: int) -> Striping:
        config = self._config
        writers, writer = self._ranks
        folder, _, leaf = name.rpartition("/")
        demand = Demand(
            blob_bytes=size_hint,
            writers=writers,
            writer=writer,
            io_bytes=io_bytes,
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
            if named is None or named.code == 0:
                return
            self._warn_once("OSTs cannot be named, so the server chooses", _complaint(named))
        self._set_or_inherit(path, *common, "-i", "-1")

    def _set_or_inherit(self, path: str, *layout: str) -> None:
        answer = self._setstripe(path, *layout)
        if answer is None or answer.code == 0:
            return
        self._refuse_if_final(path, answer)
        self._warn_once(
            "layouts cannot be set, so files get the folder's default", _complaint(answer)
        )
        _plain_file(path)

    def _setstripe(self, path: str, *arguments: str) -> LfsAnswer | None:
        """Run `lfs setstripe`; without `lfs` create a plain file, and return None."""
        try:
            answer = self._client.lfs("setstripe", *arguments, path)
        except CapabilityError as error:
            self._warn_once("layouts cannot be set, so files get the folder's default", error)
            _plain_file(path)
            return None
        if answer.code != 0:
            _remove(path)  # it may have been created without the layout
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
        with self._lock:
            now = time.monotonic()
            if self._asked_s is not None and now - self._asked_s < max_age_s:
                return self._osts
            try:
                answer = self._client.lfs("df", self._root)
                self._osts = parse_df(answer.text)
            except (CapabilityError, FormatError, StorageTimeoutError) as error:
                self._osts = ()
                self._warn_once("the OSTs are not known, so their choice is the server's", error)
            self._asked_s = time.monotonic()
            return self._osts

    def _folder_default(self) -> Layout | None:
        with self._lock:
            if not self._default_known:
                self._default_known = True
                folder = existing_folder(self._root)  # a new one takes over its parent's default
                try:
                    data = self._client.layout_attribute(folder)
                    if data is not None:
                        self._default = parse_layout(data)
                    else:
                        self._default = self._shown_layout(folder, "-d")
                except (OSError, PenstockError) as error:
                    self._warn_once(f"the default layout of {folder} is not known", error)
            return self._default

    def _shown_layout(self, path: str, *options: str) -> Layout | None:
        try:
            answer = self._client.lfs("getstripe", *options, "-y", path)
            if answer.code != 0:
                answer = self._client.lfs("getstripe", *options, path)  # before 2.11: no YAML
        except (CapabilityError, StorageTimeoutError):
            return None
        return parse_getstripe(answer.text) if answer.code == 0 else None

    def _advise_on_default(self, blob_bytes: int | None, *, blobs_inherit: bool) -> None:
        advice = about_default(
            self._folder_default(),
            blob_bytes=blob_bytes,
            blobs_inherit=blobs_inherit,
            records_inherit=self._config.records == "inherit",
        )
        if advice:
            self._warn_once(self._root, advice)

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


def _complaint(answer: LfsAnswer) -> str:
    lines = [line.strip() for line in answer.complaint.splitlines() if line.strip()]
    return lines[0] if lines else f"lfs ended with {answer.code}"


def _is_gone(folder: str) -> bool:
    """Return whether an open folder was removed, as its link in /proc shows."""
    return os.readlink(folder).endswith(" (deleted)")


def _plain_file(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _named(ost: int, free: dict[int, int]) -> str:
    name = f"OST {ost} (OST{ost:04x})"
    return f"{name} with {free[ost] / 1e6:,.1f} MB free" if ost in free else name
