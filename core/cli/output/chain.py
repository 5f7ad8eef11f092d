"""The chain of a checkpoint: the saves that restoring it reads from, and how much of each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.chains import find_lenders, records_down
from penstock.core.cli.output.render import Cell, Column, print_line, print_table
from penstock.core.format.records import blob_uid
from penstock.core.reporting.reports import LendingSave
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.format.records import Frame
    from penstock.core.plan.restore import Located
    from penstock.core.restore.contents import Contents


@dataclass(frozen=True, slots=True)
class Link:
    """What restoring some objects reads of the blobs of one save.

    Attributes:
        lender: The save; the first link of a chain is the checkpoint itself.
        frames: The number of frames.
        bytes_read: The sum of their lengths.
    """

    lender: LendingSave
    frames: int
    bytes_read: int


def depth_of(located: Located) -> int:
    """Return how many frames lie below the deepest frame of an object."""
    return max((len(list(frame.links())) - 1 for frame in _frames(located)), default=0)


def chain_of(backend: Backend, contents: Contents, chosen: Iterable[Located]) -> list[Link]:
    """Return the links that restoring `chosen` reads: the checkpoint's own, then the nearest ones.

    Reads commit records until all saves are found; none for a checkpoint that borrows nothing.
    """
    record = contents.record
    frames: dict[str, dict[tuple[str, int], int]] = defaultdict(dict)
    depths: dict[str, int] = {}
    stored = map(contents.master, map(contents.owner, chosen))
    for located in (one for whole in stored for one in contents.descriptions(whole)):
        blobs = contents.manifest.head(located.part).blobs
        for frame in _frames(located):
            for depth, link in enumerate(frame.links()):
                name = blobs[link.blob].name
                uid = blob_uid(name) or ""
                frames[uid][name, link.offset] = link.length
                depths[uid] = min(depth, depths.get(uid, depth))
    lenders: Mapping[str, LendingSave] = {}
    if record.references:
        lenders = find_lenders(records_down(Catalog(backend), record.step), record.references)
    own = LendingSave(record.uid, record.step)
    found = sorted(lenders.values(), key=lambda one: (depths.get(one.uid, 0), -(one.step or 0)))
    return [
        Link(one, len(frames[one.uid]), sum(frames[one.uid].values()))
        for one in (own, *(one for one in found if one.uid in depths))
    ]


def print_chain(links: Sequence[Link], age: int | None) -> None:
    """Print the chain of a checkpoint.

    Args:
        links: The links.
        age: How many saves ago the newest checkpoint without a base was made; None: it has none
            itself.
    """
    total = size_text(sum(link.bytes_read for link in links))
    kind = "it borrows blobs" if age is None else f"{counted(age, 'save')} after one without a base"
    print_line(f"{kind}; a restore reads {total} of {counted(len(links), 'checkpoint')}\n")
    columns: tuple[Column[Link], ...] = (
        Column("CHAIN", partial(_lender_cell, first=links[0]), flexible=True),
        Column("READ", lambda link: size_text(link.bytes_read), right=True),
        Column("FRAMES", lambda link: str(link.frames), right=True, keep=2),
        Column("UID", lambda link: link.lender.uid, keep=1),
    )
    print_table(columns, links)


def _lender_cell(link: Link, *, first: Link) -> Cell:
    lender = link.lender
    name = "a deleted step" if lender.step is None else str(lender)
    return Cell(name if link is first else f"  {name}", "" if lender.state == "ok" else "yellow")


def _frames(located: Located) -> Iterable[Frame]:
    for shard in located.record.shards:
        for ref in shard.chunks:
            yield located.frames[ref.frame]
