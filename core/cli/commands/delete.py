"""The `penstock delete` and `penstock prune` commands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.abc import absence
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.deletion import check_same
from penstock.core.catalog.notes import NotesOfRun
from penstock.core.catalog.prune import GRACE_S
from penstock.core.catalog.survey import places_of, survey_records, survey_run, uids_named
from penstock.core.cli.app import AsGiven, DryRun, Json, Yes, ask, command, time_of
from penstock.core.cli.commands.ls import free_by_compacting
from penstock.core.cli.job import open_run
from penstock.core.cli.output.render import print_json, print_line, steps_text
from penstock.core.errors import ConfigError, DamagedError, StorageError
from penstock.core.format.records import data_prefix, parse_commit_name
from penstock.core.plugins.registry import default_registry
from penstock.core.restore.inspector import Inspector
from penstock.core.units import SECONDS, counted, size_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.catalog.prune import PruneReport
    from penstock.core.catalog.survey import Look


@dataclass(frozen=True, slots=True)
class DeletedStep:
    """A checkpoint to delete.

    Attributes:
        step: The step.
        generations: The number of generations, each with a commit record.
        uids: The uids that these records name.
        size_bytes: The stored bytes of these uids.
    """

    step: int
    generations: int
    uids: tuple[str, ...]
    size_bytes: int


@command("delete")
def delete(
    url: AsGiven,
    steps: Annotated[list[int], typer.Argument(metavar="STEP", min=0, help="Which checkpoints.")],
    *,
    dry_run: DryRun = False,
    yes: Yes = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Delete even pinned checkpoints, those whose tags cannot be read, and the last "
            "whole checkpoint.",
        ),
    ] = False,
    tier: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Delete only from this tier: fast, durable.", show_default="all"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Delete checkpoints for good, and show how much was freed. Asks first.

    If one of the steps is missing, none is deleted. Data that another checkpoint uses stays.

    Examples:
      penstock delete runs/gpt 100 200
      penstock delete runs/gpt 100 --dry-run
      penstock delete runs/gpt 100 --yes
    """
    chosen = sorted(set(steps))
    with open_run(url) as whole:
        backend = whole if tier is None else _tier(whole, tier)
        others = [one.backend for one in whole.tiers if one.name != tier]
        elsewhere = [] if tier is None else others
        look = Inspector(default_registry()).is_whole
        catalog = Catalog(backend, look=look)
        entries = catalog.entries()
        named = {step: _named_by(backend, catalog, step, entries.get(step)) for step in chosen}
        doomed = [_deleted_step(backend, step, uids) for step, uids in named.items()]
        left = [step for step in entries if step not in chosen]
        # First: while hosts are absent, no checkpoint looks whole.
        if not dry_run and (why := absence(backend)):
            raise StorageError(why)
        if not force:
            _check_pins(backend, catalog, chosen)
        if tier is None:
            check_same(whole.tiers, chosen)
        others_have = (_has_whole(other, look) for other in elsewhere)
        # Whole, not just listed: if the others have lost data, this may be the last good step.
        if not (force or catalog.has_whole(left) or any(others_have)):
            msg = (
                f"no whole checkpoint would be left under {backend.url} without "
                f"{steps_text(chosen)}; pass --force to delete anyway"
            )
            raise ConfigError(msg)
        uids = [uid for one in doomed for uid in one.uids]
        if dry_run:
            freed = data_bytes(backend, _unneeded(backend, chosen))
        else:
            total = sum(one.size_bytes for one in doomed)
            ask(
                f"Delete {steps_text(chosen)} ({size_text(total)}) of {backend.url}",
                yes=yes,
            )
            uids += _lent(backend, chosen)
            before = data_bytes(backend, uids)
            for step in chosen:
                # With the uids that the user confirmed: a save may have replaced one since.
                catalog.delete(step, named[step])
            freed = before - data_bytes(backend, uids)
        borrowers = _borrowers(backend, {u for one in doomed for u in one.uids}, chosen)
        if as_json:
            print_json(
                {
                    "url": backend.url,
                    "dry_run": dry_run,
                    "deleted": [asdict(one) for one in doomed],
                    "bytes_freed": freed,
                    "remaining": left,
                }
            )
        else:
            _print(doomed, left, freed, dry_run=dry_run)
            _print_kept(doomed, freed, borrowers, url)


def _check_pins(backend: Backend, catalog: Catalog, chosen: Collection[int]) -> None:
    """Refuse to delete a pinned checkpoint, or one with an unreadable note, which may be a pin.

    Raises:
        ConfigError: One of the steps is pinned, or may be; nothing was deleted.
    """
    listed = NotesOfRun(places_of(backend))
    for step, record in catalog.records(chosen):
        if isinstance(record, DamagedError):
            continue
        notes = listed.read(record, warn=False)
        if notes.tags or notes.damaged:
            why = f"is pinned ({' '.join(notes.tags)})" if notes.tags else "may be pinned"
            damage = "".join(f": {error}" for error in notes.damaged.values())
            msg = f"step {step} {why}{damage}; pass --force to delete it anyway"
            raise ConfigError(msg)


def _tier(backend: Backend, name: str) -> Backend:
    for tier in backend.tiers:
        if tier.name == name:
            return tier.backend
    names = ", ".join(tier.name for tier in backend.tiers)
    there = f"it has {names}" if names else "it has no tiers"
    msg = f"--tier: {backend.url} has no tier {name!r}; {there}"
    raise ConfigError(msg)


def _has_whole(backend: Backend, look: Look) -> bool:
    catalog = Catalog(backend, look=look)
    return catalog.has_whole(catalog.steps())


def data_bytes(backend: Backend, uids: Iterable[str]) -> int:
    """Return the stored bytes of these uids."""
    return sum(blob.size_bytes for uid in set(uids) for blob in backend.list(data_prefix(uid)))


def _named_by(
    backend: Backend, catalog: Catalog, step: int, names: Sequence[str] | None
) -> Mapping[str, str | None]:
    if names is None:
        catalog.record(step)  # raises, and its message lists the steps that exist
        names = catalog.entries()[step]  # no error: the step was committed after the listing
    return uids_named(backend, names)


def _deleted_step(backend: Backend, step: int, named: Mapping[str, str | None]) -> DeletedStep:
    uids = [uid for uid in named.values() if uid]
    return DeletedStep(step, len(named), tuple(uids), data_bytes(backend, uids))


def _unneeded(backend: Backend, chosen: Collection[int]) -> set[str]:
    """Return the uids whose data would be deleted with the chosen steps.

    Empty if a commit record of another step is unreadable, since it may need any of them.
    """
    survey = survey_run(backend)
    if any((parse_commit_name(name) or (-1,))[0] not in chosen for name in survey.unreadable):
        return set()
    before = survey.used
    survey.records = {n: r for n, r in survey.records.items() if r.step not in chosen}
    return before - survey.needed


def _lent(backend: Backend, chosen: Collection[int]) -> list[str]:
    """Return the uids from which the chosen steps borrow."""
    records = survey_records(backend).records.values()
    return [uid for record in records if record.step in chosen for uid in record.references]


def _borrowers(backend: Backend, uids: Collection[str], chosen: Collection[int]) -> list[int]:
    """Return the other steps that borrow blobs of these saves, ascending."""
    records = survey_records(backend).records.values()
    found = {r.step for r in records if not {*r.references}.isdisjoint(uids)}
    return sorted(found.difference(chosen))


def _print(
    doomed: Sequence[DeletedStep], left: Sequence[int], freed: int, *, dry_run: bool
) -> None:
    verb = "would be deleted" if dry_run else "deleted"
    for one in doomed:
        several = f", {one.generations} generations" if one.generations > 1 else ""
        print_line(f"step {one.step} {verb}: {size_text(one.size_bytes)}{several}")
    print_line(f"{size_text(freed)} {'would be ' if dry_run else ''}freed; {_left(left)}")


def _print_kept(
    doomed: Sequence[DeletedStep], freed: int, borrowers: Sequence[int], url: str
) -> None:
    """Print why less was freed than the deleted steps had, and how to free the rest."""
    if borrowers:
        need = "needs" if len(borrowers) == 1 else "need"
        print_line(
            f"{steps_text(borrowers)} {need} the data that stays; {free_by_compacting(url)}",
            style="yellow",
        )
    elif sum(one.size_bytes for one in doomed) > freed or any(
        len(one.uids) < one.generations for one in doomed
    ):
        print_line(
            "some data stays, since another commit record may need it, or a deleted one was "
            "unreadable; `penstock prune` deletes leftovers"
        )


def _left(steps: Sequence[int]) -> str:
    if not steps:
        return "no checkpoint is left"
    return f"{len(steps)} checkpoint{'s are' if len(steps) > 1 else ' is'} left"


@command("prune")
def prune(
    url: AsGiven,
    *,
    dry_run: DryRun = False,
    grace_s: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="TIME",
            parser=time_of,
            help="Keep younger data: 90s, 30min, 24h, 2d. Less than 24h asks first.",
            show_default="24h",
        ),
    ] = GRACE_S,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also delete saves that lack only their commit record: those that broke off right "
            "before their commit, and all data of a run without commit records.",
        ),
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> bool:
    """Delete the data that crashed saves left behind, and show how much was freed.

    Checkpoints are never touched. If a commit record is unreadable, deletes nothing and exits with
    1, since that checkpoint may need any of the data. Without --all, does the same if the run has
    old data but no commit record, since the run may be a copy in flight. With --all, asks, and then
    deletes the data of such a run if it is older than --grace.

    Examples:
      penstock prune runs/gpt --dry-run
      penstock prune runs/gpt
      penstock prune runs/gpt --grace 1h
    """
    with open_run(url) as backend:
        if why := absence(backend):
            raise StorageError(why)
        catalog = Catalog(backend, look=Inspector(default_registry()).is_whole)
        report = catalog.prune(grace_s=grace_s, dry_run=True, everything=everything)
        # Overwritten generations are deleted too, but the report does not count their bytes: those
        # are measured here, before and after.
        replaced = {uid for uid in uids_named(backend, report.superseded).values() if uid}
        before = data_bytes(backend, replaced)
        superseded_bytes = before
        if not dry_run and not report.refused:
            _ask_to_prune(backend, report, grace_s, everything=everything, yes=yes)
            report = catalog.prune(grace_s=grace_s, everything=everything)
            superseded_bytes = before - data_bytes(backend, replaced)
        survey = survey_run(backend)
        reported = {*report.uids, *report.unrecorded}
        young = sorted(survey.data.keys() - survey.needed - reported)
        found = {
            "url": backend.url,
            "grace_s": grace_s,
            **asdict(report),
            "superseded_bytes": superseded_bytes,
            "younger": young,
            "younger_bytes": data_bytes(backend, young),
        }
    if as_json:
        print_json(found)
        return not report.refused
    _print_pruned(report, superseded_bytes, grace_s)
    if young and not report.refused:
        size = size_text(found["younger_bytes"])
        print_line(
            f"kept, since a save may be under way: {counted(len(young), 'attempt')} younger "
            f"than {_time_text(grace_s)} ({size})"
        )
    return not report.refused


def _ask_to_prune(
    backend: Backend, report: PruneReport, grace_s: float, *, everything: bool, yes: bool
) -> None:
    if not report.uids:
        return
    if everything:
        attempts = counted(len(report.uids), "attempt")
        question = (
            f"The data of {attempts} will be deleted. If the run is a copy in flight, their commit "
            f"records may still arrive. Prune {backend.url}"
        )
        ask(question, yes=yes)
    elif grace_s < GRACE_S:
        question = (
            f"A save under way that has not written for {_time_text(grace_s)} would lose "
            f"its data and fail. Prune {backend.url}"
        )
        ask(question, yes=yes)


def _print_pruned(report: PruneReport, superseded_bytes: int, grace_s: float) -> None:
    if report.refused:
        no_record = bool(report.unrecorded)
        why = "while there is no commit record" if no_record else "while a record cannot be read"
        print_line(f"nothing is deleted {why}:", style="bold red")
        for problem in report.refused:
            print_line(f"  {problem}")
        if not no_record:
            print_line("delete that checkpoint, or recover its record, and prune again")
        return
    if report.unrecorded:
        print_line(
            f"kept, since only the commit record is missing and may still arrive: "
            f"{counted(len(report.unrecorded), 'attempt')}; `prune` deletes this data after a "
            "later checkpoint, or with --all"
        )
    if not report.uids and not report.superseded:
        print_line(f"nothing to prune: no leftovers older than {_time_text(grace_s)}")
        return
    for uid in report.uids:
        print_line(f"  data/{uid}")
    for name in report.superseded:
        print_line(f"  {name} (overwritten)")
    verb = "would be freed" if report.dry_run else "freed"
    size = size_text(report.size_bytes + superseded_bytes)
    what = []
    if report.uids:
        what.append(f"{counted(len(report.uids), 'attempt')} with {counted(report.names, 'file')}")
    if report.superseded:
        what.append(counted(len(report.superseded), "overwritten generation"))
    print_line(f"{size} {verb}: {', '.join(what)}")


def _time_text(seconds: float) -> str:
    for unit in ("d", "h", "min"):
        # One day stays `24 h`, as in the option's default and its documentation.
        if seconds >= SECONDS[unit] * (2 if unit == "d" else 1) and not seconds % SECONDS[unit]:
            return f"{seconds / SECONDS[unit]:g} {unit}"
    return f"{seconds:g} s"
