"""The number of ranks and of this rank, as launchers set them in the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

# Size and rank: torchrun, Slurm's srun, Open MPI, MPICH and Cray's PALS.
_VARIABLES: Final = (
    ("WORLD_SIZE", "RANK"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)


def ranks_from(environment: Mapping[str, str], /) -> tuple[int, int]:
    """Return `(writers, writer)`; one writer if no launcher has set a valid pair."""
    for size, rank in _VARIABLES:
        values = environment.get(size, ""), environment.get(rank, "")
        if all(value.isascii() and value.isdigit() for value in values):
            writers, writer = map(int, values)
            if writer < writers:
                return writers, writer
    return 1, 0
