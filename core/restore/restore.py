"""Restores a committed checkpoint into live objects, or builds new ones from it."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.abc import StoredObject
from penstock.core.concurrency.garbage import collections_held
from penstock.core.errors import (
    PenstockError,
    PluginError,
    RestoreError,
    RestoreMismatchError,
    SelectionError,
)
from penstock.core.foreign import said
from penstock.core.markers import Streamed
from penstock.core.plan.reads import ObjectRequest
from penstock.core.ranks.templates import TemplateFit
from penstock.core.reporting.reports import Cast, Mismatch, RestoreReport
from penstock.core.restore.fill import BytesSink, fill, read_range, read_stored
from penstock.core.suggest import listed
from penstock.core.tree.cast import CastSink
from penstock.core.tree.paths import show_path, show_paths
from penstock.core.tree.place import Placing, disagreements, overlapping
from penstock.core.tree.select import Rename, Selection, nothing_for
from penstock.core.tree.stored_tree import StoredTree
from penstock.core.types import Kind, Region
from penstock.core.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import ByteSink, Difference, Placement, Target
    from penstock.core.format.records import ObjectRecord
    from penstock.core.ranks.templates import TemplatesOfRanks
    from penstock.core.restore.fallback import Overwritten
    from penstock.core.restore.fill import Opened, StoredSelection
    from penstock.core.tree.patterns import SegmentTest
    from penstock.core.types import ObjectPath, TensorSpec

log = logging.getLogger("penstock")

_SHOWN = 50  # the most differences in a message; the error holds all of them
_LINE_CHARS = 1000  # the most that a message shows of one difference, which may quote a record


def restore_into(
    checkpoint: Opened,
    state: Mapping[str, Any],
    *,
    selection: Selection,
    rename: Rename,
    strict: bool,
    cast: bool,
    overwritten: Overwritten,
    templates: TemplatesOfRanks | None = None,
) -> RestoreReport:
    """Restore `checkpoint` into the live objects of `state`.

    Finds all differences before `_fill_targets` changes the caller's objects.

    Args:
        checkpoint: The checkpoint.
        state: The template.
        selection: Selects objects of the template.
        rename: Maps stored names to the template's.
        strict: Whether missing and differing objects are errors.
        cast: Whether stored floats may be converted to the template's dtypes.
        overwritten: The targets that earlier attempts at damaged checkpoints began to fill.
        templates: The templates of the ranks that restore together. It is enough if each stored
            object, and each pattern, fits one of these. None: this rank restores alone.

    Raises:
        SelectionError: A pattern matches nothing; nothing was changed.
        RestoreMismatchError: Template and checkpoint differ; nothing was changed.
        DamagedError: Stored bytes differ from those written.
        RestoreError: The store failed, or an object could not be filled or assigned.
    """
    began = time.monotonic()
    meter = checkpoint.meter
    with collections_held:
        plan = _plan(checkpoint, state, selection, rename, cast=cast)
    stored, placement = plan.stored, plan.placement
    # A pattern may name objects that only the template has, such as a new head to skip.
    known = [*stored.every_path, *placement.missing, *plan.left_out]
    if templates is None:
        selection.check_used(known)
    try:
        unequal = _compare(placement, stored, strict=strict, step=checkpoint.step)
        if templates is None:
            _check_common(unequal, checkpoint.step)
            warn_of_unexpected(checkpoint.step, [show_path(p) for p in unequal.unexpected])
        else:
            _judge(templates, selection, known, unequal, stored, step=checkpoint.step)
        aside = _read_overlapping(checkpoint, placement.targets, stored)
    except RestoreMismatchError as error:
        overwritten.check_mismatch(error)
        raise
    planned = time.monotonic()
    meter.will_enter("read")
    earlier = overwritten.begin(placement.targets)
    try:
        _fill_targets(checkpoint, placement, stored, aside)
    except BaseException as error:  # Ctrl-C leaves half-written objects as well
        if placement.targets:
            undefined = listed([*dict.fromkeys(show_path(t.path) for t in placement.targets)])
            error.add_note(f"Undefined now: {undefined}. Nothing else was touched.")
        raise
    read = time.monotonic()
    meter.enter("place")
    # `check_left` runs first: it may describe the state, and so draw random numbers. If it did that
    # after the random state is set, training would continue differently.
    check_left = partial(overwritten.check_left, earlier, placement.targets, checkpoint.step)
    placement.settle.insert(0, check_left)
    _finish(placement, checkpoint.step)
    used = {t.path for t in placement.targets} | set(placement.values)
    # The report is in stored order, not in the order of the template.
    order = [path for path in stored.records if path in used]
    values = {show_path(p): plan.placing.restored_value(p) for p in stored.tree.values if p in used}
    return replace(
        _report(checkpoint, stored, order, times=(began, planned, read)),
        missing=tuple(map(show_path, unequal.missing)),
        unexpected=tuple(map(show_path, unequal.unexpected)),
        mismatched=tuple(Mismatch(show_path(d.path), d.stored, d.here) for d in unequal.skipped),
        values=values,
        matched_by=placement.notes.get("matched_by"),
        cast=_cast(placement.targets, stored) if cast else (),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """A planned restore.

    Attributes:
        stored: The stored objects to read.
        placing: Decodes values, for the report.
        placement: The targets and the differences.
        left_out: The template's paths that are not selected.
    """

    stored: StoredSelection
    placing: Placing
    placement: Placement
    left_out: Collection[ObjectPath] = ()

    def is_flawless(self, selection: Selection) -> bool:
        """Return whether the plan has no problem, nothing missing and no unused pattern."""
        return (
            bool(self.stored.records)
            and not self.placement.problems
            and not self.placement.missing
            and not selection.unused([*self.stored.every_path, *self.left_out])
        )


def _plan(
    checkpoint: Opened,
    state: Mapping[str, Any],
    selection: Selection,
    rename: Rename,
    *,
    cast: bool,
) -> _Plan:

    def plan(stored: StoredSelection, *, narrow: bool) -> _Plan:
        left_out: set[ObjectPath] = set()

        def selected(path: ObjectPath) -> bool:
            if selection.selects(path):
                return True
            left_out.add(path)
            return False

        # Called three times for each object, and there may be a million objects.
        accepted = (lambda _: True) if selection.everything else selected
        below = selection.below if narrow else lambda _: True
        placing = _placing(checkpoint, stored.tree, accepted, below, cast=cast)
        return _Plan(stored, placing, placing.place_tree(state), left_out)

    return _narrow_first(checkpoint, selection, rename, plan)


def _narrow_first(
    checkpoint: Opened, selection: Selection, rename: Rename, plan: Callable[..., _Plan]
) -> _Plan:
    """Plan with the objects that the selection touches, or with all if that plan has a flaw.

    The message about a flaw names the nearest paths, and these may be outside of the selection.
    """
    if selection.narrows and rename.identity:
        stored = read_stored(checkpoint, selection, rename, narrow=True)
        with suppress(PenstockError):  # the second plan raises it again
            narrow = plan(stored, narrow=True)
            if narrow.is_flawless(selection):
                return narrow
    return plan(read_stored(checkpoint, selection, rename, narrow=False), narrow=False)


def _placing(
    checkpoint: Opened,
    tree: StoredTree,
    selected: Callable[[ObjectPath], bool],
    below: Callable[[ObjectPath], SegmentTest | bool] = lambda _: True,
    *,
    cast: bool = False,
) -> Placing:
    placing = Placing(
        checkpoint.registry.providers,
        tree,
        selected,
        allow_pickle=checkpoint.allow_pickle,
        cast=cast,
        below=below,
    )
    placing.rank, placing.world_size = checkpoint.rank, checkpoint.world_size
    placing.of_ranks = max(checkpoint.world_size, checkpoint.contents.record.world_size) > 1
    return placing


def build_new(
    checkpoint: Opened,
    *,
    selection: Selection,
    device: str | None,
    named_optimizers: bool = False,
    streamed: bool = False,
    at: ObjectPath = (),
) -> tuple[Any, RestoreReport]:
    """Build the selected part of `checkpoint` as new objects.

    Args:
        checkpoint: The checkpoint.
        selection: Selects stored objects.
        device: The device of the tensors; None is the CPU.
        named_optimizers: Whether optimizer state is built by names instead of numbers.
        streamed: Whether plain tensors are built as `Streamed`, whose bytes are read later.
        at: The path to build and return, instead of the whole tree.

    Returns:
        The tree, and the report, which holds no values.

    Raises:
        RestoreMismatchError: The checkpoint lacks something that the selection needs.
        DamagedError: Stored bytes differ from those written.
    """
    began = time.monotonic()
    with collections_held:
        plan = _plan_new(
            checkpoint,
            selection,
            device,
            at,
            named_optimizers=named_optimizers,
            streamed=streamed,
        )
    stored, placement = plan.stored, plan.placement
    if placement.problems or placement.missing:
        what = "have what the selection needs"
        missing = dict.fromkeys(placement.missing)
        raise _mismatch(placement.problems, missing, checkpoint.step, what=what)
    planned = time.monotonic()
    checkpoint.meter.will_enter("read")
    _fill_targets(checkpoint, placement, stored, {})
    read = time.monotonic()
    checkpoint.meter.enter("place")
    tree = _finish(placement, checkpoint.step)
    return tree, _report(checkpoint, stored, stored.records, times=(began, planned, read))


def _plan_new(
    checkpoint: Opened,
    selection: Selection,
    device: str | None,
    at: ObjectPath,
    *,
    named_optimizers: bool,
    streamed: bool,
) -> _Plan:

    def plan(stored: StoredSelection, *, narrow: bool) -> _Plan:
        if not narrow:
            selection.check_used(stored.every_path)
        placing = _placing(checkpoint, stored.tree, selection.selects)
        placing.named_optimizers = named_optimizers
        if streamed:
            placing.streamed = lambda tensor: Streamed(
                tensor.spec.dtype,
                tensor.spec.shape,
                partial(read_range, checkpoint, stored.records[tensor.path]),
            )
        return _Plan(stored, placing, placing.rebuild_tree(device=device, at=at))

    return _narrow_first(checkpoint, selection, Rename(None), plan)


def _report(
    checkpoint: Opened,
    stored: StoredSelection,
    order: Iterable[ObjectPath],
    *,
    times: tuple[float, float, float],
) -> RestoreReport:
    """Return the report of a restore, without the fields that compare with a template."""
    began, planned, read = times
    now = time.monotonic()
    return RestoreReport(
        step=checkpoint.step,
        uid=checkpoint.contents.record.uid,
        restored=tuple(show_paths([*order])),
        missing=(),
        unexpected=(),
        values={},
        matched_by=None,
        bytes_needed=stored.tally.needed,
        bytes_read=stored.tally.read,
        bytes_shared=stored.tally.shared,
        bytes_received=stored.tally.received,
        bytes_metadata=checkpoint.contents.manifest.bytes_read,
        engine=checkpoint.backend.name,
        direct_io=checkpoint.backend.direct_io,
        seconds={
            "plan": planned - began,
            "read": read - planned,
            "place": now - read,
            "total": now - began,
        },
    )


def build_leaf(
    checkpoint: Opened,
    record: ObjectRecord,
    spec: TensorSpec,
    data: memoryview | None,
) -> Any:
    """Build one object from its bytes in `data`; if that is None, read the bytes."""
    path = record.path[-1:]
    values = {}
    if record.kind is Kind.VALUE:
        sink = BytesSink(record.spec.nbytes)
        fill(checkpoint, [ObjectRequest(record, sink)])
        values[path] = bytes(sink.data)
    stored = StoredTree(
        objects=[StoredObject(path, record.kind, spec, record.role, record.form)],
        values=values,
        providers=checkpoint.contents.record.providers,
        plugins=checkpoint.contents.record.plugins,
    )
    placement = _placing(checkpoint, stored, lambda _: True).rebuild_tree(device=None)
    for target in placement.targets:
        if data is None:
            fill(checkpoint, [ObjectRequest(record, target.sink)])
        else:
            target.sink.copy_in(0, data)
        target.sink.written()
    tree = _finish(placement, checkpoint.step)
    return next(iter(tree.values()))


def _read_overlapping(
    checkpoint: Opened, targets: Sequence[Target], stored: StoredSelection
) -> dict[int, memoryview]:
    """Read the bytes of targets that share memory; return them by the identity of their sinks.

    Reads them into other memory, and compares them there before anything is changed.

    Raises:
        RestoreMismatchError: The stored bytes disagree about the shared memory.
    """
    unique = {id(t.sink): t for t in targets}
    groups = overlapping(unique.values())
    sinks = {id(t.sink): BytesSink(t.sink.nbytes) for group in groups for t in group}
    if not sinks:
        return {}
    requests = [
        request
        for group in groups
        for target in group
        for request in _requests(stored, target, sinks[id(target.sink)])
    ]
    fill(checkpoint, requests, stored.tally)
    aside = {of: memoryview(sink.data) for of, sink in sinks.items()}
    problems = [problem for group in groups for problem in disagreements(group, aside)]
    if problems:
        raise _mismatch(problems, {}, checkpoint.step)
    return aside


def _requests(stored: StoredSelection, target: Target, sink: ByteSink) -> Sequence[ObjectRequest]:
    """Return the requests that fill `sink`, whose elements have the dtype of `target`.

    They read the whole object, or the rectangles that this rank holds.
    """
    record, regions = stored.records[target.path], target.regions
    spec, into = record.spec, sink
    if spec.dtype != target.spec.dtype:  # only with `cast`: otherwise it is a difference
        into = CastSink(sink, spec, target.spec)
    if regions == (Region.whole(spec.shape),):
        return [ObjectRequest(record, into)]
    requests, at = [], 0
    for region in regions:
        requests.append(ObjectRequest(record, into, region, at))
        at += region.numel * spec.itemsize
    if at != into.nbytes:
        msg = (
            f"{show_path(target.path)}: the regions of its target have {at} bytes, but its memory "
            f"has {into.nbytes}: the provider of this template broke its contract"
        )
        raise PluginError(msg)
    return requests


def _cast(targets: Iterable[Target], stored: StoredSelection) -> tuple[Cast, ...]:
    """Return the targets that are filled from another dtype."""
    specs = {target.path: target.spec for target in targets}
    return tuple(
        Cast(show_path(path), there, spec.dtype)
        for path, spec in specs.items()
        if (there := stored.records[path].spec.dtype) != spec.dtype
    )


def _fill_targets(
    checkpoint: Opened,
    placement: Placement,
    stored: StoredSelection,
    aside: Mapping[int, memoryview],
) -> None:
    """Fill every target; tied targets share a sink, so their bytes are read once."""
    unique = {id(t.sink): t for t in placement.targets}
    with collections_held:
        _each(unique.values(), lambda target: target.sink.opened())
        requests = [
            request
            for key, t in unique.items()
            if key not in aside and t.sink.device != "meta"  # a meta tensor has no memory
            for request in _requests(stored, t, t.sink)
        ]
    fill(checkpoint, requests, stored.tally, checkpoint.others)

    def complete(target: Target) -> None:
        if (data := aside.get(id(target.sink))) is not None:
            target.sink.copy_in(0, data)
        target.sink.written()

    with collections_held:
        _each(unique.values(), complete)


def _each(targets: Iterable[Target], act: Callable[[Target], None]) -> None:
    """Call `act` with each target; raise an error of its sink as one that names both."""
    target: Target | None = None
    try:
        for target in targets:
            act(target)
    except PenstockError:
        raise
    except Exception as error:
        assert target is not None
        kind = type(target.sink)
        msg = (
            f"{show_path(target.path)} cannot be restored: {kind.__module__}.{kind.__qualname__} "
            f"failed with {said(error)}"
        )
        raise RestoreError(msg) from error


@dataclass(frozen=True, slots=True)
class _Unequal:
    """The objects of the template and of the checkpoint that the restore leaves alone."""

    missing: Sequence[ObjectPath]
    unexpected: Sequence[ObjectPath]
    skipped: Sequence[Difference]
    idle: bool = False
    """Whether template and checkpoint have nothing in common within the selection."""


def _compare(placement: Placement, stored: StoredSelection, *, strict: bool, step: int) -> _Unequal:
    missing, problems = placement.missing, placement.problems
    used = {t.path for t in placement.targets} | set(placement.values)
    reported = {d.path for d in placement.differences} | {*placement.passed_over}
    rest = [path for path in stored.records if path not in used]
    # A difference is reported once, so its paths are not also listed as unexpected.
    unexpected = [path for path in rest if not reported or not _is_below(path, reported)]
    skipped = [] if strict else [d for d in placement.differences if d.skippable]
    forgiven = {sentence for difference in skipped for sentence in difference.sentences}
    advised = _advised(placement.differences)
    problems = [advised.get(text, text) for text in problems if text not in forgiven]
    if skipped:
        # An optimizer state by number has one entry per parameter, in order. The entry of a skipped
        # parameter cannot be removed: the next parameters would get the wrong moments.
        problems += [
            f"{show_path(path)} loads the state of all parameters by their numbers, so it cannot "
            f"be restored while {show_path(skipped[0].path)} is left out: exclude "
            f"{show_path(path)} too"
            for path in placement.numbered
        ]
    if problems or (strict and missing):
        lacking = {path: placement.tied.get(path) for path in missing} if strict else {}
        raise _mismatch(problems, lacking, step, unexpected=unexpected)
    if skipped:
        log.warning(
            "step %d differs from the template in %s, which are left unchanged: %s",
            step,
            counted(len(skipped), "place"),
            listed([f"{show_path(d.path)} ({d.stored} stored, {d.here} here)" for d in skipped]),
        )
    common = used or missing or skipped or placement.passed_over
    idle = not common and bool(stored.every_path)
    return _Unequal(missing, unexpected, skipped, idle=idle)


def _check_common(unequal: _Unequal, step: int) -> None:
    if unequal.idle:
        msg = (
            f"nothing to restore from step {step}: template and checkpoint have nothing in common "
            "within the selection. Check include, exclude and rename, and the keys of the "
            "template."
        )
        raise RestoreMismatchError(msg, [msg])


def _judge(
    templates: TemplatesOfRanks,
    selection: Selection,
    known: Sequence[ObjectPath],
    unequal: _Unequal,
    stored: StoredSelection,
    *,
    step: int,
) -> None:
    """Ask the other ranks about what does not fit this rank's template.

    Raises only if it fits no rank's template. Stored objects that the template lacks are no error;
    the ranks compare them after the restore.

    Raises:
        SelectionError: A pattern matches nothing on any rank.
        RestoreMismatchError: No rank's template has anything in common with the checkpoint.
    """
    patterns = selection.patterns()
    unused = selection.unused(known)
    lacked = set(unequal.unexpected)
    fit = TemplateFit(
        patterns=[pattern.text for pattern in patterns],
        unused=[n for n, pattern in enumerate(patterns) if any(p is pattern for p in unused)],
        idle=unequal.idle,
        stored=len(stored.records),
        extra=[n for n, path in enumerate(stored.records) if path in lacked] if lacked else (),
    )
    judged = templates.judge(fit)
    if judged.unused:
        unmatched = [patterns[number] for number in judged.unused]
        raise SelectionError("; ".join(nothing_for(pattern, known) for pattern in unmatched))
    if judged.idle:
        _check_common(unequal, step)


def warn_of_unexpected(step: int, shown: Sequence[str]) -> None:
    """Warn about the objects of a checkpoint that the template lacks, by their shown paths."""
    if shown:
        log.warning(
            "step %d has %s that the template lacks and that are not restored: %s",
            step,
            counted(len(shown), "object"),
            listed(shown),
        )


def _is_below(path: ObjectPath, roots: Collection[ObjectPath]) -> bool:
    return any(path[:depth] in roots for depth in range(1, len(path) + 1))


def _advised(differences: Iterable[Difference]) -> dict[str, str]:
    """Map each sentence about a difference that has advice to the sentence with the advice."""
    advised = {}
    for each in differences:
        leave = "strict=False leaves it alone" if each.skippable else ""
        advice = "; ".join(filter(None, [each.advice, leave]))
        if advice:
            advised[each.sentences[-1]] = f"{each.sentences[-1]} ({advice})"
    return advised


def _remedy(tied: ObjectPath | None) -> str:
    if tied is None:
        return "strict=False leaves it alone"
    return f"with strict=False it is restored as {show_path(tied)}, the same tensor here"


def _mismatch(
    problems: Sequence[str],
    missing: Mapping[ObjectPath, ObjectPath | None],
    step: int,
    *,
    what: str = "fit the template",
    unexpected: Sequence[ObjectPath] = (),
) -> RestoreMismatchError:
    every = [
        *problems,
        *(
            f"{show_path(p)}: not in the checkpoint ({_remedy(tied)})"
            for p, tied in missing.items()
        ),
    ]
    more = f"\n  ... and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    msg = (
        f"step {step} does not {what} in {counted(len(every), 'place')}; nothing was changed:\n  "
        + "\n  ".join(line[:_LINE_CHARS] for line in every[:_SHOWN])
        + more
    )
    if missing and unexpected:
        msg += (
            f"\nThe checkpoint has {counted(len(unexpected), 'object')} that the template lacks: "
            f"{listed([show_path(p) for p in unexpected])}. If names have changed, pass "
            "rename={'old': 'new'}."
        )
    return RestoreMismatchError(msg, every)


def _finish(placement: Placement, step: int) -> Any:
    if placement.finish is None:
        return None
    try:
        with collections_held:
            return placement.finish()
    except PenstockError:
        raise
    except Exception as error:
        msg = (
            f"step {step}: tensors are restored, but assigning the values failed: "
            f"{said(error)}. The selected objects are undefined now."
        )
        raise RestoreError(msg) from error
