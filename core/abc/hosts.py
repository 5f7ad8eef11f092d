"""The contract of backends with a root on each host of a job, and the record in each root.

`docs/format.md` describes the bytes of the record.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.abc.delegating import DelegatingBackend
from penstock.core.abc.tiers import Tier
from penstock.core.errors import BlobNotFoundError, FormatError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.core.abc.backend import Backend

HOST_NAME = "tier/host.json"
"""Name of the record in each host's root."""

OTHER_HOST = "another host"
"""Name of the root of another host in `copies_of`."""

_VERSION = 1
_LIMIT_BYTES = 1 << 20
_MAX_EPOCH = (1 << 62) - 1
_SHOWN = 8  # hosts that a message names


class HostRoot(NamedTuple):
    """The root of one host, as one rank reaches it.

    Attributes:
        host: The name of the host.
        epoch: The epoch of the newest job that has saved there (see `HostRecord`); 0 if none has.
        backend: The root.
        domain: Hosts with equal domains may fail together.
        ask: Sends an order of a kind to that host, and returns its answer; None for the root of
            this host.
        run: The run that has saved there (see `HostRecord`); empty if none has.
        rank: The rank that serves the root to other hosts.
    """

    host: str
    epoch: int
    backend: Backend
    domain: str = ""
    ask: Callable[[str, bytes], bytes] | None = None
    run: str = ""
    rank: int = 0


class HostRoots(DelegatingBackend, ABC):
    """A backend that writes to the root of this host, and reads the roots of all hosts.

    Until `join`, the root of this host is the only one.

    Attributes:
        roots: The roots of all hosts of the job; that of this host is first.
        copies: The number of other hosts that must hold a copy of each file.
        domain: The fault domain of this host; empty: the host itself.
        copy_bytes_per_s: Maximum bytes per second that this host copies from others; None sets no
            limit.
    """

    roots: tuple[HostRoot, ...]
    copies: int
    domain: str
    copy_bytes_per_s: float | None

    @property
    def own(self) -> Backend:
        """The root of this host."""
        return self.inner

    def last_job(self) -> HostRecord | None:
        """Return the record of the newest job that has saved in any root; None if none has.

        Raises the same errors as `read_host`.
        """
        return read_host(max(self.roots, key=lambda root: root.epoch).backend)

    def check_may_delete(self) -> None:
        """Raise if a deletion would be refused; a caller that deletes in several places asks first.

        Raises:
            StorageError: Other hosts of the last job have not joined, or this is not rank 0.
        """

    @abstractmethod
    def absent(self) -> tuple[str, ...]:
        """Return the names of the hosts that the last job to save had, and this job lacks.

        Raises:
            FormatError: The record that names them is damaged.
            StorageError: A host does not answer.
        """

    @abstractmethod
    def publish_again(self, name: str, root: HostRoot, /) -> None:
        """Publish a record in a root that lacks it.

        Never brings back a record that another thread of this process deletes meanwhile.

        Raises:
            BlobNotFoundError: No root has the record.
            StorageError: A host does not answer.
        """

    @abstractmethod
    def join(self, own: HostRoot, others: Sequence[HostRoot], /, *, leads: bool) -> None:
        """From now on, read the roots of the other hosts too; `close` closes those roots.

        Args:
            own: The root of this host.
            others: The roots of the other hosts of the job.
            leads: Whether this rank, before its first change, records the job in the roots of all
                hosts as the newest.
        """


def host_roots(backend: Backend, /) -> dict[int, HostRoots]:
    """Return the tiers of a backend that have a root on each host, by the number of the tier.

    A backend without tiers counts as tier 0. Skips tiers that are not open.
    """
    found: dict[int, HostRoots] = {}
    for number, place in enumerate([tier.backend for tier in backend.tiers] or [backend]):
        inner = place
        with suppress(StorageError):
            while isinstance(inner, DelegatingBackend) and not isinstance(inner, HostRoots):
                inner = inner.inner
        if isinstance(inner, HostRoots):
            found[number] = inner
    return found


def absent_hosts(backend: Backend, /) -> str:
    """Return the names of the hosts of the last job that are absent; empty if none is.

    Raises:
        FormatError: The record that names them is damaged.
        StorageError: A host does not answer.
    """
    absent = {name for place in host_roots(backend).values() for name in place.absent()}
    return ", ".join(sorted(absent)[:_SHOWN])


def absence(backend: Backend, /) -> str:
    """Return why nothing may be deleted: hosts of the last job are absent; empty if none is.

    Raises the same errors as `absent_hosts`.
    """
    absent = absent_hosts(backend)
    return absent and (
        f"the hosts {absent} of the last job are absent, and may need the data: nothing was "
        "deleted. Delete in a job with them, such as this command under torchrun on all hosts, or "
        "in a job without them, after its first save"
    )


def is_reduced(backend: Backend, /) -> bool:
    """Return whether this job is smaller than the last one, by more hosts than it has copies for.

    Raises the same errors as `absent_hosts`.
    """
    for place in host_roots(backend).values():
        last = place.last_job()
        is_smaller = last is not None and len(place.roots) < len(last.hosts)
        if is_smaller and len(place.absent()) > max(place.copies, 1):
            return True
    return False


def place_text(name: str, /) -> str:
    """Return where a place of `copies_of` is, for messages."""
    return f"on {OTHER_HOST}" if name == OTHER_HOST else f"in tier {name}"


def copies_of(backend: Backend, /) -> Iterator[Tier]:
    """Yield the places that may have a copy of a blob: all tiers, and all roots of those on hosts.

    Yields nothing if the store is one place. A place without a name is the store itself, or the
    root of this host; the roots of other hosts have the name `OTHER_HOST`.
    """
    hosts = host_roots(backend)
    for number, tier in enumerate(backend.tiers or ([Tier("", backend)] if hosts else [])):
        if number in hosts:
            own, *others = hosts[number].roots
            yield Tier("", own.backend)
            yield from (Tier(OTHER_HOST, root.backend) for root in others)
        else:
            yield tier


@dataclass(frozen=True, slots=True)
class HostRecord:
    """The newest job that has saved to a root.

    Attributes:
        host: The name that this host had in that job.
        epoch: A number that is higher for a newer job: above the earlier epochs of all hosts of
            that job.
        hosts: The names of all hosts of that job.
        run: A random name that all jobs of one run hand on.
    """

    host: str
    epoch: int
    hosts: tuple[str, ...]
    run: str


def encode_host(record: HostRecord, /) -> bytes:
    """Return the bytes of the record of a host's root."""
    body = {"penstock": _VERSION, **asdict(record)}
    return json.dumps(body, indent=1).encode() + b"\n"


def read_host(root: Backend, /) -> HostRecord | None:
    """Return the record of a host's root; None if the root has none.

    Raises:
        FormatError: The record cannot be read.
        StorageError: The root does not answer.
    """
    try:
        data = root.read_record(HOST_NAME, limit_bytes=_LIMIT_BYTES)
    except BlobNotFoundError:
        return None
    try:
        body = json.loads(data)
        epoch, names = body["epoch"], (body["host"], body["run"], *body["hosts"])
        valid = body["penstock"] == _VERSION and type(epoch) is int and 0 <= epoch <= _MAX_EPOCH
        if not valid or any(type(name) is not str for name in names):
            msg = "it has another version, or a field of another type"
            raise ValueError(msg)  # noqa: TRY301 - joins the errors of json
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        msg = f"{HOST_NAME} on {root.url} cannot be read: {error}"
        raise FormatError(msg, [HOST_NAME]) from error
    return HostRecord(names[0], epoch, names[2:], names[1])
