"""From a committed checkpoint back into live objects, or into new ones."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.core.abc import ByteSink, Node, StoredObject
from penstock.core.contents import Wish
from penstock.core.errors import (
    CheckpointGoneError,
    DamagedError,
    PenstockError,
    RestoreError,
    RestoreMismatchError,
)
from penstock.core.paths import show_path
from penstock.core.place import StoredTree, place_tree, rebuild_tree, stored_value
from penstock.core.reports import RestoreReport
from penstock.core.select import Rename, Selection
from penstock.core.types import Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import Backend, Placement
    from penstock.core.contents import Contents, Located
    from penstock.core.fallback import Overwritten
    from penstock.core.loading import Loader
    from penstock.core.registry import Registry
    from penstock.core.types import ObjectPath, TensorSpec

log = logging.getLogger("penstock")

_LISTED = 8
_SHOWN = 50  # so many differences are spelled out in a message; the error holds all


class Opened(Protocol):
    """A checkpoint that is open for reading; `core.checkpoint` has the class."""

    backend: Backend
    loader: Loader
    contents: Contents

    @property
    def step(self) -> int:
        """Its step."""
        raise NotImplementedError

    def still_there(self) -> bool:
        """Whether the commit record still names it."""
        raise NotImplementedError


class BytesSink(ByteSink):
    """Collects an object's bytes in memory of its own."""

    __slots__ = ("address", "data", "device", "memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.device = "cpu"
        self.address = None
        self.memory = None
        self.data = bytearray(nbytes)

    def view(self) -> memoryview | None:
        """The memory itself."""
        return memoryview(self.data)

    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Copy into the memory."""
        self.data[start : start + data.nbytes] = data


@dataclass(slots=True)
class _Tally:
    needed: int = 0
    read: int = 0

    def add(self, needed: int, read: int) -> None:
        self.needed += needed
        self.read += read


@dataclass(frozen=True, slots=True)
class Stored:
    """The selected part of a checkpoint under the template's names, values read."""

    tree: StoredTree
    located: Mapping[ObjectPath, Located]
    every_path: Collection[ObjectPath]
    tally: _Tally


def restore_into(
    checkpoint: Opened,
    state: Mapping[str, Any],
    *,
    selection: Selection,
    rename: Rename,
    strict: bool,
    registry: Registry,
    allow_pickle: bool,
    overwritten: Overwritten,
) -> RestoreReport:
    """Restore `checkpoint` into the live objects of `state`.

    `overwritten` is what attempts at damaged checkpoints have left in them.
    """
    began = time.monotonic()
    stored = read_stored(checkpoint, selection, rename)
    placement = place_tree(
        state,
        providers=registry.providers,
        stored=stored.tree,
        selected=selection.selects,
        allow_pickle=allow_pickle,
    )
    try:
        missing, unexpected = _compare(
            placement, stored, selection, strict=strict, step=checkpoint.step
        )
    except RestoreMismatchError as error:
        overwritten.check_mismatch(error)
        raise
    planned = time.monotonic()
    earlier = overwritten.begin(placement.targets)
    try:
        _fill_targets(checkpoint, placement, stored)
    except (DamagedError, CheckpointGoneError) as error:
        undefined = _listed([show_path(t.path) for t in placement.targets])
        error.add_note(f"Undefined now: {undefined}. Nothing else was touched.")
        raise
    read = time.monotonic()
    _finish(placement, checkpoint.step)
    overwritten.check_left(earlier, placement.targets, checkpoint.step)
    used = {t.path for t in placement.targets} | set(placement.values)
    order = [path for path in stored.located if path in used]
    now = time.monotonic()
    return RestoreReport(
        step=checkpoint.step,
        restored=tuple(show_path(p) for p in order),
        missing=tuple(show_path(p) for p in missing),
        unexpected=tuple(show_path(p) for p in unexpected),
        values={
            show_path(p): stored_value(
                p, providers=registry.providers, stored=stored.tree, allow_pickle=allow_pickle
            )
            for p in order
            if stored.located[p].record.kind is Kind.VALUE
        },
        matched_by=placement.notes.get("matched_by", "name"),
        bytes_needed=stored.tally.needed,
        bytes_read=stored.tally.read,
        bytes_metadata=checkpoint.contents.bytes_read,
        engine=checkpoint.backend.name,
        direct_io=checkpoint.backend.capabilities.direct_io,
        seconds={
            "plan": planned - began,
            "read": read - planned,
            "place": now - read,
            "total": now - began,
        },
    )


def build_new(
    checkpoint: Opened,
    *,
    selection: Selection | Below,
    device: str | None,
    registry: Registry,
    allow_pickle: bool,
) -> Any:
    """Build the selected part of `checkpoint` anew."""
    stored = read_stored(checkpoint, selection, Rename(None))
    selection.check_used(stored.every_path)
    placement = rebuild_tree(
        providers=registry.providers,
        stored=stored.tree,
        selected=selection.selects,
        device=device,
        allow_pickle=allow_pickle,
    )
    if placement.problems or placement.missing:
        raise _mismatch(placement.problems, placement.missing, checkpoint.step)
    _fill_targets(checkpoint, placement, stored)
    return _finish(placement, checkpoint.step)


class Below:
    """Selects exactly the subtree at `path` (a pattern would also end at a dot)."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path

    def selects(self, path: ObjectPath) -> bool:
        """Whether `path` is the subtree's root or below it."""
        return path[: len(self._path)] == self._path

    def check_used(self, paths: Iterable[ObjectPath]) -> None:
        """The caller has made sure that it is there."""


def build_leaf(
    checkpoint: Opened,
    located: Located,
    spec: TensorSpec,
    data: memoryview | None,
    *,
    registry: Registry,
    allow_pickle: bool,
) -> Any:
    """Build one object anew: from `data`, or (None) by reading all of it."""
    record, tally = located.record, _Tally()
    path = record.path[-1:]
    values = {}
    if record.kind is Kind.VALUE:
        sink = BytesSink(record.spec.nbytes)
        fill(checkpoint, [Wish(located, sink)], tally)
        values[path] = bytes(sink.data)
    placement = rebuild_tree(
        providers=registry.providers,
        stored=StoredTree(
            objects=[StoredObject(path, record.kind, spec, record.role, record.form)],
            nodes=[],
            values=values,
            aliases={},
        ),
        selected=lambda _: True,
        device=None,
        allow_pickle=allow_pickle,
    )
    for target in placement.targets:
        if data is None:
            fill(checkpoint, [Wish(located, target.sink)], tally)
        else:
            target.sink.copy_in(0, data)
        target.sink.written()
    tree = _finish(placement, checkpoint.step)
    return next(iter(tree.values()))


def read_stored(
    checkpoint: Opened,
    selection: Selection | Below,
    rename: Rename,
) -> Stored:
    """Find the selected objects, under the template's names, and read the values among them."""
    contents = checkpoint.contents
    everything = contents.objects()
    by_path = {o.record.path: o for o in everything}
    moved = rename.apply(by_path)
    located: dict[ObjectPath, Located] = {}
    aliases: dict[ObjectPath, ObjectPath] = {}
    for item in everything:
        path = moved[item.record.path]
        if not selection.selects(path):
            continue
        if item.record.same_as is None:
            located[path] = item
        else:
            located[path] = by_path[item.record.same_as]
            aliases[path] = moved[item.record.same_as]
    tally = _Tally()
    wishes, sinks = [], {}
    for path, item in located.items():
        if item.record.kind is Kind.VALUE:
            sink = sinks[path] = BytesSink(item.record.spec.nbytes)
            wishes.append(Wish(item, sink))
    fill(checkpoint, wishes, tally)
    tree = StoredTree(
        objects=[
            StoredObject(moved[r.path], r.kind, r.spec, r.role, r.form)
            for r in (o.record for o in everything)
        ],
        nodes=[Node(rename(n.path), n.form, n.meta) for n in contents.nodes()],
        values={path: bytes(sink.data) for path, sink in sinks.items()},
        aliases=aliases,
    )
    return Stored(tree, located, moved.values(), tally)


def _fill_targets(checkpoint: Opened, placement: Placement, stored: Stored) -> None:
    """Fill every target; tied ones share a sink, and are read once."""
    unique = {id(t.sink): t for t in placement.targets}.values()
    for target in unique:
        target.sink.opened()
    fill(checkpoint, [Wish(stored.located[t.path], t.sink) for t in unique], stored.tally)
    for target in unique:
        target.sink.written()


def fill(checkpoint: Opened, wishes: Sequence[Wish], tally: _Tally) -> None:
    """Read what is wished for.

    Raises:
        DamagedError: Names every damaged object.
        CheckpointGoneError: The checkpoint was deleted meanwhile.
        RestoreError: The store failed; what was selected is undefined now.
    """
    jobs, needed = checkpoint.contents.jobs(wishes)
    try:
        stats = checkpoint.loader.run(jobs)
    except PenstockError as error:
        names = sorted({name for job in jobs for name in job.label})
        msg = (
            f"step {checkpoint.step} could not be read from {checkpoint.backend.url}: {error}. "
            f"Undefined now: {_listed(names)}; nothing else was touched."
        )
        raise RestoreError(msg) from error
    tally.add(needed, stats.bytes_read)
    if stats.damaged:
        raise_damaged(checkpoint, stats.damaged, missing_blob=stats.missing_blob)


def raise_damaged(
    checkpoint: Opened, damaged: Sequence[tuple[str, str]], *, missing_blob: bool
) -> None:
    """Raise what `damaged` means: gone, if the record is gone by now, else damage."""
    if missing_blob and not checkpoint.still_there():
        msg = f"step {checkpoint.step} on {checkpoint.backend.url} was deleted while it was read"
        raise CheckpointGoneError(msg)
    names = list(dict.fromkeys(name for name, _ in damaged))
    details = "; ".join(f"{name}: {detail}" for name, detail in damaged[:_LISTED])
    msg = (
        f"step {checkpoint.step} on {checkpoint.backend.url} is damaged in {len(names)} "
        f"object(s): {details}. Restore an older step, or pass on_damage='fallback'."
    )
    raise DamagedError(msg, names)


def _compare(
    placement: Placement, stored: Stored, selection: Selection, *, strict: bool, step: int
) -> tuple[list[ObjectPath], list[ObjectPath]]:
    missing, problems = placement.missing, placement.problems
    used = {t.path for t in placement.targets} | set(placement.values)
    selection.check_used([*stored.every_path, *used, *missing])
    if problems or (strict and missing):
        raise _mismatch(problems, missing if strict else [], step)
    if not used and not missing and stored.every_path:
        msg = (
            f"nothing to restore from step {step}: template and checkpoint have nothing in common "
            "within the selection. Look at include, exclude and rename, and at the keys of the "
            "template."
        )
        raise RestoreMismatchError(msg, [msg])
    unexpected = [path for path in stored.located if path not in used]
    if unexpected:
        log.warning(
            "step %d holds %d object(s) that the template lacks; they are left out: %s",
            step,
            len(unexpected),
            _listed([show_path(p) for p in unexpected]),
        )
    return missing, unexpected


def _mismatch(
    problems: Sequence[str], missing: Sequence[ObjectPath], step: int
) -> RestoreMismatchError:
    every = [
        *problems,
        *(f"{show_path(p)}: not in the checkpoint (strict=False leaves it alone)" for p in missing),
    ]
    more = f"\n  ... and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    msg = (
        f"step {step} does not fit the template in {len(every)} place(s); nothing was changed:\n  "
        + "\n  ".join(every[:_SHOWN])
        + more
    )
    return RestoreMismatchError(msg, every)


def _finish(placement: Placement, step: int) -> Any:
    if placement.finish is None:
        return None
    try:
        return placement.finish()
    except PenstockError:
        raise
    except Exception as error:
        msg = (
            f"step {step}: tensors are restored, but assigning the rest failed: "
            f"{type(error).__name__}: {error}. What was selected is undefined now."
        )
        raise RestoreError(msg) from error


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    shown = ", ".join(names[:_LISTED])
    return f"{shown} and {more} more" if more > 0 else shown


def with_history(report: RestoreReport, skipped: tuple[int, ...]) -> RestoreReport:
    """The report, with the damaged steps that were passed over."""
    return replace(report, fell_back_from=skipped) if skipped else report
