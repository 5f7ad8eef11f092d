"""Defines the reports of the public calls, and the handle of a save."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.concurrency.latch import Latch
from penstock.core.errors import SaveSkippedError
from penstock.core.suggest import cut, listed
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("penstock")

T = TypeVar("T")


class HtmlTable:
    """Shows a dataclass as a table in a notebook: a row for each field that has a value.

    Escapes all names and texts, because another user may have stored them.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in _rows(self)
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption>{cells}</table>"


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """The choice of a rule with `codecs = "auto"` for one class of objects in one save.

    Attributes:
        objects: The class: role and dtype, such as `"optimizer float32"`.
        codec: The codec; None if the class is stored raw.
        why: The reason, in words.
        bytes_raw: The bytes of the class.
        bytes_stored: The bytes of its frames. While the store is being measured, a part of a class
            may be stored raw before a codec is chosen.
        ratio: Raw bytes per stored byte at the time of the choice: for the chosen codec, or for the
            best codec if the class is raw. None if no codec was measured.
        encode_bytes_per_s: The raw bytes per second that the cores encode with that codec.
        cores: The cores that encoding may use.
        store_bytes_per_s: The bandwidth of the store; None if unknown.
    """

    objects: str
    codec: str | None
    why: str
    bytes_raw: int
    bytes_stored: int
    ratio: float | None = None
    encode_bytes_per_s: float | None = None
    cores: float = 0.0
    store_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class SaveTotals:
    """The sums of what all ranks of a save wrote.

    Attributes:
        bytes_raw: The bytes of the stored state before encoding.
        bytes_stored: The bytes of the blobs.
        blobs: The number of blobs.
        bytes_twice: The part of `bytes_raw` beyond one copy of each tensor. If ranks have states of
            different structures (pipeline stages), common objects (a tied embedding) are stored
            once per structure.
    """

    bytes_raw: int
    bytes_stored: int
    blobs: int
    bytes_twice: int = 0


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """How often `Checkpointer.due` returns True, and what that costs.

    Attributes:
        steps: The steps from one save to the next.
        seconds: The same in seconds of training.
        why: The reason for this interval, in words.
        overhead: The share of training time that saves cost the training thread. If the run logs,
            the cost of the log counts too.
        lost_steps: The steps that a crash loses on average: half an interval, plus the steps
            trained while a save becomes durable. With a log, 1: a crash loses at most one step.
        lost_seconds: The same in seconds of training.
    """

    steps: int
    seconds: float
    why: str
    overhead: float
    lost_steps: float
    lost_seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class SaveReport(HtmlTable):
    """The report of a save whose checkpoint exists.

    Attributes:
        step: The step.
        uid: The id of the save, 32 hex digits.
        generation: 0, or higher after `overwrite=True`.
        bytes_raw: The bytes of the state; tied tensors count once.
        bytes_stored: The bytes of the blobs.
        blobs: The number of blobs.
        objects: The number of objects, including tied ones.
        engine: The backend that wrote the blobs.
        direct_io: Whether the page cache was bypassed.
        exclusive: Whether the store itself lets only one of several savers publish a step. If not,
            only one saver may use the root.
        deferred_bytes: The bytes captured after `save` returned and before the fence let training
            pass.
        straight_bytes: The bytes written directly from live tensors: in mode `blocking` as many as
            possible, otherwise only those for which staging was too small.
        seconds: `blocked`, `plan`, `capture`, `encode`, `write`, `commit`, `total`. `total` runs
            from the call of `save` to the commit, and does not include copies to other tiers.
            `blocked` is the time for which the caller was blocked: in mode `blocking` the same as
            `total`, otherwise the call of `save` plus the wait at the fence. `plan` covers waiting
            for an earlier save, describing and planning. `encode` and `write` are the time in which
            any such work was in flight.
        tiers: The tiers that had the whole checkpoint at the time of the report, fastest first;
            empty without tiers.
        codecs: The choices of rules with `codecs = "auto"`, one per class of objects.
        ranks: The number of ranks that saved the checkpoint together. The figures above count only
            this rank's work.
        total: The sum over all ranks.
        interval: When the next save is due, and why. Set only on rank 0, which decides it, and only
            if the run uses `Checkpointer.due`.
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
    codecs: tuple[CodecChoice, ...] = ()
    ranks: int = 1
    total: SaveTotals = SaveTotals(0, 0, 0)
    interval: SaveInterval | None = None

    def __repr__(self) -> str:
        """Return the main figures in one short line."""
        following = ""
        if self.interval is not None:
            steps = counted(self.interval.steps, "step")
            following = f"; the next is due after {steps}: {self.interval.why}"
        return (
            f"<SaveReport step={self.step}: {counted(self.objects, 'object')}, "
            f"{size_text(self.bytes_raw)}, {size_text(self.bytes_stored)} stored through "
            f"{self.engine} in {self.seconds['total']:.3f} s{following}>"
        )


@dataclass(frozen=True, slots=True)
class CheckReport(HtmlTable):
    """The report of `check`, which plans a save and writes nothing.

    Attributes:
        objects: The number of objects, including tied ones.
        bytes_raw: The bytes of the state; tied tensors count once.
        deferred_bytes: The bytes that the save would capture after it returns and before the fence
            lets training pass; 0 unless its mode is `lazy`.
        staging_bytes: The most memory that the capture takes, within the option `staging_bytes`.
    """

    objects: int
    bytes_raw: int
    deferred_bytes: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an operation that takes `on_progress`, such as a save or a restore.

    Attributes:
        bytes_done: The bytes written, or read and verified, so far.
        bytes_total: The bytes to write or read, as far as known; may grow while `phase` is `plan`
            or `read`.
        phase: For a save: `capture`, `write`, `commit`, with tiers `drain`, then `durable`,
            `failed` or `skipped`. Any other operation ends with `done` or `failed`. For a restore
            or load: `plan`, `read`, `place`. For a comparison: `plan`, `read`. For a verification:
            `manifest`, `read`, with `repair` also `repair`. For an export: `write`, after the
            phases of a load if it exports a whole tree.
    """

    bytes_done: int
    bytes_total: int
    phase: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An object that `restore(strict=False)` skipped because the stored object does not fit it.

    Attributes:
        path: The shown path; everything below it was also skipped.
        stored: A description of the checkpoint's object.
        here: A description of the template's object.
    """

    path: str
    stored: str
    here: str


@dataclass(frozen=True, slots=True)
class Cast:
    """An object whose floats `restore(cast=True)` converted.

    Attributes:
        path: The shown path.
        stored: The stored dtype.
        here: The dtype of the template.
    """

    path: str
    stored: str
    here: str


@dataclass(frozen=True, slots=True, repr=False)
class RestoreReport(HtmlTable):
    """The report of a restore. Paths are shown paths of the template.

    Attributes:
        step: The step that was restored.
        restored: The objects that were restored, in the order of the checkpoint's tree.
        missing: The selected objects of the template that the checkpoint lacks; only with
            `strict=False`.
        unexpected: The selected objects of the checkpoint that the template lacks. With several
            ranks, rank 0 has the objects that every rank's template lacks; the list is empty on
            other ranks.
        cast: The objects whose floats were converted to another dtype.
        mismatched: The objects skipped with `strict=False`: objects with another shape in the
            checkpoint, the optimizer state of such parameters, and optimizer group options that
            differ.
        values: The restored values by path.
        matched_by: How optimizer state was matched to its parameters: `"name"`, or `"order"` if any
            optimizer's state had no names. None if there was no optimizer state, or the optimizer
            loaded it whole itself.
        bytes_needed: The bytes that the restore needs: the selected bytes of raw frames, and all
            stored bytes of encoded ones.
        bytes_read: The bytes read from blobs.
        bytes_shared: The bytes that this rank copied from other ranks of this host, which had read
            them.
        bytes_received: The bytes of blobs that ranks of other hosts read and sent here.
        bytes_metadata: The bytes read from the manifest.
        engine: The backend that read the blobs.
        direct_io: Whether the page cache was bypassed.
        fell_back_from: The steps that `on_damage="fallback"` skipped, newest first.
        rescued: Blobs, records and sections of records that were damaged or missing in one tier,
            each with the tier whose copy was read instead, or "another host". A checkpointer
            replaces the bad copies in the background.
        uid: The uid of the restored checkpoint.
        replayed_steps: The logged steps that were replayed onto a checkpoint.
        seconds: `plan`, `read`, `place`, `total`, and `replay` if steps were replayed.
    """

    step: int
    restored: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    values: Mapping[str, Any]
    matched_by: str | None
    bytes_needed: int
    bytes_read: int
    bytes_metadata: int
    engine: str
    direct_io: bool
    seconds: Mapping[str, float]
    fell_back_from: tuple[int, ...] = ()
    rescued: tuple[tuple[str, str], ...] = ()
    replayed_steps: int = 0
    uid: str = ""
    mismatched: tuple[Mismatch, ...] = ()
    cast: tuple[Cast, ...] = ()
    bytes_shared: int = 0
    bytes_received: int = 0

    def __repr__(self) -> str:
        """Return only counts and figures, because there may be thousands of paths and values."""
        return (
            f"<RestoreReport step={self.step}: {counted(len(self.restored), 'object')}, "
            f"{size_text(self.bytes_read)} read of {size_text(self.bytes_needed)} needed in "
            f"{self.seconds['total']:.3f} s, "
            f"{len(self.missing)} missing, {len(self.unexpected)} unexpected, "
            f"{len(self.mismatched)} mismatched>"
        )


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged part of a checkpoint.

    Attributes:
        what: The path of the object, or the name of the blob or record.
        detail: A description of the damage.
        blob: The damaged blob; empty for a record.
    """

    what: str
    detail: str
    blob: str = ""


@dataclass(frozen=True, slots=True)
class LendingSave:
    """A save from which a checkpoint borrows blobs, such as a link in its chain of deltas.

    Attributes:
        uid: The uid of the save.
        step: The step of the save; None if no checkpoint records the save any more.
        state: `ok` if the save still has its commit record. If only its blobs remain: `replaced`
            if the step now has another record, else `deleted`.
    """

    uid: str
    step: int | None
    state: str = "ok"

    def __str__(self) -> str:
        """Return the name of the save for messages: `step 8`, `step 8 (deleted)`."""
        if self.step is None:
            return f"a deleted step (data/{self.uid})"
        return f"step {self.step}" + ("" if self.state == "ok" else f" ({self.state})")


@dataclass(frozen=True, slots=True)
class Repair:
    """The repair of a copy that `verify(repair=True)` found damaged.

    Attributes:
        tier: The tier of the damaged copy.
        source: The tier with the copy that replaced it; None if it was not replaced.
        error: Why the copy was not replaced, or is still damaged; None if it is whole now.
    """

    tier: str
    source: str | None
    error: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(HtmlTable):
    """The report of `verify`.

    Attributes:
        step: The step of the checkpoint.
        ok: Whether the checkpoint is whole in every tier; with `repair`, after repairs.
        damaged: All damage, including repaired damage.
        objects: The number of objects, including tied ones.
        frames: The number of frames read.
        bytes_read: The bytes read from manifest and blobs.
        deep: Whether every frame was read. If not, only the manifest was read, and the sizes of the
            blobs were checked.
        seconds: The duration of the verification.
        repairs: With `repair`, the repair of each damaged copy.
        tiers: For a run with tiers, the tiers that have the checkpoint.
        not_decoded: Messages about frames that were not decoded because their codec is not
            installed. Their stored bytes were still compared, and are whole unless `damaged` lists
            them.
        lossy: The lossy codecs of the objects. The save rounded their values, so even undamaged
            objects decode to rounded values.
        links: The other saves from which the checkpoint borrows damaged blobs.
        logged_entries: The number of entries of the checkpoint's log.
        torn_logs: The places where a segment of the log ends in an incomplete entry. This is not
            damage: the entry is still being written, or its process was killed while writing it.
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
    not_decoded: tuple[str, ...] = ()
    lossy: tuple[str, ...] = ()
    links: tuple[LendingSave, ...] = ()
    logged_entries: int = 0
    torn_logs: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the main figures in one short line; `damaged` lists all damage."""
        return (
            f"<VerifyReport step={self.step} {'ok' if self.ok else 'NOT OK'}: "
            f"{counted(self.objects, 'object')}, {size_text(self.bytes_read)} read in "
            f"{self.seconds:.3f} s, {len(self.damaged)} damaged>"
        )


@dataclass(frozen=True, slots=True)
class CopyFound:
    """The verification of one copy of a checkpoint.

    Attributes:
        tier: The name of the copy's tier; empty without tiers.
        uid: The uid in the copy's commit record; None if the record is unreadable.
        damaged: All damage of the copy.
        frames: The number of frames read.
        bytes_read: The bytes read from manifest and blobs.
        not_decoded: As in `VerifyReport`.
        lossy: As in `VerifyReport`.
        links: As in `VerifyReport`.
    """

    tier: str
    uid: str | None
    damaged: tuple[Damage, ...]
    frames: int = 0
    bytes_read: int = 0
    not_decoded: tuple[str, ...] = ()
    lossy: tuple[str, ...] = ()
    links: tuple[LendingSave, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointInfo(HtmlTable):
    """Facts about a checkpoint from its commit record and its annotations.

    Attributes:
        step: The step.
        generation: The generation. Overwrites are even, compactions are odd.
        uid: The id of the save, 32 hex digits.
        created: UTC time of the commit, `YYYY-MM-DDTHH:MM:SSZ`.
        bytes_raw: The bytes of all objects.
        bytes_stored: The bytes of the save's own blobs.
        objects: The number of objects, including tied ones.
        world_size: The number of ranks that saved.
        metadata: The user's metadata, including later annotations.
        references: The uids of the saves from which the checkpoint borrows blobs.
        codecs: The version of each codec, by name.
        providers: The version of each provider, by name.
        plugins: The third-party plugins, such as `"codec acme"`, each with its distribution's name
            and version.
        tags: The current tags.
    """

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
    plugins: Mapping[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()


class Outcome(Future[T]):
    """A future that notifies its owner when a caller has seen its error.

    The next `fence`, `wait`, `save` or `close` raises, once, an error that no caller has seen.
    """

    def __init__(self, on_error_seen: Callable[[], None]) -> None:
        super().__init__()
        self._on_error_seen = on_error_seen
        # Our own latch: `Future` waits in a Condition, and Ctrl-C there can leave the condition's
        # lock acquired forever.
        self._over = Latch()
        self.add_done_callback(lambda _: self._over.open())  # before all other callbacks
        self.on_result: Callable[[], None] | None = None
        """Called when a caller has waited for a good result, before the result is returned."""

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call `fn` with this future when it ends; log any exception of `fn`.

        `Future` catches only `Exception`. A `sys.exit()` in a callback would end the save thread
        before it resolves the later futures, and waits for these would never end.
        """
        super().add_done_callback(partial(_contained, fn))

    def done(self) -> bool:
        """Whether the future has a result or an error."""
        return self._over.is_open

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, without marking the error as seen. Return False on a timeout."""
        return self._over.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """Wait and return the result, like `Future.result`. An error raised here counts as seen."""
        if self._await(timeout) is not None:
            self._on_error_seen()
        elif self.on_result is not None:
            self.on_result()
        return super().result(0)

    def cancel(self) -> bool:
        """Return False: a future does not cancel the save, which other threads may wait for."""
        return False

    def peek_error(self) -> BaseException | None:
        """Return the error of a done future, without marking it as seen."""
        return super().exception(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait and return the error, like `Future.exception`. The error counts as seen."""
        error = self._await(timeout)
        if error is not None:
            self._on_error_seen()
        elif self.on_result is not None:
            try:
                self.on_result()
            except Exception as late:  # noqa: BLE001 - returned to the caller
                self._on_error_seen()
                return late
        return error

    def _await(self, timeout: float | None) -> BaseException | None:
        if not self._over.wait(timeout):
            raise TimeoutError
        return super().exception(0)


def _contained(fn: Callable[[Future[T]], object], future: Future[T]) -> None:
    try:
        fn(future)
    except Exception:
        raise  # `Future` logs the error
    except BaseException as error:
        if threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C arrives in the main thread
        log.error("a callback of a save raised %s", repr(error))  # noqa: TRY400 - keeps its frames


class SaveHandle:
    """A save in flight. Its futures resolve in the order captured, committed, durable.

    `replicated` resolves after `committed`.

    Attributes:
        step: The step of the save.
        skipped: Whether the save did not start, because of `on_busy="skip"` or a full tier.
        captured: Resolves to None once the state is captured and may change.
        committed: Resolves to a `SaveReport` once the checkpoint exists; with tiers, in the tier of
            the save.
        replicated: Resolves to True once enough other hosts have a copy, with the backend `hosts`
            and its option `copies`. Resolves to False if no copies are made, or if they were given
            up: a newer checkpoint was copied instead, or the checkpointer was closed first.
        durable: Resolves to a `SaveReport` once the checkpoint is durable; with tiers, once the
            durable tier has it.
    """

    def __init__(self, step: int, *, skipped: bool = False) -> None:
        self.step = step
        self.skipped = skipped
        self.error_seen = False
        self.captured: Outcome[None] = Outcome(self._see)
        self.committed: Outcome[SaveReport] = Outcome(self._see)
        self.replicated: Outcome[bool] = Outcome(self._see)
        self.durable: Outcome[SaveReport] = Outcome(self._see)
        self.progress_source: Callable[[], Progress] | None = None

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is durable.

        Args:
            timeout: The limit in seconds; None waits forever.

        Raises:
            PenstockError: The save failed; raised on every call.
            TimeoutError: The save is still in flight after `timeout` seconds.
        """
        return self.durable.result(timeout)

    def progress(self) -> Progress:
        """Return the progress of the save."""
        if self.progress_source is None:
            return Progress(0, 0, "skipped" if self.skipped else "capture")
        return self.progress_source()

    def done(self) -> bool:
        """Whether the save has ended, with a checkpoint or with an error."""
        return self.durable.done()

    @property
    def failed(self) -> bool:
        """Whether the save has failed. Reading this does not mark the error as seen."""
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
    """Return the handle of a save that `on_busy="skip"` or `on_full="skip"` skipped."""
    handle = SaveHandle(step, skipped=True)
    error = SaveSkippedError(f"step {step} was skipped: {why}")
    for future in (handle.captured, handle.committed, handle.replicated, handle.durable):
        future.set_exception(error)
    return handle


def _rows(figures: Any) -> list[tuple[str, str]]:
    """Return the fields of a dataclass that have a value, as text."""
    found = [
        (field.name, _text(field.name, getattr(figures, field.name))) for field in fields(figures)
    ]
    return [(name, text) for name, text in found if text]


def _text(name: str, value: Any) -> str:
    match value:
        case None | ():
            text = ""
        case bool():
            text = "yes" if value else "no"
        case int() if "bytes" in name:
            text = size_text(value)
        case float() if name in {"seconds", "lost_seconds"}:
            text = f"{value:.3g} s"
        case float() if name in {"overhead", "lost_steps"}:
            text = f"{value:.3g}"
        case tuple():
            # Of thousands of paths, the first ones show whether they are as expected.
            text = f"{len(value)}: {listed([_entry(name, one) for one in value])}"
        case Mapping() if name == "values" and value:  # they may be of any size
            text = counted(len(value), "value")
        case Mapping():
            text = ", ".join(f"{key} {_entry(name, inner)}" for key, inner in value.items())
        case _ if is_dataclass(value):
            text = ", ".join(f"{inner} {text}" for inner, text in _rows(value))
        case _:
            text = cut(str(value))
    return text


def _entry(name: str, entry: Any) -> str:
    return " from ".join(entry) if isinstance(entry, tuple) else _text(name, entry)
