"""Describes the stored log of a checkpoint to users.

Tested in `tests/core/cli/test_logs.py`.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.errors import CheckpointGoneError, CheckpointNotFoundError, DamagedError
from penstock.core.format.segment import log_prefix
from penstock.core.log.archive import EntryBackend
from penstock.core.log.segments import last_step, logs_of
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.core.abc import Backend
    from penstock.core.catalog.catalog import Catalog
    from penstock.core.log.segments import StoredEntry


@dataclass(frozen=True, slots=True)
class LogInfo:
    """The log of a checkpoint.

    Attributes:
        first: The first logged step.
        last: The last step whose entry every rank has whole; None if there is none.
        entries: The number of entries of all ranks.
        ranks: The number of ranks that logged.
        segments: The number of segments of all ranks.
        bytes_stored: The size of these segments.
        optimizers: The engine of each optimizer that stepped in rank 0's first entry, by path: the
            versions and devices that decide the bits of a step.
        is_cut: Whether a segment does not end with a whole entry: a process is writing the entry,
            was killed while it wrote the entry, or the entry is damaged.
    """

    first: int
    last: int | None
    entries: int
    ranks: int
    segments: int
    bytes_stored: int
    optimizers: Mapping[str, Mapping[str, Any]]
    is_cut: bool

    def __str__(self) -> str:
        """Return the figures as one line of text."""
        entries = "1 entry" if self.entries == 1 else f"{self.entries} entries"
        ranks = f" of {self.ranks} ranks" if self.ranks > 1 else ""
        reach = "no step" if self.last is None else f"steps {self.first} to {self.last}"
        return (
            f"{reach} in {entries}{ranks}, "
            f"{size_text(self.bytes_stored)} in {counted(self.segments, 'segment')}, "
            f"{size_text(self.bytes_stored // max(self.entries, 1))} per entry"
            + ("; its end is cut off" if self.is_cut else "")
        )


def log_info(backend: Backend, base: str) -> LogInfo | None:
    """Describe the log of the checkpoint with the uid `base`; None if it has no log.

    Reads all headers, the values of the first entry, and the last entry of each rank.

    Raises:
        DamagedError: The log cannot be read.
    """
    logs = logs_of(backend, base)
    if not logs:
        return None
    segments = [segment for log in logs for segment in log.segments]
    return LogInfo(
        first=logs[0].steps[0],
        last=last_step(logs),
        entries=sum(len(log.entries) for log in logs),
        ranks=len(logs),
        segments=len(segments),
        bytes_stored=sum(segment.info.size_bytes for segment in segments),
        optimizers=_optimizers(backend, logs[0].entries[0]),
        is_cut=any(segment.is_cut for segment in segments)
        or any(log.entries and log.latest() != log.steps[-1] for log in logs),
    )


def log_bytes(backend: Backend, uid: str) -> int:
    """Return the size of all segments of a checkpoint's log."""
    return sum(info.size_bytes for info in backend.list(log_prefix(uid)))


def last_logged(backend: Backend, uid: str) -> int | None:
    """Return the last step of a checkpoint's log; None if it has no log or the log is damaged."""
    with suppress(DamagedError):
        return last_step(logs_of(backend, uid))
    return None


def base_of(backend: Backend, catalog: Catalog, step: int) -> int | None:
    """Return the saved step whose log contains `step`; None if no log does."""
    base = max((s for s in catalog.steps() if s < step), default=None)
    if base is None:
        return None
    logs = logs_of(backend, catalog.record(base).uid)
    return base if logs and all(step in log.steps for log in logs) else None


@contextmanager
def noting(backend: Backend, catalog: Catalog, step: int | str | None) -> Iterator[None]:
    """If a checkpoint is not found, note on the error that its step is logged but not saved."""
    try:
        yield
    except CheckpointGoneError:
        raise
    except CheckpointNotFoundError as error:
        base = base_of(backend, catalog, step) if isinstance(step, int) else None
        if base is not None:
            error.add_note(
                f"Step {step} is logged: restore(state, {step}) replays it. To read it without "
                f"a template, save it after that restore, or read the saved step {base} instead."
            )
        raise


def _optimizers(backend: Backend, entry: StoredEntry) -> dict[str, Mapping[str, Any]]:
    checkpoint = Checkpoint.open(EntryBackend(backend, entry), entry.header.step)
    steps = [key.removesuffix("engine") for key in checkpoint.keys() if _is_engine(key)]  # noqa: SIM118 - a method, not a mapping's
    return {checkpoint[f"{step}optimizer"]: checkpoint[f"{step}engine"] for step in steps}


def _is_engine(key: str) -> bool:
    return key.startswith("steps/") and key.endswith("/engine")
