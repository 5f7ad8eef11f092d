"""`penstock delete`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from penstock.core.catalog import Catalog
from penstock.core.cli.asking import ask
from penstock.core.cli.render import print_json, print_line, visible
from penstock.core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DamagedError,
)
from penstock.core.manifest import data_prefix, parse_commit_name
from penstock.core.opening import open_backend
from penstock.core.sizes import size_text
from penstock.core.survey import check_same, survey_run, uids_named

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import Backend


@dataclass(frozen=True, slots=True)
class Doomed:
    """A checkpoint that goes: its generations, whose data they name, and the bytes of that."""

    step: int
    generations: int
    uids: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class How:
    """How to delete.

    Attributes:
        dry_run: Say what would happen; change nothing.
        yes: Do not ask.
        force: Even if no whole checkpoint would be left.
        tier: From this tier alone; None: from all.
        as_json: Print one JSON document.
    """

    dry_run: bool = False
    yes: bool = False
    force: bool = False
    tier: str | None = None
    as_json: bool = False


def run(url: str, steps: Iterable[int], how: How) -> None:
    """Delete checkpoints.

    Raises:
        CheckpointNotFoundError: One of the steps is not there; nothing was deleted.
        ConfigError: No whole checkpoint would be left, and `force` is not given; or two tiers
            have different checkpoints at one of the steps.
    """
    chosen = sorted(set(steps))
    with closing(open_backend(url, must_exist=True, light=True)) as whole:
        backend = whole if how.tier is None else _tier(whole, how.tier)
        others = [tier for tier in whole.tiers if tier.name != how.tier]
        elsewhere = [] if how.tier is None else [tier.backend for tier in others]
        catalog = Catalog(backend)
        entries = catalog.entries()
        named = {step: _named_by(backend, catalog, step, entries.get(step)) for step in chosen}
        doomed = [_doomed(backend, step, uids) for step, uids in named.items()]
        left = [step for step in entries if step not in chosen]
        if how.tier is None:
            check_same(whole.tiers, chosen)
        if not (how.force or _any_whole(catalog, left) or any(map(_has_whole, elsewhere))):
            msg = (
                f"no whole checkpoint would be left under {backend.url} without "
                f"{_named(chosen)}; pass --force to delete all the same"
            )
            raise ConfigError(msg)
        uids = [uid for one in doomed for uid in one.uids]
        if how.dry_run:
            freed = data_bytes(backend, set(uids) - _needed(backend, chosen))
        else:
            total = sum(one.size_bytes for one in doomed)
            ask(
                f"Delete {_named(chosen)} ({size_text(total)}) of {visible(backend.url)}",
                yes=how.yes,
            )
            before = data_bytes(backend, uids)
            for step in chosen:
                catalog.delete(step, named[step])  # what was asked about, and no other
            freed = before - data_bytes(backend, uids)
        _print(backend.url, doomed, left, freed, dry_run=how.dry_run, as_json=how.as_json)


def _tier(backend: Backend, name: str) -> Backend:
    for tier in backend.tiers:
        if tier.name == name:
            return tier.backend
    names = ", ".join(tier.name for tier in backend.tiers)
    there = f"it has {names}" if names else "it is one place"
    msg = f"--tier: {backend.url} has no tier {name!r}; {there}"
    raise ConfigError(msg)


def _has_whole(backend: Backend) -> bool:
    return Catalog(backend).newest_whole() is not None


def data_bytes(backend: Backend, uids: Iterable[str]) -> int:
    """Bytes that are stored for these attempts."""
    return sum(blob.size_bytes for uid in set(uids) for blob in backend.list(data_prefix(uid)))


def _named_by(
    backend: Backend, catalog: Catalog, step: int, names: Sequence[str] | None
) -> Mapping[str, str | None]:
    if names is None:
        catalog.record(step)  # raises, and says which steps there are
        names = catalog.entries()[step]  # else it was committed since they were listed
    return uids_named(backend, names)


def _doomed(backend: Backend, step: int, named: Mapping[str, str | None]) -> Doomed:
    uids = [uid for uid in named.values() if uid]
    return Doomed(step, len(named), tuple(uids), data_bytes(backend, uids))


def _any_whole(catalog: Catalog, steps: Sequence[int]) -> bool:
    for step in reversed(steps):
        try:
            catalog.record(step)
        except (CheckpointNotFoundError, DamagedError):
            continue
        return True
    return False


def _needed(backend: Backend, chosen: Collection[int]) -> set[str]:
    """Uids that would stay in use, as far as records say; all, while one is unreadable."""
    survey = survey_run(backend)
    going = {n for n in survey.records if (parse_commit_name(n) or (-1,))[0] in chosen}
    unreadable = {n for n in survey.unreadable if (parse_commit_name(n) or (-1,))[0] not in chosen}
    if unreadable:
        return survey.needed
    staying = [record for name, record in survey.records.items() if name not in going]
    return {uid for record in staying for uid in (record.uid, *record.references)}


def _named(steps: Sequence[int]) -> str:
    listed = ", ".join(map(str, steps))
    return f"step {listed}" if len(steps) == 1 else f"steps {listed}"


def _print(
    url: str,
    doomed: Sequence[Doomed],
    left: Sequence[int],
    freed: int,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    if as_json:
        print_json(
            {
                "url": url,
                "dry_run": dry_run,
                "deleted": [asdict(one) for one in doomed],
                "bytes_freed": freed,
                "remaining": list(left),
            }
        )
        return
    verb = "would be deleted" if dry_run else "deleted"
    for one in doomed:
        several = f", {one.generations} generations" if one.generations > 1 else ""
        print_line(f"step {one.step} {verb}: {size_text(one.size_bytes)}{several}")
    print_line(f"{size_text(freed)} {'would be ' if dry_run else ''}freed; {_left(left)}")
    kept = sum(one.size_bytes for one in doomed) - freed
    if kept or any(len(one.uids) < one.generations for one in doomed):
        print_line(
            "data that something else may need stays; `penstock prune` takes what is left over"
        )


def _left(steps: Sequence[int]) -> str:
    if not steps:
        return "no checkpoint is left"
    return f"{len(steps)} checkpoint{'s are' if len(steps) > 1 else ' is'} left"
