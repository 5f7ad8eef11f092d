"""The backend `lustre`: a file backend that chooses a layout for every blob."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

from penstock.backends.local.backend import LocalBackend
from penstock.backends.local.threads import ThreadEngine
from penstock.backends.local.transfer import TRANSFER_BYTES, OpenBlob
from penstock.backends.lustre.client import (
    LUSTRE_MAGIC,
    LustreClient,
    existing_folder,
    file_system_name,
)
from penstock.backends.lustre.config import LustreConfig
from penstock.backends.lustre.placing import LayoutPlacer
from penstock.backends.uring.engine import RingEngine
from penstock.backends.uring.ring import Ring
from penstock.core.abc import without_credentials
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from penstock.backends.local.batch import Engine
    from penstock.backends.local.folders import Folders
    from penstock.backends.lustre.layout import Layout
    from penstock.core.abc import PluginConfig
    from penstock.core.types import Capabilities

log = logging.getLogger("penstock")

MIN_CUT_BYTES: Final = 4 << 20  # smaller stripes are not worth a request of their own


class LustreBackend(LocalBackend):
    """Keeps blobs and records as files on Lustre.

    A blob's layout is set before its first byte, from its expected size, the number of ranks and
    the state of the OSTs. Requests are cut at stripes, so that each goes to one OST. An error of a
    full OST names that OST. Never run against a real Lustre so far: see `docs/lustre.md`.
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
        # A URL may come from elsewhere, and must not choose a program that is run.
        if "lfs" in options:
            msg = (
                f"{without_credentials(url)}: lfs names a program that would be run, which no URL "
                "may; set it in a configuration file, as {type = 'lustre', lfs = '...'}"
            )
            raise ConfigError(msg)
        return super().from_url(url, options)

    @property
    def url(self) -> str:
        """The root, as a URL that is opened by this backend."""
        return super().url.replace("file", self.name, 1)

    def __init__(self, config: LustreConfig, /, *, client: LustreClient | None = None) -> None:
        """Check the file system of the root; touches no file.

        Args:
            config: The options.
            client: Replaces the calls of the kernel and of `lfs`, for tests.

        Raises:
            CapabilityError: The root is not on Lustre, or io_uring is required and cannot be used.
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
            log.warning("lustre: %s; files are written plainly", self._refusal)
        if config.engine == "uring":
            self._running_engine()

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the file backends, with a note if this is not Lustre."""
        known = super().capabilities
        if self._refusal is None:
            return known
        return replace(known, notes=(*known.notes, self._refusal))

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """Publish a record as the contract says, by `link(2)` or `rename(2)`."""
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
                log.warning("lustre: threads take the place of io_uring: %s", error)
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
        # Anew in a forked child: a thread of the parent may have held the placer's lock.
        if self._placer is None or self._placer_pid != os.getpid():
            self._placer = LayoutPlacer(self._client, self._names.root, self._config, self._ranks)
            self._placer_pid = os.getpid()
        return self._placer

    def _not_lustre(self) -> str | None:
        folder = existing_folder(self._names.root)
        try:
            magic = self._client.file_system(folder)
        except OSError as error:
            return f"the file system of {folder} is not known: {error.strerror}"
        if magic == LUSTRE_MAGIC:
            return None
        return f"{folder} is not on Lustre, but on {file_system_name(magic)}"


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
