"""The `penstock ls` command.

Tested in `tests/core/cli/test_cli.py`.
"""

from __future__ import annotations

import json
import shlex
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.abc import host_roots
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.lender_report import (
    borrowed_bytes,
    borrowers_of_deleted_saves,
    find_lenders,
)
from penstock.core.catalog.notes import NotesOfRun
from penstock.core.catalog.survey import data_by_uid, find_unrecorded, has_files
from penstock.core.cli.app import AsGiven, Json, command
from penstock.core.cli.job import open_run
from penstock.core.cli.output.render import (
    Cell,
    Column,
    age_text,
    metadata_text,
    print_json,
    print_line,
    print_table,
    ratio_text,
    state_cell,
    steps_text,
    value_text,
    visible,
    warn,
)
from penstock.core.cli.output.runs_on_disk import named_root, run_around, runs_below, tiers_quiet
from penstock.core.cli.output.shares import (
    Spread,
    hosts_json,
    hosts_seen,
    print_hosts,
    spread_cell,
    spreads_of,
)
from penstock.core.errors import ConfigError, DamagedError, StorageError
from penstock.core.format.records import DATA_PREFIX
from penstock.core.format.segment import log_prefix
from penstock.core.log.segments import last_step, logs_of
from penstock.core.suggest import nearest
from penstock.core.tiers.whereabouts import pending
from penstock.core.types import show_value
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.core.abc import Backend
    from penstock.core.catalog.notes import Notes
    from penstock.core.format.records import CommitRecord
    from penstock.core.reporting.reports import LendingSave

    Metadata = Mapping[str, Any]

_RUNS_SHOWN = 20
_KEEP_USUAL, _KEEP_WANTED = 6, 9  # of metric columns; those that the user names stay longest

_SHOWN = 3  # the metric columns that fit 80 cells with step, age, sizes and state
_LONGEST = 14  # cells of a title; a longer key stays in the METADATA column


@dataclass(frozen=True, slots=True)
class Listed:
    """One step of a run: its newest commit record, or the reason why that is unreadable.

    Attributes:
        step: The step.
        record: The commit record; None if it is unreadable.
        error: The reason why the record is unreadable.
        tiers: For a run in tiers, the names of the tiers that have the record.
        waiting: Whether a tier still has to copy the checkpoint to the next one.
        notes: The metadata and tags, from the commit record and from the checkpoint's notes; None
            without a record.
        bytes_logged: The bytes of the checkpoint's log.
        incomplete: Whether some files of the checkpoint are on hosts that are not part of this job.
        spread: Which host holds which files, if the roots of several hosts are joined.
    """

    step: int
    record: CommitRecord | None
    error: str | None
    tiers: tuple[str, ...] = ()
    waiting: bool = False
    notes: Notes | None = None
    bytes_logged: int = 0
    incomplete: bool = False
    spread: Spread | None = None


@command("ls")
def ls(
    url: AsGiven,
    *,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Print all of each checkpoint's metadata.")
    ] = False,
    metrics: Annotated[
        str,
        typer.Option(
            metavar="KEY,...",
            help="Columns for these keys of metadata; `a.b` for a nested key.",
            show_default="up to three that most checkpoints have",
        ),
    ] = "",
    last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the N newest steps.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run: step, generation, age, sizes, ratio, state, metrics.

    The state is `ok`, `damaged` if the commit record cannot be read, or `incomplete` if some files
    are only on other hosts; `penstock verify` checks the data. Reads only small records of each
    checkpoint, and the log of the newest.

    STORED is the size of the blobs, including the gaps that direct I/O needs; RATIO is RAW over
    STORED. `penstock show` counts the objects without gaps.

    Examples:
      penstock ls runs/gpt
      penstock ls runs/gpt --last 5 --metrics loss,eval.mmlu
      penstock ls runs/gpt --metadata
      penstock ls runs/gpt --json |
        jq '.checkpoints[] | select(.state == "ok") | .step'
    """
    wanted = tuple(filter(None, metrics.split(",")))
    with tiers_quiet(), open_run(url) as backend:
        tiered = bool(backend.tiers)
        listed, places, silent = list_places(backend)
        shown, seen = with_details(listed[-(last or 0) :], backend, places), hosts_seen(backend)
        waiting, logs = _unrecorded(places, listed)
        shown = [
            replace(one, bytes_logged=logs.get(one.record.uid if one.record else "", 0))
            for one in shown
        ]
        records = [one.record for one in listed if one.record is not None]
        kept = kept_for_borrowers(backend, records)
        check_metrics(wanted, [one.notes.metadata for one in shown if one.notes])
        newest = records[-1] if shown and shown[-1].record in records[-1:] else None
        # The fastest place has the log.
        logged, log_error = (None, "") if newest is None else _logged(places[0], newest)
        if as_json:
            found: dict[str, Any] = {"url": backend.url, "logged": logged and logged[-1]}
            found |= hosts_json(seen)
            found["checkpoints"] = [_as_json(one, tiered=tiered) for one in shown]
            found["unrecorded"] = waiting
            found["kept"] = [
                {**asdict(one.lender), "bytes": one.size_bytes, "borrowers": one.borrowers}
                for one in kept
            ]
            print_json({**found, "silent": silent} if tiered else found)
            return
        for name, why in silent.items():  # on standard error: the table may go into a pipe
            warn(f"tier {name} does not answer: {why}")
        if not listed:
            where = "in the tiers that answer," if silent else "under"
            print_line(f"no checkpoints {where} {backend.url}")
            print_hosts(seen)
            _print_unrecorded(waiting)
            _print_runs_near(named_root(backend))
            return
    print_table([*columns_of(shown, records, wanted, tiered=tiered)], shown)
    print_hosts(seen)
    for one in shown:
        if one.error:
            print_line(f"step {one.step}: {one.error}", style="red")
    if newest is not None and logged is not None:
        more = counted(len(logged), "step")
        print_line(
            f"step {logged[-1]} is logged: a restore loads step {newest.step} and replays {more}"
        )
    elif log_error:
        print_line(log_error, style="red")
    _print_unrecorded(waiting)
    _print_kept(kept, url)
    if metadata:
        for one in shown:
            _print_metadata(one)


@dataclass(frozen=True, slots=True)
class Kept:
    """The blobs of a deleted checkpoint that others borrow.

    Attributes:
        lender: The deleted checkpoint.
        size_bytes: The bytes of these blobs.
        borrowers: The steps that borrow them, ascending.
    """

    lender: LendingSave
    size_bytes: int
    borrowers: tuple[int, ...]


def kept_for_borrowers(backend: Backend, records: Sequence[CommitRecord]) -> list[Kept]:
    """Return the kept blobs of deleted checkpoints by step; those of unknown steps come last."""
    lent = borrowers_of_deleted_saves(records)
    lenders = find_lenders(records, lent)
    sizes = borrowed_bytes(backend, records, lent)
    kept = [
        Kept(lenders[uid], sizes[uid], tuple(sorted({record.step for record in borrowers})))
        for uid, borrowers in lent.items()
    ]
    return sorted(kept, key=lambda one: (one.lender.step is None, one.lender.step, one.lender.uid))


def _print_kept(kept: Sequence[Kept], url: str) -> None:
    if not kept:
        return
    steps = sorted({step for one in kept for step in one.borrowers})
    several, need = len(kept) > 1, "need" if steps[1:] else "needs"
    print_line(
        f"{size_text(sum(one.size_bytes for one in kept))} of {len(kept)} deleted or replaced "
        f"checkpoint{'s are' if several else ' is'} kept, since {steps_text(steps)} {need} "
        f"{'them' if several else 'it'}; {free_by_compacting(url)}",
        style="yellow",
    )


def free_by_compacting(url: str) -> str:
    """Return advice on how to free kept data; `url` is as the user gave it."""
    # Does not promise that compacting frees space: independent checkpoints may take more than the
    # kept data, most of all if `share` has stored a chunk once for many steps.
    return f"`penstock compact {shlex.quote(url)} --dry-run` shows the run's size after compacting"


def columns_of(
    listed: Sequence[Listed],
    records: Sequence[CommitRecord],
    wanted: Sequence[str] = (),
    *,
    tiered: bool,
) -> Iterator[Column[Listed]]:
    """Yield the columns for these checkpoints; columns on chains and tiers only if needed.

    Args:
        listed: The checkpoints.
        records: The readable commit records of the whole run.
        wanted: The keys of metadata that get a column; empty: the usual metrics.
        tiered: Whether the run is in tiers.
    """
    now_s = time.time()
    lenders = find_lenders(records, {r.base.uid for r in records if r.base is not None})
    noted = [one.notes for one in listed if one.notes]
    metrics = wanted or usual_metrics([notes.metadata for notes in noted])
    yield Column("STEP", lambda one: str(one.step), right=True)
    yield of_record("GEN", 1, lambda record: str(record.generation))
    if lenders:
        yield of_record("BASE", 8, partial(_base_cell, lenders))
    yield of_record("AGE", 7, lambda record: age_text(now_s - created_s(record)))
    yield of_record("OBJECTS", 4, lambda record: str(record.objects))
    yield of_record("RAW", 5, lambda record: size_text(record.bytes_raw))
    yield of_record("STORED", 6, lambda record: size_text(record.bytes_stored))
    if lenders:  # the size of all blobs that a checkpoint needs, own and borrowed
        yield of_record("NEEDS", 3, lambda record: size_text(record.bytes_needed))
    yield of_record("RATIO", 2, lambda record: ratio_text(record.bytes_raw, record.bytes_stored))
    if any(one.bytes_logged for one in listed):
        yield Column("LOG", lambda one: size_text(one.bytes_logged), right=True, keep=5)
    yield Column("STATE", lambda one: state_cell(_state_of(one)))
    if tiered:
        yield Column("TIERS", _tiers_text, keep=6)
    if any(one.spread for one in listed):
        yield Column("HOSTS", lambda one: spread_cell(one.spread), keep=6)
    if any(notes.tags for notes in noted):
        yield Column("TAGS", lambda one: " ".join(one.notes.tags) if one.notes else "", keep=4)
    for name in metrics:
        keep = _KEEP_WANTED if wanted else _KEEP_USUAL
        yield Column(name, partial(_metric_text, name), right=True, keep=keep)
    # A user who names metrics did not ask for the rest of the metadata.
    if not wanted and (not metrics or any(notes.metadata.keys() - metrics for notes in noted)):
        yield Column("METADATA", partial(_rest_text, metrics), keep=3, flexible=True)


def of_record(title: str, keep: int, text: Callable[[CommitRecord], str | Cell]) -> Column[Listed]:
    """Return a column on commit records; its cell is `-` if the record is unreadable."""
    return Column(title, lambda one: text(one.record) if one.record else "-", right=True, keep=keep)


def _unrecorded(
    backends: Sequence[Backend], listed: Sequence[Listed]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return two mappings by uid: steps of saves that lack only a commit record; bytes of logs."""
    records = [one.record for one in listed if one.record is not None]
    steps = [one.step for one in listed]
    found: dict[str, int] = {}
    logs: dict[str, int] = {}
    for backend in backends:
        data = data_by_uid(backend)
        for uid, blobs in data.items():
            size = sum(b.size_bytes for b in blobs if b.name.startswith(log_prefix(uid)))
            logs[uid] = max(size, logs.get(uid, 0))
        found |= find_unrecorded(backend, records, steps, data)
    return found, logs


def _logged(backend: Backend, newest: CommitRecord) -> tuple[Sequence[int] | None, str]:
    """Return the logged steps that a restore replays, or None; and the error of a bad log."""
    try:
        logs = logs_of(backend, newest.uid)
        last = last_step(logs)
    except (DamagedError, StorageError) as error:
        return None, f"the log of step {newest.step} cannot be read: {error}"
    return None if last is None else [s for s in logs[0].steps if s <= last], ""


def _print_unrecorded(waiting: dict[str, int]) -> None:
    if not waiting:
        return
    lack = "lacks" if len(waiting) == 1 else "lack"
    print_line(
        f"{counted(len(waiting), 'attempt')} to save ({steps_text(sorted({*waiting.values()}))}) "
        f"{lack} only the commit record: the save is under way, or it broke off at its end, or the "
        "run was copied without its folder `commits`, whose files must then be copied too",
        style="yellow",
    )


def _print_runs_near(folder: Path | None) -> None:
    around = None if folder is None else run_around(folder)
    if around is not None:
        print_line(f"this is a folder inside the run {around}: list that run")
        return
    found = [] if folder is None else runs_below(folder)
    if found:
        print_line("these folders below it hold runs; list one of them:")
    for root in found[:_RUNS_SHOWN]:
        print_line(f"  {root}")
    if len(found) > _RUNS_SHOWN:
        print_line(f"  and {len(found) - _RUNS_SHOWN} more")


def _print_metadata(one: Listed) -> None:
    if one.notes is None or not one.notes.metadata:
        return
    print_line("")
    print_line(f"step {one.step}")
    for key, value in one.notes.metadata.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        print_line(f"  {key}: {text}")


def list_run(backend: Backend) -> list[Listed]:
    """Return every step of a run, ascending, including steps with a damaged record."""
    sizes = None  # of all files: one listing for all steps
    if host_roots(backend):
        sizes = {info.name: info.size_bytes for info in backend.list(DATA_PREFIX)}
    return [
        Listed(step, None, str(found))
        if isinstance(found, DamagedError)
        else Listed(
            step, found, None, incomplete=not (sizes is None or has_files(backend, found, sizes))
        )
        for step, found in Catalog(backend).records()
    ]


def with_details(
    listed: Sequence[Listed], backend: Backend, places: Sequence[Backend]
) -> list[Listed]:
    """Add the notes in these places, and which host holds which files."""
    notes = NotesOfRun(places)
    spreads = spreads_of(backend, [one.record for one in listed if one.record is not None])
    return [
        replace(one, notes=notes.read(one.record), spread=spreads.get(one.record.uid))
        if one.record is not None
        else one
        for one in listed
    ]


def list_places(backend: Backend) -> tuple[list[Listed], list[Backend], dict[str, str]]:
    """List a run in all tiers that answer; a run without tiers is one place.

    Returns:
        Every step, ascending; the tiers that answer, the fastest first; and by name of each other
        tier, why it does not answer.

    Raises:
        StorageError: No tier answers.
    """
    if not backend.tiers:
        return list_run(backend), [backend], {}
    found: dict[int, Listed] = {}
    places: list[Backend] = []
    silent: dict[str, str] = {}
    for tier in backend.tiers:
        try:
            listed = list_run(tier.backend)
            waiting = {record.uid for record in pending(tier.backend)}
        except StorageError as error:
            silent[tier.name] = str(error)
            continue
        places.append(tier.backend)
        for one in listed:
            before = found.get(one.step)
            if one.record is None or one.incomplete:  # the next tier may have it whole
                found.setdefault(one.step, one)
            elif (
                before is None
                or before.record is None
                or before.incomplete
                or _is_newer(one.record, before.record)
            ):
                marked = one.record.uid in waiting
                found[one.step] = replace(one, tiers=(tier.name,), waiting=marked)
            elif before.record.uid == one.record.uid:
                marked = before.waiting or one.record.uid in waiting
                found[one.step] = replace(before, tiers=(*before.tiers, tier.name), waiting=marked)
    if not places:
        msg = f"no tier answers: {'; '.join(f'{name}: {why}' for name, why in silent.items())}"
        raise StorageError(msg)
    return [found[step] for step in sorted(found)], places, silent


def _state_of(one: Listed) -> str:
    if one.record is None:
        return "damaged"
    return "incomplete" if one.incomplete else "ok"


def _is_newer(one: CommitRecord, other: CommitRecord) -> bool:
    return one.uid != other.uid and one.generation > other.generation


def _as_json(one: Listed, *, tiered: bool) -> dict[str, Any]:
    if one.record is None or one.notes is None:
        return {"step": one.step, "state": "damaged", "error": one.error}
    more: dict[str, Any] = {"tiers": list(one.tiers), "waiting": one.waiting} if tiered else {}
    more["bytes_logged"] = one.bytes_logged
    more |= hosts_json(None, one.spread)
    return {"step": one.step, "state": _state_of(one), **record_json(one.record, one.notes), **more}


def record_json(record: CommitRecord, notes: Notes) -> dict[str, Any]:
    """Return the JSON fields of a commit record and of its notes."""
    return {
        "generation": record.generation,
        "uid": record.uid,
        "created": record.created,
        "world_size": record.world_size,
        "objects": record.objects,
        "bytes_raw": record.bytes_raw,
        "bytes_stored": record.bytes_stored,
        "codecs": record.codecs,
        "providers": record.providers,
        "base": None if record.base is None else asdict(record.base),
        "references": list(record.references),
        "bytes_borrowed": record.bytes_borrowed,
        "metadata": notes.metadata,
        "tags": list(notes.tags),
        "damaged_notes": [str(error) for error in notes.damaged.values()],
        "penstock": record.penstock,
        "engine": record.engine,
    }


def _tiers_text(one: Listed) -> str:
    return "+".join(one.tiers) + (" (to copy)" if one.waiting else "")


def _base_cell(lenders: Mapping[str, LendingSave], record: CommitRecord) -> str | Cell:
    """Return the step of the base, after the state of the base if that is not `ok`."""
    base = record.base
    if base is None:
        return "none"
    state = lenders[base.uid].state
    return str(base.step) if state == "ok" else Cell(f"{state} {base.step}", "yellow")


def created_s(record: CommitRecord) -> float:
    """Return the time of a commit, in seconds since 1970."""
    return datetime.fromisoformat(record.created).timestamp()


def _metric_text(name: str, one: Listed) -> str:
    value = None if one.notes is None else metric_of(one.notes.metadata, name)
    return "-" if value is None else value_text(value)


def _rest_text(metrics: Sequence[str], one: Listed) -> str:
    metadata = one.notes.metadata if one.notes else {}
    return metadata_text({k: v for k, v in metadata.items() if k not in metrics})


def usual_metrics(metadata: Sequence[Metadata]) -> list[str]:
    """Return the few keys that get a column: numbers that most of the checkpoints have.

    A number that never changes, such as a seed, gets no column.
    """
    numbers: dict[str, list[float]] = defaultdict(list)
    for table in metadata:
        for key, value in table.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[key].append(value)
    usual = [
        key
        for key, values in numbers.items()
        if 2 * len(values) > len(metadata) and len(visible(key)) <= _LONGEST
        if len(values) == 1 or len(set(values)) > 1
    ]
    return usual[:_SHOWN]


def check_metrics(wanted: Sequence[str], metadata: Sequence[Metadata]) -> None:
    """Refuse a metric that no checkpoint has, unless there are no checkpoints.

    Raises:
        ConfigError: No checkpoint has one of the metrics.
    """
    for name in wanted:
        if metadata and all(metric_of(one, name) is None for one in metadata):
            keys = sorted({key for one in metadata for key in one})
            msg = f"no checkpoint shown has {show_value(name)} in its metadata{nearest(name, keys)}"
            raise ConfigError(msg)


def metric_of(metadata: Metadata, name: str) -> Any:
    """Return the value of a metric; None if `metadata` lacks it.

    `eval.mmlu` is a key of that name, else the key `mmlu` of the mapping `eval`.
    """
    if name in metadata:
        return metadata[name]
    outer, dot, inner = name.partition(".")
    below = metadata.get(outer)
    return metric_of(below, inner) if dot and isinstance(below, dict) else None
