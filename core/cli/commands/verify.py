"""The `penstock verify` command.

Tested in `tests/core/cli/test_cli.py`.
"""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.prune import GRACE_S
from penstock.core.cli.app import AsGiven, Json, Step, command
from penstock.core.cli.job import answers, open_run
from penstock.core.cli.output.render import print_json, print_line, steps_text
from penstock.core.concurrency.workers import Workers, default_workers
from penstock.core.errors import CheckpointGoneError, CheckpointNotFoundError, DamagedError
from penstock.core.format.records import blob_uid
from penstock.core.log.inventory import noting
from penstock.core.log.verification import with_log
from penstock.core.pipeline.loader import Loader
from penstock.core.reporting.progress import ProgressBar
from penstock.core.reporting.reports import Damage, VerifyReport
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.suggest import listed
from penstock.core.tiers.drains import Drains
from penstock.core.tiers.host_orders import HostOrders
from penstock.core.tiers.repairs import verify_and_repair
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.reporting.reports import LendingSave, Progress, Repair
    from penstock.core.tiers.repairs import TierRepairs

_BLOB = re.compile(r"data/[0-9a-f]{32}/blobs/[A-Za-z0-9._-]*[A-Za-z0-9]")
_TIER = re.compile(r"in tier [^ ]+: ")
_SHOWN = 5
# A host's report must fit in a value of the job's store.
_LONGEST, _MOST_STEPS = 1000, 50


@command("verify")
def verify(
    url: AsGiven,
    *,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Verify every checkpoint.")] = False,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep/--quick",
            help="Read and decode every frame, or check only the manifest's digests and sizes.",
        ),
    ] = True,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Replace damaged copies, in tiers and on hosts, from a good one."
        ),
    ] = False,
    as_json: Json = False,
) -> bool:
    """Compare every checksum of a checkpoint; exit with 1 if anything is damaged.

    Also exits with 1 if a codec is not installed, since then not everything can be decoded. Lists
    all damage by the path of the object or the name of the record. With tiers, verifies the copy in
    each tier. Under torchrun, also verifies the files on each host, and --repair replaces them
    there. With --all, exits with 1 if a checkpoint is incomplete, too. With --repair, repaired
    damage does not count.

    Examples:
      penstock verify runs/gpt
      penstock verify runs/gpt --all --quick
      penstock verify penstock.toml --all --repair
      penstock verify runs/gpt --step 300 --json |
        jq -r '.reports[].damaged[].what'
    """
    if every and step is not None:
        msg = "--all verifies every step; leave out --step"
        raise typer.BadParameter(msg)
    reports: list[VerifyReport] = []
    light = not (deep or repair)
    damage_here = partial(_damage_here, step=step, every=every, deep=deep, repair=repair)
    with open_run(url, light=light, at_each_host=damage_here) as backend:
        copies = [{"host": h, "rank": rank, **found} for h, rank, found in answers()]
        with closing(Workers(default_workers())) as workers:
            loader, repairs = Loader(backend, workers), None
            if repair and (backend.tiers or not copies):  # hosts alone have replaced their files
                stuck_s = workers.timing.stuck_s
                drains = Drains(backend.tiers, workers=workers, grace_s=GRACE_S, stuck_s=stuck_s)
                repairs = drains.repairs
            for number in _steps(backend, step, every=every):
                bar = ProgressBar(f"step {number}", every_s=None, transient=True)
                try:
                    report = _verified(backend, number, loader, repairs, deep=deep, on_progress=bar)
                except CheckpointNotFoundError:
                    if not every:
                        raise
                    continue  # deleted after the listing
                if not as_json:
                    _print(report, backend.url, listed_uids=_damaged_uids(reports))
                reports.append(report)
        incomplete = Catalog(backend).incomplete_from(0) if every else {}
        ok = not incomplete and all(report.ok and not report.not_decoded for report in reports)
        ok = ok and not any(one["damaged"] for one in copies)
        if as_json:
            found = [asdict(report) for report in reports]
            missing = {"copies": copies, "incomplete": incomplete}
            print_json({"url": backend.url, "ok": ok, "reports": found, **missing})
            return ok
        _print_copies(copies)
        if every:
            bad = sum(not report.ok for report in reports)
            part = sum(report.ok and bool(report.not_decoded) for report in reports)
            for link, steps in _links(reports).items():
                need = "need" if steps[1:] else "needs"
                print_line(f"{link} is damaged: {steps_text(steps)} {need} it", style="red")
            _print_incomplete(incomplete)
            others = f", {part} not decoded" if part else ""
            others += f", {len(incomplete)} incomplete" if incomplete else ""
            print_line(f"{counted(len(reports), 'checkpoint')} verified, {bad} damaged{others}")
    return ok


def _steps(backend: Backend, step: int | None, *, every: bool) -> Sequence[int]:
    if step is not None:
        return [step]
    catalog = Catalog(backend)
    steps = catalog.steps()
    if every:
        return steps
    return steps[-1:] or [catalog.require_latest()]  # raises, and says why


def _damage_here(
    backend: Backend, *, step: int | None, every: bool, deep: bool, repair: bool
) -> dict[str, dict[int, str]]:
    """Verify the files on this host; return the damage by step, and what was repaired."""
    damaged: dict[int, str] = {}
    repaired: dict[int, str] = {}
    catalog = Catalog(backend)
    with (
        closing(Workers(default_workers())) as workers,
        closing(HostOrders(backend, workers)) as orders,
    ):
        for number, record in catalog.records(_steps(backend, step, every=every)):
            if isinstance(record, DamagedError):
                continue  # rank 0 reports it
            try:
                found = orders.damaged(record, deep=deep)
                if found and repair:
                    orders.repair(record, found)
                    orders.settle()
                    before, found = found, orders.damaged(record, found)
                    repaired |= _first(number, before.keys() - found.keys())
                damaged |= _first(number, found.values())
            except CheckpointGoneError:
                continue
            except DamagedError as error:
                damaged |= _first(number, [str(error)])
    return {"damaged": _few(damaged), "repaired": _few(repaired)}


def _first(step: int, lines: Collection[str]) -> dict[int, str]:
    """Return one line on a step, if there are any."""
    first, more = next(iter(lines), ""), len(lines) - 1
    return {step: first[:_LONGEST] + (f" and {more} more" if more > 0 else "")} if lines else {}


def _few(found: Mapping[int, str]) -> dict[int, str]:
    return dict(islice(found.items(), _MOST_STEPS))


def _print_incomplete(incomplete: Mapping[int, str]) -> None:
    for why in incomplete.values():
        print_line(why, style="red")


def _print_copies(copies: Sequence[Mapping[str, Any]]) -> None:
    for one in copies:
        for why in one["damaged"].values():
            print_line(f"host {one['host']} of rank {one['rank']}: {why}", style="red")
        for what in one["repaired"].values():
            print_line(f"host {one['host']} of rank {one['rank']}: replaced {what}")
    if copies:
        bad = sum(bool(one["damaged"]) for one in copies)
        print_line(f"copies on {counted(len(copies), 'host')} verified, {bad} damaged")


def _verified(
    backend: Backend,
    step: int,
    loader: Loader,
    repairs: TierRepairs | None,
    *,
    deep: bool,
    on_progress: Callable[[Progress], None],
) -> VerifyReport:
    """Verify one step, and repair it if `--repair` is given."""
    try:
        with noting(backend, Catalog(backend), step):
            checkpoint = Checkpoint.open(backend, step, loader=loader)
    except DamagedError as error:
        # An unreadable manifest is a finding, not an error: `--all` continues with the next step.
        damaged = tuple(Damage(name, str(error)) for name in error.damaged or (f"step {step}",))
        return VerifyReport(step, False, damaged, 0, 0, 0, deep, 0.0)
    if repairs is None:
        report = checkpoint.verify(deep=deep, on_progress=on_progress)
    else:
        report = verify_and_repair(checkpoint, repairs, deep=deep, on_progress=on_progress)
    return with_log(checkpoint, report)


def _links(reports: Sequence[VerifyReport]) -> dict[LendingSave, list[int]]:
    """Return the damaged links of chains, each with the damaged steps that need it."""
    found: dict[LendingSave, list[int]] = {}
    for report in reports:
        for link in report.links:
            found.setdefault(link, []).append(report.step)
    return found


def _damaged_uids(reports: Sequence[VerifyReport]) -> set[str]:
    damaged = (damage for report in reports for damage in report.damaged)
    return {uid for damage in damaged if (uid := blob_uid(damage.blob)) is not None}


def _print(report: VerifyReport, url: str, listed_uids: Collection[str]) -> None:
    _print_verdict(report, url, listed_uids)
    if report.lossy:
        print_line(
            f"lossy codecs in step {report.step}: {', '.join(report.lossy)}; they rounded values "
            "during the save, so even a whole checkpoint has rounded values"
        )
    for torn in report.torn_logs:
        print_line(
            f"the log of step {report.step} ends in a torn write, which is no damage: {torn}; a "
            "restore leaves it out"
        )


def _print_verdict(report: VerifyReport, url: str, listed_uids: Collection[str]) -> None:
    entries = "1 entry" if report.logged_entries == 1 else f"{report.logged_entries} entries"
    log = f" and {entries} of its log" if report.logged_entries else ""
    looked = f"{counted(report.objects, 'object')}{log}, {size_text(report.bytes_read)} read"
    if report.deep:
        looked = f"{counted(report.frames, 'frame')} of {looked}"
    found = f"{counted(len(report.damaged), 'problem')} found"
    if report.not_decoded:  # no damage, but not everything was checked: the command exits with 1
        whole = "stored bytes are whole; " if report.ok else ""
        print_line(
            f"step {report.step} of {url}: {whole}decoding not checked: "
            f"{'; '.join(report.not_decoded)}",
            style="yellow",
        )
        if report.ok:
            return
    if report.ok and not report.damaged:
        how = "whole" if report.deep else "whole according to its manifest and sizes"
        where = f" in {' and '.join(report.tiers)}" if report.tiers else ""
        print_line(
            f"step {report.step} is {how}{where}: {looked} in {report.seconds:.1f} s", style="green"
        )
        return
    # The damage in one save is listed once, with the first step that needs it.
    print_damage([damage for damage in report.damaged if blob_uid(damage.blob) not in listed_uids])
    for repair in report.repairs:
        _print_repair(repair)
    if report.ok:
        print_line(
            f"step {report.step} is whole now: {found} and repaired; {looked}", style="green"
        )
        return
    looked = f"; {looked}" if report.objects else ""
    print_line(f"step {report.step} is damaged: {found}{looked}", style="bold red")
    if report.links:
        links = listed([*map(str, report.links)])
        above = all(link.uid in listed_uids for link in report.links)
        where = "; it is listed above" if above else ""
        print_line(f"the damage is in its chain, in the blobs of {links}{where}")
    if len(report.tiers) > 1 and not report.repairs:
        print_line("--repair replaces bad copies from a good one")


def _print_repair(repair: Repair) -> None:
    if repair.source is None:
        print_line(f"not repaired in tier {repair.tier}: {repair.error or ''}")
    elif repair.error is None:
        print_line(f"replaced in tier {repair.tier}, from {repair.source}")
    else:
        print_line(
            f"replaced in tier {repair.tier}, from {repair.source}, but not whole: {repair.error}"
        )


@dataclass(slots=True)
class Group:
    """The damage in one blob, or with one detail that names no blob.

    The dicts serve as ordered sets.

    Attributes:
        causes: The details of the damage.
        hit: The damaged objects and records.
    """

    causes: dict[str, None] = field(default_factory=dict)
    hit: dict[str, None] = field(default_factory=dict)


def grouped(damaged: Iterable[Damage]) -> list[Group]:
    """Group damage by blob and tier, or by its detail if it names no blob."""
    groups: dict[tuple[str, str], Group] = {}
    for one in damaged:
        tier = _TIER.match(one.detail)
        # Usually `what` names an object, and `detail` its blob. If a whole blob is damaged, `what`
        # names the blob.
        blob = _BLOB.fullmatch(one.what) or _BLOB.search(one.detail)
        where = (tier[0] if tier else "", blob[0]) if blob else ("", one.detail)
        group = groups.setdefault(where, Group())
        if blob is None or blob[0] != one.what:
            group.causes[one.detail] = None
            group.hit[one.what] = None
        else:  # the damage is the blob's own, and not every detail names the blob
            named = one.what in one.detail
            group.causes[one.detail if named else f"{one.what}: {one.detail}"] = None
    return list(groups.values())


def print_damage(damaged: Iterable[Damage]) -> None:
    """Print each blob's causes, then its damaged objects: the first few of each, and a count."""
    for group in grouped(damaged):
        for cause in list(group.causes)[:_SHOWN]:
            print_line(cause)
        if len(group.causes) > _SHOWN:
            print_line(f"and {len(group.causes) - _SHOWN} more such places in this blob")
        for name in list(group.hit)[:_SHOWN]:
            print_line(f"    {name}", style="red")
        if len(group.hit) > _SHOWN:
            more = len(group.hit) - _SHOWN
            print_line(f"    and {more} more: --json names all", style="red")
