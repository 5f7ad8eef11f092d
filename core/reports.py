"""What saving, restoring and verifying report."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.errors import SaveSkippedError
from penstock.core.latch import Latch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SaveReport:
    """One durable save.

    Attributes:
        step: Its step.
        uid: The name of the attempt, 32 hex digits.
        generation: 0, or higher after `overwrite=True`.
        bytes_raw: Bytes of the state, tied tensors once.
        bytes_stored: Bytes of its blobs.
        blobs: Number of blobs.
        objects: Number of objects.
        engine: Backend that wrote it.
        direct_io: Whether the page cache was bypassed.
        exclusive: Whether the store itself decided who owns the step.
        deferred_bytes: Bytes captured behind the fence.
        straight_bytes: Bytes written straight from live tensors because staging was too small.
        seconds: `blocked`, `capture`, `encode`, `write`, `commit`, `total`. `encode` and `write`
            are the time in which any such work was under way.
        tiers: Tiers that have it whole, the fastest first, when this is given; empty: the backend
            is one place.
    """

    step: int
    uid: str
    generation: int
    bytes_raw: int
    bytes_stored: int
    blobs: int
    objects: int
    engine: str
    direct_io: bool
    exclusive: bool
    deferred_bytes: int
    straight_bytes: int
    seconds: Mapping[str, float]
    tiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a save, a restore, a load or a verification is.

    Attributes:
        bytes_done: Written, or read and verified, by now.
        bytes_total: To be written or read, as far as that is known; it may grow while `phase` is
            `plan` or `read`.
        phase: Of a save `capture`, `write`, `commit`, with tiers `drain`; then `durable`, `failed`
            or `skipped`. Of a restore or load `plan`, `read`, `place`, of a verification
            `manifest`, `read`, with `repair` also `repair`; then `done` or `failed`.
    """

    bytes_done: int
    bytes_total: int
    phase: str


@dataclass(frozen=True, slots=True, repr=False)
class RestoreReport:
    """One restore. Paths are shown paths of the template.

    Attributes:
        step: Step that was restored.
        restored: Objects that were restored, in tree order.
        missing: In the template (and selected), not in the checkpoint; only with `strict=False`.
        unexpected: In the checkpoint (and selected), not in the template.
        values: Restored values by path.
        matched_by: How optimizer state found its parameters: `"name"` or `"order"`.
        bytes_needed: Selected bytes of raw frames plus whole stored frames of encoded ones.
        bytes_read: Bytes read from blobs.
        bytes_metadata: Bytes read of the manifest.
        engine: Backend that read it.
        direct_io: Whether the page cache was bypassed.
        fell_back_from: Steps that `on_damage="fallback"` skipped, newest first.
        rescued: Blobs, records and sections of records that were damaged or missing in one tier,
            each with the tier whose copy was read instead. What is bad is brought anew from
            there, in the background.
        seconds: `plan`, `read`, `place`, `total`.
    """

    step: int
    restored: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    values: Mapping[str, Any]
    matched_by: str
    bytes_needed: int
    bytes_read: int
    bytes_metadata: int
    engine: str
    direct_io: bool
    seconds: Mapping[str, float]
    fell_back_from: tuple[int, ...] = ()
    rescued: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        """The figures; paths and values are too many for a line."""
        return (
            f"<RestoreReport step={self.step}: {len(self.restored)} objects, {self.bytes_read} "
            f"bytes read of {self.bytes_needed} needed in {self.seconds['total']:.3f} s, "
            f"{len(self.missing)} missing, {len(self.unexpected)} unexpected>"
        )


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is not as it was written."""

    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class Repair:
    """What became of a copy that `verify(repair=True)` found damaged.

    Attributes:
        tier: Which copy.
        source: The tier from which it was brought anew; None: it was not.
        error: Why it was not, or is not whole all the same; None: it is whole now.
    """

    tier: str
    source: str | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Outcome of `verify`.

    Attributes:
        step: Of the checkpoint.
        ok: Whether it is whole; with tiers each copy of it, with `repair` in the end.
        damaged: Everything that was found, not only the first, and though it was repaired.
        objects: Number of objects.
        frames: How many were read.
        bytes_read: Of manifest and blobs.
        deep: Whether every frame was read, or only the manifest and the sizes of the blobs.
        seconds: How long it took.
        repairs: With `repair`: one of each damaged copy.
        tiers: With tiers: which of them have it.
    """

    step: int
    ok: bool
    damaged: tuple[Damage, ...]
    objects: int
    frames: int
    bytes_read: int
    deep: bool
    seconds: float
    repairs: tuple[Repair, ...] = ()
    tiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CopyFound:
    """What a verification found of the copy in one tier.

    Attributes:
        tier: Its name.
        uid: Whose data its commit record names; None: that cannot be read.
        damaged: Everything that is wrong with it.
        frames: How many were read.
        bytes_read: Of manifest and blobs.
    """

    tier: str
    uid: str | None
    damaged: tuple[Damage, ...]
    frames: int = 0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What the commit record says of one checkpoint."""

    step: int
    generation: int
    uid: str
    created: str
    bytes_raw: int
    bytes_stored: int
    objects: int
    world_size: int
    metadata: Mapping[str, Any]
    references: tuple[str, ...] = ()
    codecs: Mapping[str, int] = field(default_factory=dict)
    providers: Mapping[str, int] = field(default_factory=dict)


class Outcome(Future[T]):
    """A future that tells its owner when somebody has seen its error."""

    def __init__(self, on_error_seen: Callable[[], None]) -> None:
        super().__init__()
        self._on_error_seen = on_error_seen
        self._over = Latch()
        self.add_done_callback(lambda _: self._over.open())  # before all other callbacks
        self.on_result: Callable[[], None] | None = None
        """Called when somebody has waited for a good result, before it is returned."""

    def done(self) -> bool:
        """Whether it ended, well or badly."""
        return self._over.is_open

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, without seeing its error; False: not within `timeout` seconds."""
        return self._over.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """As `Future.result`; an error that it raises counts as seen."""
        if self._await(timeout) is not None:
            self._on_error_seen()
        elif self.on_result is not None:
            self.on_result()
        return super().result(0)

    def cancel(self) -> bool:
        """False: a save is not called off by a future, which others may be waiting for."""
        return False

    def peek_error(self) -> BaseException | None:
        """The error of a future that is done, without counting as seeing it."""
        return super().exception(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `Future.exception`; an error that it returns counts as seen."""
        error = self._await(timeout)
        if error is not None:
            self._on_error_seen()
        elif self.on_result is not None:
            try:
                self.on_result()
            except Exception as late:  # noqa: BLE001 - handed to the caller
                self._on_error_seen()
                return late
        return error

    def _await(self, timeout: float | None) -> BaseException | None:
        if not self._over.wait(timeout):
            raise TimeoutError
        return super().exception(0)


class SaveHandle:
    """One save under way. Futures resolve in the order captured, committed, durable."""

    def __init__(self, step: int, *, skipped: bool = False) -> None:
        self.step = step
        self.skipped = skipped
        self.error_seen = False
        self.captured: Outcome[None] = Outcome(self._see)
        self.committed: Outcome[SaveReport] = Outcome(self._see)
        self.durable: Outcome[SaveReport] = Outcome(self._see)
        self.progress_source: Callable[[], Progress] | None = None

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is durable.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            PenstockError: What went wrong, at every call.
            TimeoutError: It is still under way.
        """
        return self.durable.result(timeout)

    def progress(self) -> Progress:
        """How far the save is."""
        if self.progress_source is None:
            return Progress(0, 0, "skipped" if self.skipped else "capture")
        return self.progress_source()

    def done(self) -> bool:
        """Whether it ended, well or badly."""
        return self.durable.done()

    @property
    def failed(self) -> bool:
        """Whether it ended badly; asking does not count as seeing the error."""
        return self.durable.done() and self.durable.peek_error() is not None

    def _see(self) -> None:
        self.error_seen = True

    def __repr__(self) -> str:
        progress = self.progress()
        return (
            f"<SaveHandle step={self.step} {progress.phase} "
            f"{progress.bytes_done}/{progress.bytes_total} bytes>"
        )


def skipped_save(step: int, why: str = "another save was under way") -> SaveHandle:
    """The handle of a save that `on_busy="skip"` or `on_full="skip"` left out."""
    handle = SaveHandle(step, skipped=True)
    error = SaveSkippedError(f"step {step} was skipped: {why}")
    for future in (handle.captured, handle.committed, handle.durable):
        future.set_exception(error)
    return handle
