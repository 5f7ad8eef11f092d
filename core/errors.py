"""The tree of errors. Every message says what failed, on which path or blob, and what to do.

Errors can be pickled, because they cross processes: each passes its arguments, in order, to
`Exception.__init__`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose."""


# -- configuration and plugins ------------------------------------------------------------------


class ConfigError(PenstockError):
    """A configuration, URL or option is wrong; nothing was changed."""


class PluginError(PenstockError):
    """A provider, codec, backend or replayer could not be found, loaded or used.

    The message names the plugin's distribution.
    """


# -- the state tree -----------------------------------------------------------------------------


class UnsupportedStateError(PenstockError):
    """The state tree holds something that cannot be saved; the message names its path."""


class SelectionError(PenstockError):
    """A pattern, path or region is malformed, or matches nothing.

    Or a selection has only a part of an object that can only be built as a whole.
    """


class TornSnapshotError(PenstockError):
    """A tensor changed between `save` and the end of its capture; that save never commits."""


# -- saving -------------------------------------------------------------------------------------


class SaveError(PenstockError):
    """A save failed; earlier checkpoints are untouched."""


class StepExistsError(SaveError):
    """The step, or a later step, is already committed.

    Pass `overwrite=True`, or first `rewind` to continue from an older step.
    """


class BusyError(SaveError):
    """Another save is in flight, or the checkpoint is being copied.

    A save raises this with `on_busy="raise"`, or in a signal handler that interrupted another save.
    """


class SaveSkippedError(SaveError):
    """This save was skipped: see `on_busy="skip"` and, for tiers without room, `on_full="skip"`."""


class SaveAbortedError(SaveError):
    """A save or copy was given up, and committed nothing.

    It was interrupted or cancelled, its capture took too long, another part of it failed, or it
    stalled for so long that `prune` may delete its data.
    """


class SaverClosedError(SaveError):
    """The checkpointer is closed."""


class LostRaceError(SaveError):
    """Another process published the same step and generation first."""


class NotDrainedError(SaveError):
    """The checkpoint is whole in a faster tier, but has not reached the durable tier."""


class CommitUnknownError(SaveError):
    """The checkpoint may or may not exist, or was published without all of its data.

    Usually the store's reply to the publish was lost. None of the save's data is deleted; check
    `steps()` later.
    """


# -- storage ------------------------------------------------------------------------------------


class StorageError(PenstockError):
    """A backend failed."""


class BlobNotFoundError(StorageError):
    """No blob or record has that name."""


class BlobExistsError(StorageError):
    """An exclusive publish or a create failed because the name exists."""


class BlobTruncatedError(StorageError):
    """A blob is shorter than the requested range."""


class StorageFullError(StorageError):
    """The store has no space left, or a quota is used up."""


class StorageTimeoutError(StorageError):
    """A backend did not answer in time."""


class UnsyncedError(StorageError):
    """A blob or record exists, but may not survive a power cut, because its sync failed."""


class WrongPlaceError(StorageError):
    """A tier is not the place that the run has used so far; perhaps it is not mounted."""


class CapabilityError(StorageError):
    """The backend cannot do what this operation needs."""


# -- reading ------------------------------------------------------------------------------------


class CheckpointNotFoundError(PenstockError):
    """There is no committed checkpoint at that step."""


class CheckpointGoneError(CheckpointNotFoundError):
    """The checkpoint was deleted or overwritten while it was in use."""


class DamagedError(PenstockError):
    """Stored bytes differ from the written bytes; no wrong values are returned.

    Attributes:
        damaged: The damaged paths (`model/wte.weight`) or record names.
    """

    def __init__(self, message: str, damaged: Sequence[str] = ()) -> None:
        super().__init__(message, tuple(damaged))
        self.damaged = tuple(damaged)

    def __str__(self) -> str:
        return str(self.args[0])


class FormatError(DamagedError):
    """A record cannot be decoded, or its version is unknown to this version of Penstock."""


class RestoreMismatchError(PenstockError):
    """Template and checkpoint differ; `problems` lists every difference."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message, tuple(problems))
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return str(self.args[0])


class RestoreError(PenstockError):
    """A restore failed. If it had already changed selected objects, `__notes__` lists them."""


# -- several ranks ------------------------------------------------------------------------------


class RankError(SaveError, RestoreError):
    """A rank failed, died or made no progress, so no rank saved, or restored, this checkpoint.

    Raised on every rank that did not fail itself.

    Attributes:
        rank: The number of the failed rank.
        host: The name of its host; empty if unknown.
        cause: The error of that rank, or how its lack of progress was detected.
    """

    def __init__(self, message: str, rank: int = -1, host: str = "", cause: str = "") -> None:
        super().__init__(message, rank, host, cause)
        self.rank = rank
        self.host = host
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


class CoordinationError(SaveError, RestoreError):
    """The store through which a job's ranks agree cannot be reached.

    It may still have executed the request. Without torchrun this store runs in the process of
    rank 0, and ends with it.
    """


class CodecError(PenstockError):
    """A codec refused its input, or broke its contract."""


class FenceTimeoutError(SaveAbortedError):
    """A pending capture was not complete in time.

    `Checkpointer.fence` lets the save continue; an automatic fence aborts it.
    """
