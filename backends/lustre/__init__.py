"""The backend `lustre`: files on Lustre, each laid out over the OSTs before its first byte.

Lustre fixes the layout of a file at its creation, or at its first write at the latest. So
`lfs setstripe` creates the file. The part that all file backends share is in
`penstock.backends.local`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import Field

from penstock.backends.local.base import LocalBackend, LocalConfig
from penstock.backends.local.threads import ThreadEngine
from penstock.backends.local.transfer import OpenBlob
from penstock.backends.lustre.components import ALL_STRIPES
from penstock.backends.lustre.layout_placer import LayoutPlacer, cut_bytes
from penstock.backends.lustre.lfs import LUSTRE_MAGIC, LustreClient, existing_folder
from penstock.backends.lustre.policy import MAX_STRIPE_BYTES, MAX_STRIPES, STRIPE_UNIT
from penstock.backends.uring.engine import RingEngine
from penstock.backends.uring.ring import Ring
from penstock.core.abc import without_credentials
from penstock.core.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.local.folders import Folders
    from penstock.backends.local.transfer import Engine
    from penstock.core.abc import PluginConfig
    from penstock.core.types import Capabilities

log = logging.getLogger("penstock")

# Size and rank as launchers set them: torchrun, Slurm's srun, Open MPI, MPICH and Cray's PALS.
_RANK_VARIABLES: Final = (
    ("WORLD_SIZE", "RANK"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)


class LustreConfig(LocalConfig):
    """Options of `lustre`, besides those of every file backend.

    Attributes:
        allocate_bytes: As in every file backend. Off by default: not every Lustre supports it, and
            its gain there is not measured.
        engine: The engine that moves bytes; `auto` takes io_uring if it can be used.
        parallel: The most requests in flight. So many are reached only by short requests, since a
            save has 256 MiB in flight.
        stripe_count: The number of OSTs of a blob. `auto` chooses it for each blob, -1 takes all
            OSTs, 0 the file system's default; `inherit` leaves the whole layout to the folder's
            default.
        stripe_bytes: The bytes on one OST before the next one's turn; `auto` chooses them for each
            blob.
        pool: The OST pool that blobs are placed in; then the metadata server chooses the OSTs.
        records: `auto` gives small records one stripe if the folder's default would give them
            more; `dom` puts their first 64 KiB on the metadata server; `inherit` does neither.
        writers: The number of ranks that save at the same time; `auto` takes it from torchrun,
            Slurm or MPI.
        writer: The number of this process among the writers, from 0.
        not_lustre: Whether to refuse a path on another file system, or to warn and write plain
            files.
        lfs: The name or path of Lustre's command.
        lfs_timeout_s: The seconds that one call of `lfs` may take.
    """

    allocate_bytes: int = Field(default=0, ge=0)
    engine: Literal["auto", "uring", "posix"] = "auto"
    parallel: int = Field(default=64, ge=1, le=1024)
    stripe_count: (
        Literal["auto", "inherit"] | Annotated[int, Field(ge=ALL_STRIPES, le=MAX_STRIPES)]
    ) = "auto"
    stripe_bytes: (
        Literal["auto"]
        | Annotated[int, Field(ge=STRIPE_UNIT, le=MAX_STRIPE_BYTES, multiple_of=STRIPE_UNIT)]
    ) = "auto"
    pool: str = Field(default="", pattern=r"^[A-Za-z0-9_-]{0,15}$")
    records: Literal["auto", "dom", "inherit"] = "auto"
    writers: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    writer: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    not_lustre: Literal["error", "warn"] = "error"
    lfs: str = Field(default="lfs", min_length=1)
    lfs_timeout_s: float = Field(default=60.0, gt=0)

    def ranks(self, environment: Mapping[str, str], /) -> tuple[int, int]:
        """Return `(writers, writer)`, from the launcher's variables where the options are `auto`.

        There is one writer if no launcher has set a valid pair.
        """
        writers, writer = _launched_ranks(environment)
        if self.writers != "auto":
            writers = self.writers
        if self.writer != "auto":
            writer = self.writer
        return writers, writer % writers


def _launched_ranks(environment: Mapping[str, str]) -> tuple[int, int]:
    for size, rank in _RANK_VARIABLES:
        values = environment.get(size, ""), environment.get(rank, "")
        # `isdigit` is true for superscript digits, too, which `int` refuses.
        if all(value.isascii() and value.isdigit() for value in values):
            writers, writer = map(int, values)
            if writer < writers:
                return writers, writer
    return 1, 0


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
        client = client or LustreClient(config.lfs, config.lfs_timeout_s)
        self._refusal = _not_lustre(client, existing_folder(self._names.root))
        self._placer: LayoutPlacer | None = None
        if self._refusal is None:
            self._placer = LayoutPlacer(client, self._names.root, config, config.ranks(os.environ))
        elif config.not_lustre == "error":
            msg = f"{self._refusal}; use uring:// or posix:// there, or not_lustre='warn'"
            raise CapabilityError(msg)
        else:
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
        birth = self._placer.record() if self._placer is not None else None
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
        birth = self._placer.blob(name, size_hint) if self._placer is not None else None
        return self._names.create_file(name, birth=birth)

    def _opened(self, name: str, fd: int, *, direct: bool) -> OpenBlob:
        if self._placer is None:
            return super()._opened(name, fd, direct=direct)
        layout = self._placer.layout(fd)
        return OpenBlob(name, fd, direct, cut_bytes(layout), self._placer.adviser(layout))


def _not_lustre(client: LustreClient, folder: str) -> str | None:
    try:
        magic = client.file_system(folder)
    except OSError as error:
        return f"the file system of {folder} is not known: {error.strerror}"
    if magic == LUSTRE_MAGIC:
        return None
    return f"{folder} is not on Lustre, but on a file system of the kind {magic:#010x}"
