"""From a committed checkpoint back into live objects, or into new ones."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.core.abc import StoredObject
from penstock.core.blame import said
from penstock.core.contents import Wish
from penstock.core.errors import (
    PenstockError,
    RestoreError,
    RestoreMismatchError,
)
from penstock.core.overlap import disagreements, overlapping
from penstock.core.paths import show_path
from penstock.core.place import StoredTree, place_tree, rebuild_tree, stored_value
from penstock.core.reading import BytesSink, Tally, fill, listed, read_stored
from penstock.core.reports import RestoreReport
from penstock.core.select import Rename, Selection
from penstock.core.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.core.abc import Placement, Target
    from penstock.core.contents import Located
    from penstock.core.fallback import Overwritten
    from penstock.core.progress import Meter
    from penstock.core.reading import Opened, Stored
    from penstock.core.registry import Registry
    from penstock.core.types import ObjectPath, TensorSpec

log = logging.getLogger("penstock")

_SHOWN = 50  # so many differences are spelled out in a message; the error holds all


def restore_into(  # noqa: PLR0913 - what `restore` is asked for, and what it is done with
    checkpoint: Opened,
    state: Mapping[str, Any],
    *,
    selection: Selection,
    rename: Rename,
    strict: bool,
    registry: Registry,
    allow_pickle: bool,
    overwritten: Overwritten,
    meter: Meter,
) -> RestoreReport:
    """Restore `checkpoint` into the live objects of `state`.

    `overwritten` is what attempts at damaged checkpoints have left in them.
    """
    began = time.monotonic()
    stored = read_stored(checkpoint, selection.selects, rename, meter)
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
        aside = _read_overlapping(checkpoint, placement.targets, stored)
    except RestoreMismatchError as error:
        overwritten.check_mismatch(error)
        raise
    planned = time.monotonic()
    meter.will_enter("read")
    earlier = overwritten.begin(placement.targets)
    try:
        _fill_targets(checkpoint, placement, stored, aside)
    except BaseException as error:
        undefined = listed([show_path(t.path) for t in placement.targets])
        error.add_note(f"Undefined now: {undefined}. Nothing else was touched.")
        raise
    read = time.monotonic()
    meter.enter("place")
    _finish(placement, checkpoint.step)
    overwritten.check_left(earlier, placement.targets, checkpoint.step)
    used = {t.path for t in placement.targets} | set(placement.values)
    order = [path for path in stored.located if path in used]
    values = {
        show_path(p): stored_value(
            p, providers=registry.providers, stored=stored.tree, allow_pickle=allow_pickle
        )
        for p in order
        if stored.located[p].record.kind is Kind.VALUE
    }
    return _report(
        checkpoint,
        stored,
        order,
        times=(began, planned, read),
        missing=tuple(show_path(p) for p in missing),
        unexpected=tuple(show_path(p) for p in unexpected),
        values=values,
        matched_by=placement.notes.get("matched_by", "name"),
    )


def build_new(
    checkpoint: Opened,
    *,
    selection: Selection | Below,
    device: str | None,
    registry: Registry,
    allow_pickle: bool,
    meter: Meter,
) -> tuple[Any, RestoreReport]:
    """Build the selected part of `checkpoint` anew; the report has no values."""
    began = time.monotonic()
    stored = read_stored(checkpoint, selection.selects, Rename(None), meter)
    selection.check_used(stored.every_path)
    placement = rebuild_tree(
        providers=registry.providers,
        stored=stored.tree,
        selected=selection.selects,
        device=device,
        allow_pickle=allow_pickle,
    )
    if placement.problems or placement.missing:
        what = "hold all that building the selection needs"
        raise _mismatch(placement.problems, placement.missing, checkpoint.step, what=what)
    planned = time.monotonic()
    meter.will_enter("read")
    _fill_targets(checkpoint, placement, stored, {})
    read = time.monotonic()
    meter.enter("place")
    tree = _finish(placement, checkpoint.step)
    return tree, _report(checkpoint, stored, stored.located, times=(began, planned, read))


def _report(
    checkpoint: Opened,
    stored: Stored,
    order: Iterable[ObjectPath],
    *,
    times: tuple[float, float, float],
    missing: tuple[str, ...] = (),
    unexpected: tuple[str, ...] = (),
    values: Mapping[str, Any] | None = None,
    matched_by: str = "name",
) -> RestoreReport:
    began, planned, read = times
    now = time.monotonic()
    return RestoreReport(
        step=checkpoint.step,
        restored=tuple(show_path(p) for p in order),
        missing=missing,
        unexpected=unexpected,
        values=values or {},
        matched_by=matched_by,
        bytes_needed=stored.tally.needed,
        bytes_read=stored.tally.read,
        bytes_metadata=checkpoint.contents.bytes_read,
        engine=checkpoint.backend.name,
        direct_io=checkpoint.backend.direct_io,
        seconds={
            "plan": planned - began,
            "read": read - planned,
            "place": now - read,
            "total": now - began,
        },
    )


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
    record, tally = located.record, Tally()
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


def _read_overlapping(
    checkpoint: Opened, targets: Sequence[Target], stored: Stored
) -> dict[int, memoryview]:
    """Bytes of targets that share memory, read aside, by the identity of their sinks.

    Raises:
        RestoreMismatchError: What is stored disagrees about the shared memory.
    """
    unique = {id(t.sink): t for t in targets}
    groups = overlapping(unique.values())
    sinks = {t.path: BytesSink(t.sink.nbytes) for group in groups for t in group}
    if not sinks:
        return {}
    fill(checkpoint, [Wish(stored.located[p], s) for p, s in sinks.items()], stored.tally)
    views = {path: memoryview(sink.data) for path, sink in sinks.items()}
    problems = [problem for group in groups for problem in disagreements(group, views)]
    aside = {id(t.sink): views[t.path] for group in groups for t in group}
    if problems:
        raise _mismatch(problems, [], checkpoint.step)
    return aside


def _fill_targets(
    checkpoint: Opened, placement: Placement, stored: Stored, aside: Mapping[int, memoryview]
) -> None:
    """Fill every target; tied ones share a sink, and are read once."""
    unique = {id(t.sink): t for t in placement.targets}
    for target in unique.values():
        with _of_sink(target):
            target.sink.opened()
    wishes = [Wish(stored.located[t.path], t.sink) for key, t in unique.items() if key not in aside]
    fill(checkpoint, wishes, stored.tally)
    for key, target in unique.items():
        with _of_sink(target):
            if key in aside:
                target.sink.copy_in(0, aside[key])
            target.sink.written()


@contextmanager
def _of_sink(target: Target) -> Iterator[None]:
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        kind = type(target.sink)
        msg = (
            f"{show_path(target.path)} cannot be restored: {kind.__module__}.{kind.__qualname__} "
            f"failed with {said(error)}"
        )
        raise RestoreError(msg) from error


def _compare(
    placement: Placement, stored: Stored, selection: Selection, *, strict: bool, step: int
) -> tuple[list[ObjectPath], list[ObjectPath]]:
    missing, problems = placement.missing, placement.problems
    used = {t.path for t in placement.targets} | set(placement.values)
    selection.check_used([*stored.every_path, *used, *missing])
    unexpected = [path for path in stored.located if path not in used]
    if problems or (strict and missing):
        raise _mismatch(problems, missing if strict else [], step, unexpected=unexpected)
    if not used and not missing and stored.every_path:
        msg = (
            f"nothing to restore from step {step}: template and checkpoint have nothing in common "
            "within the selection. Look at include, exclude and rename, and at the keys of the "
            "template."
        )
        raise RestoreMismatchError(msg, [msg])
    if unexpected:
        log.warning(
            "step %d holds %d object(s) that the template lacks; they are left out: %s",
            step,
            len(unexpected),
            listed([show_path(p) for p in unexpected]),
        )
    return missing, unexpected


def _mismatch(
    problems: Sequence[str],
    missing: Sequence[ObjectPath],
    step: int,
    *,
    what: str = "fit the template",
    unexpected: Sequence[ObjectPath] = (),
) -> RestoreMismatchError:
    every = [
        *problems,
        *(f"{show_path(p)}: not in the checkpoint (strict=False leaves it alone)" for p in missing),
    ]
    more = f"\n  ... and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    msg = (
        f"step {step} does not {what} in {len(every)} place(s); nothing was changed:\n  "
        + "\n  ".join(every[:_SHOWN])
        + more
    )
    if missing and unexpected:
        msg += (
            f"\nThe checkpoint has {len(unexpected)} object(s) that the template lacks: "
            f"{listed([show_path(p) for p in unexpected])}. If names have changed, pass "
            "rename={'old': 'new'}."
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


def with_history(
    report: RestoreReport, skipped: tuple[int, ...], rescued: tuple[tuple[str, str], ...]
) -> RestoreReport:
    """The report, with the damaged steps, and the damage in one tier, that were passed over."""
    return replace(report, fell_back_from=skipped, rescued=rescued)
