"""The backend `lustre`: a file backend that chooses a layout for every blob.

Lustre fixes the layout of a file when the file is created, or at its first write at the latest. So
`lfs setstripe` creates each file with its layout, before anything is written to it.
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
from typing import TYPE_CHECKING, ClassVar, Final

from penstock.backends.local.base import LocalBackend
from penstock.backends.local.threads import ThreadEngine
from penstock.backends.local.transfer import TRANSFER_BYTES, OpenBlob
from penstock.backends.lustre.components import ALL_STRIPES, parse_layout
from penstock.backends.lustre.config import LustreConfig
from penstock.backends.lustre.lfs import (
    LUSTRE_MAGIC,
    LustreClient,
    existing_folder,
    file_system_name,
    parse_df,
    parse_getstripe,
)
from penstock.backends.lustre.policy import Demand, Striping, plan_striping
from penstock.backends.uring.engine import RingEngine
from penstock.backends.uring.ring import Ring
from penstock.core.abc import without_credentials
from penstock.core.errors import (
    CapabilityError,
    ConfigError,
    FormatError,
    PenstockError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
)
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from penstock.backends.local.failures import Advise
    from penstock.backends.local.folders import Folders
    from penstock.backends.local.namespace import Birth
    from penstock.backends.local.transfer import Engine
    from penstock.backends.lustre.components import Layout
    from penstock.backends.lustre.lfs import LfsAnswer
    from penstock.backends.lustre.policy import Ost
    from penstock.core.abc import PluginConfig
    from penstock.core.types import ByteRange, Capabilities

log = logging.getLogger("penstock")

MIN_CUT_BYTES: Final = 4 << 20  # smaller stripes are not worth their own request

FREE_SPACE_IS_GOOD_FOR_S: Final = 600.0  # `lfs df` asks every OST, which is too slow for each blob
BIG_BLOB_BYTES: Final = 4 << 30  # a blob of this size is slow on one OST
_DOM_BYTES: Final = "64K"
_SHOWN: Final = 8  # OSTs in one message


class LustreBackend(LocalBackend):
    """Keeps blobs and records as files on Lustre.

    Sets a blob's layout before its first byte, from the expected size, the number of ranks and the
    state of the OSTs. Splits requests at stripes of at least 4 MiB, so that each goes to one OST.
    If the layout is known, the error of a failed write names the OSTs that hold the bytes. Not yet
    run against a real Lustre: see `docs/lustre.md`.
    """

    name: ClassVar[str] = "lustre"
    Config: ClassVar[type[PluginConfig]] = LustreConfig
    _config: LustreConfig

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Return the options for `lustre:///abs/path`.

        Raises:
            ConfigError: The query names a program.
        """
        # A URL may come from elsewhere, and must not choose a program to run.
        if "lfs" in options:
            msg = (
                f"{without_credentials(url)}: lfs names a program to run, which a URL must not; "
                "set it in a configuration file, as {type = 'lustre', lfs = '...'}"
            )
            raise ConfigError(msg)
        return super().from_url(url, options)

    @property
    def url(self) -> str:
        """The root as a `lustre://` URL."""
        return super().url.replace("file", self.name, 1)

    def __init__(self, config: LustreConfig, /, *, client: LustreClient | None = None) -> None:
        """Check that the root is on Lustre, without touching a file.

        Args:
            config: The options.
            client: Replaces the calls to the kernel and to `lfs`, for tests.

        Raises:
            CapabilityError: The root is not on Lustre and `not_lustre` is `error`, or `engine` is
                `uring` but io_uring cannot be used.
        """
        super().__init__(config)
        self._client = client or LustreClient(config.lfs, config.lfs_timeout_s)
        self._ranks = config.ranks(os.environ)
        self._refusal = self._not_lustre()
        self._placer: LayoutPlacer | None = None
        self._placer_pid = 0
        if self._refusal is not None and config.not_lustre == "error":
            msg = f"{self._refusal}; use uring:// or posix:// there, or not_lustre='warn'"
            raise CapabilityError(msg)
        if self._refusal is not None:
            log.warning("lustre: %s; writing plain files", self._refusal)
        if config.engine == "uring":
            self._running_engine()

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the file backends, with a note if the root is not on Lustre."""
        known = super().capabilities
        if self._refusal is None:
            return known
        return replace(known, notes=(*known.notes, self._refusal))

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """See `Backend.publish`. Publishes with `link(2)` or `rename(2)`."""
        self._check_open()
        placer = self._placing()
        birth = placer.record() if placer is not None else None
        self._names.publish(name, data, exclusive=exclusive, birth=birth)

    # -- below --------------------------------------------------------------------------------

    @property
    def _parallel(self) -> int:
        return self._config.parallel

    def _open_engine(self) -> Engine:
        if self._config.engine != "posix":
            try:
                return RingEngine(Ring(self._parallel), self._parallel)
            except CapabilityError as error:
                if self._config.engine == "uring":
                    raise
                log.warning("lustre: using threads instead of io_uring: %s", error)
        return ThreadEngine(self._parallel)

    def _create_file(self, name: str, size_hint: int | None) -> tuple[int, Folders]:
        placer = self._placing()
        if placer is None:
            return super()._create_file(name, size_hint)
        birth = placer.blob(name, size_hint, TRANSFER_BYTES)
        return self._names.create_file(name, birth=birth)

    def _opened(self, name: str, fd: int, *, direct: bool, writing: bool) -> OpenBlob:
        placer = self._placing()
        if placer is None:
            return super()._opened(name, fd, direct=direct, writing=writing)
        layout = placer.layout(fd, name, ask_lfs=writing)
        return OpenBlob(name, fd, direct, cut_bytes(layout), placer.adviser(layout))

    def _placing(self) -> LayoutPlacer | None:
        if self._refusal is not None:
            return None
        # New in a forked child: a thread of the parent may have held the placer's lock.
        if self._placer is None or self._placer_pid != os.getpid():
            self._placer = LayoutPlacer(self._client, self._names.root, self._config, self._ranks)
            self._placer_pid = os.getpid()
        return self._placer

    def _not_lustre(self) -> str | None:
        folder = existing_folder(self._names.root)
        try:
            magic = self._client.file_system(folder)
        except OSError as error:
            return f"the file system of {folder} is unknown: {error.strerror}"
        if magic == LUSTRE_MAGIC:
            return None
        return f"{folder} is not on Lustre, but on {file_system_name(magic)}"


def cut_bytes(layout: Layout | None, /) -> int:
    """Return the unit in bytes at which to split requests, so that each goes to one OST.

    Returns 0 if requests are not split: the layout is unknown, or its stripes are too small or of
    uneven sizes.
    """
    if layout is None:
        return 0
    sizes = {c.stripe_bytes for c in layout.components if c.striped and c.osts}
    # Components may differ in stripe size: the smallest is used if it divides all others.
    smallest = min(sizes, default=0)
    if smallest < MIN_CUT_BYTES or smallest % PAGE_BYTES or any(s % smallest for s in sizes):
        return 0
    return smallest


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
        """Return a function that creates a blob's file; None if the folder's default applies."""
        config = self._config
        inherit = config.stripe_count == "inherit"
        self._advise_on_default(size_hint, blobs_inherit=inherit)
        if inherit:
            return None
        striping = self._striping(name, size_hint, io_bytes)
        return lambda path: self._place(path, striping)

    def record(self) -> Birth | None:
        """Return a function that creates a record's file; None if the folder's default applies."""
        kind = self._config.records
        if kind == "dom":
            layout = ("-E", _DOM_BYTES, "-L", "mdt", "-E", "-1", "-c", "1")
            return lambda path: self._set_or_inherit(path, *layout)
        if kind == "auto" and stripes_records_widely(self._folder_default()):
            return lambda path: self._set_or_inherit(path, "-c", "1")
        return None

    def layout(self, fd: int, name: str, *, ask_lfs: bool) -> Layout | None:
        """Return the layout of an open blob; None if it is unknown.

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
        """Return a function that names the OSTs of a failed write to a file with `layout`."""

        def advise(error: OSError, where: ByteRange | None) -> str:
            osts: tuple[Ost, ...] = ()
            if error.errno == errno.ENOSPC:
                # This blocks the engine's thread, so other transfers are reaped only afterwards.
                # That is acceptable: the blob is lost, and older figures would name a wrong OST.
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
        striping = plan_striping(demand, osts)
        if isinstance(config.stripe_count, int):
            striping = Striping(config.stripe_count, striping.stripe_bytes)
        if config.stripe_bytes != "auto":
            striping = replace(striping, stripe_bytes=config.stripe_bytes)
        return striping

    def _place(self, path: str, striping: Striping) -> None:
        """Create the file on the planned OSTs.

        Falls back to OSTs that the server chooses, then to the folder's default layout.
        """
        common = ["-c", str(striping.stripe_count), "-S", str(striping.stripe_bytes)]
        if self._config.pool:
            common += ["-p", self._config.pool]
        if striping.osts:
            answer = self._setstripe(path, *common, "-o", ",".join(map(str, striping.osts)))
            if answer is None or answer.code == 0:
                return
            self._warn_once(
                "lfs refuses the planned OSTs, so the server chooses", _complaint(answer)
            )
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
        """Run `lfs setstripe`; if there is no `lfs`, create a plain file and return None."""
        try:
            answer = self._client.lfs("setstripe", *arguments, path)
        except CapabilityError as error:
            self._warn_once("layouts cannot be set, so files get the folder's default", error)
            _plain_file(path)
            return None
        if answer.code != 0:
            _remove(path)  # `lfs` may have created the file without the layout
        elif answer.complaint:
            # If an administrator reserves layouts, `lfs` warns, and creates a plain file.
            self._warn_once("lfs setstripe warns", answer.complaint)
        if answer.code == errno.ENOENT and _is_gone(os.path.dirname(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return answer

    def _refuse_if_final(self, path: str, answer: LfsAnswer) -> None:
        folder, leaf = os.path.split(path)
        name = os.path.relpath(os.path.join(os.path.realpath(folder), leaf), self._root)
        where = f"cannot create {name} under {self._root}"
        if "pool" in answer.complaint.lower() and self._config.pool:
            msg = (
                f"{where} in the OST pool {self._config.pool!r}: {_complaint(answer)}; "
                "'lfs pool_list' shows the pools"
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
                self._warn_once("the OSTs are unknown, so the server chooses them", error)
            self._asked_s = time.monotonic()
            return self._osts

    def _folder_default(self) -> Layout | None:
        with self._lock:
            if not self._default_known:
                self._default_known = True
                folder = existing_folder(self._root)  # a new one inherits its parent's default
                try:
                    data = self._client.layout_attribute(folder)
                    if data is not None:
                        self._default = parse_layout(data)
                    else:
                        self._default = self._shown_layout(folder, "-d")
                except (OSError, PenstockError) as error:
                    self._warn_once(f"the default layout of {folder} is unknown", error)
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
    """Return a sentence that names the OSTs of a failed write; empty if it cannot help.

    A write to a full OST fails with ENOSPC even if the file system has room. So after ENOSPC the
    sentence also gives the free space of these OSTs and of the emptiest OST.

    Args:
        number: The `errno`.
        layout: The layout of the file.
        where: The byte range of the failed write; None means any bytes of the file.
        osts: The known OSTs with their current free space.
    """
    if layout is None or number == errno.EDQUOT:  # quotas do not depend on single OSTs
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
    names = ", ".join(_named(ost, free) for ost in touched[:_SHOWN])
    more = f" and {len(touched) - _SHOWN} more" if len(touched) > _SHOWN else ""
    sentence = f"the bytes are on {names}{more}"
    if number != errno.ENOSPC or not free:
        return sentence
    roomiest = max(free, key=lambda ost: free[ost])
    return (
        f"{sentence}; the emptiest of {len(free)} OSTs is {_named(roomiest, free)}: a full OST "
        "stops a file even if others have room ('lfs df' shows them)"
    )


def about_default(
    layout: Layout | None, *, blob_bytes: int | None, blobs_inherit: bool, records_inherit: bool
) -> str:
    """Return a warning if a folder's default layout is bad for new files; empty if it is not."""
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
    """Return whether this default layout puts a small file on several OSTs."""
    first = layout.at(0) if layout is not None else None
    return first is not None and first.striped


def _complaint(answer: LfsAnswer) -> str:
    lines = [line.strip() for line in answer.complaint.splitlines() if line.strip()]
    return lines[0] if lines else f"lfs exited with {answer.code}"


def _is_gone(folder: str) -> bool:
    """Return whether an open folder was removed, according to its link in /proc."""
    return os.readlink(folder).endswith(" (deleted)")


def _plain_file(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _named(ost: int, free: dict[int, int]) -> str:
    name = f"OST {ost} (OST{ost:04x})"
    return f"{name} with {free[ost] / 1e6:,.1f} MB free" if ost in free else name
