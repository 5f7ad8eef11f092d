"""The tiers of a backend, and the record that identifies the root of each.

The record names this root, and the roots of all other tiers. It detects a root that was silently
replaced: by the empty mount point of an unmounted file system, by an older backup, or by another
tier's root. `docs/format.md` describes the bytes of the record.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal, TypeVar

from penstock.core.errors import (
    BlobNotFoundError,
    ConfigError,
    DamagedError,
    FormatError,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.core.abc.backend import Backend

T = TypeVar("T")

ROOT_NAME = "tier/root.json"
"""Name of the record in each tier's root."""

_VERSION = 1
_LIMIT_BYTES = 1 << 16
_MAX_OPENED = (1 << 62) - 1
_ID = re.compile(r"[0-9a-f]{32}")
_ACCEPT = (
    'To accept this configuration, save or drain once with roots = "accept" in the options of its '
    "backend (a process that only reads does not record it), for example: penstock drain "
    "'tiered://?fast=...&durable=...&roots=accept'"
)


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of a backend, and the rules for copying from it.

    Attributes:
        name: Name in messages, states and logs: `fast`, `durable`, or `fast.durable` if nested.
        backend: The backend of the tier.
        drain_every: Copy every N-th save to the next tier; 0 copies none automatically.
        drain_bytes_per_s: Maximum bytes per second to copy to the next tier; None sets no limit.
        drain_in: Where the copy to the next tier runs: a `thread` of this process, or a separate
            `process`; `auto` uses a process for large checkpoints, if it can open the tiers.
        keep_last: The number of checkpoints that eviction keeps here after they were copied to the
            next tier; None keeps all that fit.
        on_full: What a save does if this tier is full, even after eviction, and the next tier does
            not answer.
        durable: Whether a save counts as durable once it is complete here.
        accept_root: Whether to accept this tier for the run, whatever its root record says.
    """

    name: str
    backend: Backend
    drain_every: int = 1
    drain_bytes_per_s: float | None = None
    drain_in: Literal["auto", "process", "thread"] = "auto"
    keep_last: int | None = None
    on_full: Literal["block", "skip", "raise"] = "skip"
    durable: bool = False
    accept_root: bool = False


def first_whole(tiers: Iterable[Tier], read: Callable[[Tier], T]) -> T | None:
    """Return the result of `read` for the first tier where it succeeds; None if it never does.

    A tiered backend fails over when a blob is missing. It cannot detect damage, since core verifies
    checksums after the backend's call; after damage, core fails over with this function.

    Args:
        tiers: The tiers, in the order to try.
        read: Reads from a tier and verifies; raises DamagedError for damage.
    """
    for tier in tiers:
        with suppress(DamagedError, StorageError):
            return read(tier)
    return None


@dataclass(frozen=True, slots=True)
class RootRecord:
    """The identity of one root.

    Attributes:
        run: The run: 32 hex digits, the same in all roots of the run.
        root: The root: 32 hex digits, drawn when the root was first used.
        opened: The number of processes that have saved or drained with this root.
        tiers: All roots at the last use, including this root, the fastest first; each with its
            `opened` at that time.
    """

    run: str
    root: str
    opened: int = 0
    tiers: tuple[tuple[str, int], ...] = ()

    def slower(self) -> list[str]:
        """Return the IDs of the slower tiers' roots."""
        ids = [root for root, _ in self.tiers]
        return ids[ids.index(self.root) + 1 :] if self.root in ids else []


def encode_root(record: RootRecord) -> bytes:
    """Return the bytes of a root record."""
    body = {
        "penstock": _VERSION,
        "run": record.run,
        "root": record.root,
        "opened": record.opened,
        "tiers": [list(entry) for entry in record.tiers],
    }
    return json.dumps(body, indent=1).encode() + b"\n"


def decode_root(data: bytes) -> RootRecord:
    """Read and validate a root record.

    Raises:
        FormatError: `data` is not a root record.
    """
    try:
        body = json.loads(data)
        _check_version(body)
        record = RootRecord(
            _checked_id(body["run"]),
            _checked_id(body["root"]),
            _checked_count(body["opened"]),
            tuple((_checked_id(root), _checked_count(count)) for root, count in body["tiers"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        msg = f"{ROOT_NAME} cannot be read: {error}"
        raise FormatError(msg, [ROOT_NAME]) from error
    return record


def _check_version(body: object) -> None:
    if type(body) is not dict or body.get("penstock") != _VERSION:
        msg = f"it is not a record of version {_VERSION}"
        raise ValueError(msg)


def _checked_id(value: object) -> str:
    if type(value) is not str or not _ID.fullmatch(value):
        msg = "the ID of a run or root is not 32 hex digits"
        raise ValueError(msg)
    return value


def _checked_count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_OPENED:
        msg = f"a count is not an integer from 0 to {_MAX_OPENED}"
        raise ValueError(msg)
    return value


def read_root(backend: Backend) -> RootRecord | None:
    """Return the record of a root; None if the root has none.

    Raises:
        FormatError: The record cannot be read.
        StorageError: The store does not answer.
    """
    try:
        return decode_root(backend.read_record(ROOT_NAME, limit_bytes=_LIMIT_BYTES))
    except BlobNotFoundError:
        return None


def misplaced_roots(
    tiers: Sequence[Tier],
    found: Mapping[int, RootRecord | None],
    *,
    has_checkpoints: Callable[[int], bool],
) -> dict[int, str]:
    """Return the numbers of tiers not to use for now, each with the reason.

    Such a tier has no record, but another tier's record names a root that is absent. Checks only
    the fastest durable tier and slower tiers: a faster tier may lose its data with its machine. A
    tier that has checkpoints passes, since it is not the empty mount point of an unmounted file
    system.

    Args:
        tiers: The tiers, the fastest first.
        found: The records of all tiers that answered; None for a tier without a record.
        has_checkpoints: Returns whether the tier with a number has any checkpoint; called only for
            suspicious tiers.

    Raises:
        StorageError: A tier does not list its checkpoints.
        ConfigError: Two tiers are the same place, are swapped, or belong to different runs.
    """
    known = {number: record for number, record in sorted(found.items()) if record is not None}
    shown = {number: f"tier {tier.name} ({tier.backend.url})" for number, tier in enumerate(tiers)}
    for first, second in combinations(known, 2):
        _check_pair(known, shown, first, second)
    for record in known.values():
        ids = [root for root, _ in record.tiers]
        order = [number for number in known if known[number].root in ids]
        places = [ids.index(known[number].root) for number in order]
        if places != sorted(places):
            msg = (
                f"{' and '.join(shown[n] for n in order)} are swapped: until now they were used "
                f"in the opposite order. Nothing was changed. {_ACCEPT}"
            )
            raise ConfigError(msg)
    unread = len(tiers) - len(found)
    reasons: dict[int, str] = {}
    for number, record in known.items():
        absent = set(record.slower()) - {other.root for other in known.values()}
        if len(absent) <= unread:
            continue
        for blank in (n for n in found if n > number and found[n] is None):
            if blank < first_durable(tiers) or has_checkpoints(blank):
                continue
            reasons[blank] = (
                f"{shown[blank]} is not the place to which {shown[number]} was copied so far: "
                f"no run has used it yet. Is its file system mounted? Until it is back, nothing is "
                f"read from it or copied to it. {_ACCEPT}"
            )
    return reasons


def first_durable(tiers: Sequence[Tier]) -> int:
    """Return the number of the fastest tier in which a checkpoint counts as durable."""
    return next((number for number, tier in enumerate(tiers) if tier.durable), len(tiers) - 1)


def _check_pair(
    known: Mapping[int, RootRecord], shown: Mapping[int, str], first: int, second: int
) -> None:
    if known[first].root == known[second].root:
        msg = (
            f"{shown[first]} and {shown[second]} are one place, perhaps reached over the network, "
            "or one is a copy of the other: data evicted from the faster one could be lost. Give "
            f"each its own place, or delete {ROOT_NAME} in the copy."
        )
        raise ConfigError(msg)
    if known[first].run != known[second].run:
        msg = (
            f"{shown[first]} and {shown[second]} belong to different runs. Nothing was changed. "
            f"Give each run its own places. {_ACCEPT}"
        )
        raise ConfigError(msg)
