"""Options of `lustre`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.backends.local.config import LocalConfig
from penstock.backends.lustre.layout import ALL_STRIPES
from penstock.backends.lustre.policy import MAX_STRIPE_BYTES, MAX_STRIPES, STRIPE_UNIT


class LustreConfig(LocalConfig):
    """Options of `lustre`, besides those of every file backend.

    Attributes:
        allocate_bytes: As everywhere; off by default, for not every Lustre can, and what it
            would gain there is not measured.
        engine: What moves the bytes; `auto` takes io_uring where it can be used.
        parallel: Requests in flight at most; that many are there only where they are short, for
            a save has 256 MiB in flight.
        stripe_count: OSTs of a blob; `auto` is chosen for each, -1 takes all, 0 the file system's
            default, `inherit` leaves the whole layout to the folder's default.
        stripe_bytes: Bytes on one OST before the next one's turn; `auto` is chosen for each blob.
        pool: OST pool that blobs are placed in; then the metadata server chooses the OSTs.
        records: `auto` gives small records one stripe where the folder's default would give them
            more; `dom` puts their first 64 KiB on the metadata server; `inherit` does neither.
        writers: Ranks that save at the same time; `auto`: as torchrun, Slurm or MPI say.
        writer: Which of them this process is, from 0.
        not_lustre: What to do where the path is on another file system: refuse, or warn and
            write plain files.
        lfs: Lustre's command, by name or path.
        lfs_timeout_s: How long one call of it may take.
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
