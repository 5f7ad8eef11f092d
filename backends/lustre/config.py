"""The options of `lustre`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from penstock.backends.local.base import LocalConfig
from penstock.backends.lustre.components import ALL_STRIPES
from penstock.backends.lustre.policy import MAX_STRIPE_BYTES, MAX_STRIPES, STRIPE_UNIT

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        allocate_bytes: The bytes to reserve ahead of the writes, as in every file backend. 0 by
            default: not every Lustre supports this, and its gain there is not measured.
        engine: The engine that moves bytes; `auto` uses io_uring if possible.
        parallel: Maximum requests in flight. A save has at most 256 MiB in flight: 64 requests of
            4 MiB, or 16 of 16 MiB.
        stripe_count: The number of OSTs of a blob. `auto` chooses it for each blob, -1 uses all
            OSTs, and 0 uses the file system's default. `inherit` uses the folder's default layout.
        stripe_bytes: The stripe size in bytes; `auto` chooses it for each blob.
        pool: The OST pool for blobs; the metadata server then chooses the OSTs.
        records: `auto` gives small records one stripe if the folder's default gives them more.
            `dom` puts their first 64 KiB on the metadata server. `inherit` does neither.
        writers: The number of ranks that save at the same time; `auto` takes it from torchrun,
            Slurm or MPI.
        writer: The number of this process among the writers, from 0.
        not_lustre: Whether to refuse a path on another file system, or to warn and write plain
            files.
        lfs: The name or path of Lustre's command.
        lfs_timeout_s: The timeout of one `lfs` call in seconds.
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
