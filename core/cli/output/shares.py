"""Which host holds which files of a checkpoint, as commands show it.

Tested in `tests/core/cli/test_hosts.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.abc import host_roots, read_host
from penstock.core.catalog.survey import has_files
from penstock.core.cli.output.render import Cell, Column, print_line, print_table
from penstock.core.errors import BlobNotFoundError, DamagedError, FormatError, StorageError
from penstock.core.format.records import COMMIT_PREFIX, DATA_PREFIX, data_prefix
from penstock.core.replicas.holdings import Holdings, RootListing
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.core.abc import Backend, HostRoots
    from penstock.core.format.records import CommitRecord


@dataclass(frozen=True, slots=True)
class HostShare:
    """The files of one checkpoint on one host.

    Attributes:
        host: The host.
        domain: Its fault domain.
        bytes_held: The bytes of the files that it holds.
        bytes_only_here: The bytes of those that no other host holds.
        missing: The names of the files that it must still copy.
        current: Whether it was part of the last job that has saved. If not, its commit records do
            not count.
    """

    host: str
    domain: str
    bytes_held: int
    bytes_only_here: int
    missing: tuple[str, ...]
    current: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the files of one checkpoint are.

    Attributes:
        state: `replicated`, `whole` (but without all copies), `incomplete` (no host has some file),
            or `none` if no host has a file.
        shares: The share of each host.
    """

    state: str
    shares: tuple[HostShare, ...]


@dataclass(frozen=True, slots=True)
class HostNames:
    """The hosts whose roots a command sees.

    Attributes:
        shown: The hosts whose roots are open.
        absent: The other hosts of the last job that has saved.
        error: Why the last job is unknown.
    """

    shown: tuple[str, ...]
    absent: tuple[str, ...]
    error: str = ""

    def note(self) -> str:
        """Return one line on hosts that are not shown; empty if all are."""
        if self.error:
            return self.error
        if not self.absent:
            return ""
        if len(self.shown) > 1:
            return f"absent hosts of the last job: {', '.join(self.absent)}"
        names = sorted({*self.shown, *self.absent})
        own = "".join(self.shown)
        return (
            f"this is the root of host {own}, one of the {len(names)} hosts of the last "
            f"job ({', '.join(names)}): run the command under torchrun on all of them to see all"
        )


def hosts_seen(backend: Backend) -> HostNames | None:
    """Return the hosts whose roots are open; None for a run that has no roots on hosts.

    The root of a host may also be open by its plain path.
    """
    place = next(iter(host_roots(backend).values()), None)
    if place is None and backend.tiers:
        return None
    try:
        if place is not None and len(place.roots) > 1:
            return HostNames(tuple(names_of(place)), place.absent())
        record = read_host(backend if place is None else place.own)
    except (FormatError, StorageError) as error:
        return HostNames((), (), str(error))
    if record is None:
        return None
    others = tuple(sorted({*record.hosts} - {record.host}))
    return HostNames((record.host,), others)


def names_of(place: HostRoots) -> list[str]:
    """Return a name for each root that no other root has."""
    hosts = [root.host for root in place.roots]
    return [
        f"{host}#{hosts[:number].count(host) + 1}" if hosts.count(host) > 1 else host
        for number, host in enumerate(hosts)
    ]


def joined_place(backend: Backend) -> HostRoots | None:
    """Return the fastest tier in which the roots of several hosts are joined."""
    joined = (place for place in host_roots(backend).values() if len(place.roots) > 1)
    return next(joined, None)


def spreads_of(backend: Backend, records: Iterable[CommitRecord]) -> dict[str, Spread]:
    """Return where the files of checkpoints are, by uid; lists each root once.

    Returns nothing if only one root is open, or if a host does not answer.
    """
    place = joined_place(backend)
    if place is None:
        return {}
    try:
        holdings = Holdings(
            RootListing(str(number), root.epoch, _sizes(root.backend))
            for number, root in enumerate(place.roots)
        )
        sizes = holdings.sizes
        return {record.uid: _spread(place, record, holdings, sizes) for record in records}
    except StorageError:  # reported as a tier that does not answer
        return {}


def _sizes(root: Backend) -> dict[str, int]:
    infos = (info for prefix in (DATA_PREFIX, COMMIT_PREFIX) for info in root.list(prefix))
    return {info.name: info.size_bytes for info in infos}


def _spread(
    place: HostRoots, record: CommitRecord, holdings: Holdings, sizes: Mapping[str, int]
) -> Spread:
    # Most runs have no hosts, and this module is slow to import.
    from penstock.core.tiers.host_copies import files_of, groups_of  # noqa: PLC0415

    whole, groups = has_files(place, record, sizes), groups_of(place)
    try:
        files = files_of(place, record, sizes)
    except (DamagedError, BlobNotFoundError):  # no host has the index or the commit record
        files = {n: size for n, size in sizes.items() if n.startswith(data_prefix(record.uid))}
    holders = {name: holdings.holders(name, size) for name, size in files.items()}
    pulls = holdings.pulls(files, groups)
    shares = []
    for host, name, root in zip(holdings.roots, names_of(place), place.roots, strict=True):
        held = sum(size for n, size in files.items() if host in holders[n])
        alone = sum(size for n, size in files.items() if holders[n] == {host})
        missing = tuple(sorted(pulls.get(host, ())))
        domain, current = root.domain or root.host, host in holdings.counting
        shares.append(HostShare(name, domain, held, alone, missing, current))
    if whole:
        state = "whole" if holdings.unsafe(files, groups) or not place.copies else "replicated"
    else:
        state = "incomplete" if any(share.bytes_held for share in shares) else "none"
    return Spread(state, tuple(shares))


def spread_cell(spread: Spread | None) -> str | Cell:
    """Return the cell of a checkpoint: the number of hosts that hold files of it, and its state."""
    if spread is None or spread.state == "none":
        return "-"
    count = sum(share.bytes_held > 0 for share in spread.shares)
    if spread.state == "incomplete":
        return Cell(f"{count} incomplete", "bold red")
    lacking = [share.host for share in spread.shares if share.missing]
    if lacking:
        return Cell(f"{count}, copies missing on {', '.join(lacking)}", "yellow")
    return f"{count} {spread.state}"


def hosts_json(seen: HostNames | None, spread: Spread | None = None) -> dict[str, Any]:
    """Return the keys for `--json`; none for a run that has no roots on hosts."""
    found = {} if seen is None else {"hosts": asdict(seen)}
    return found if spread is None else {**found, "spread": asdict(spread)}


def print_hosts(seen: HostNames | None, spread: Spread | None = None) -> None:
    """Print the hosts with the files of a checkpoint, and name the hosts that are not shown."""
    if spread is not None:
        columns: Sequence[Column[HostShare]] = (
            Column("HOST", lambda share: share.host),
            Column("DOMAIN", lambda share: share.domain, keep=1),
            Column("BYTES", lambda share: size_text(share.bytes_held), right=True),
            Column("ONLY HERE", lambda share: size_text(share.bytes_only_here), right=True, keep=3),
            Column("TO COPY", lambda share: counted(len(share.missing), "file"), keep=4),
            Column("LAST JOB", lambda share: "part of it" if share.current else "missed", keep=2),
        )
        print_line("")
        print_table(columns, spread.shares)
        if spread.state == "incomplete":
            print_line("incomplete: some files are on none of these hosts", style="red")
    if seen is not None and (note := seen.note()):
        print_line(note, style="yellow")
