"""Writes to the root of this host, and reads the roots of all hosts of the job."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import ConfigDict, Field

from penstock.core.abc import (
    HOST_NAME,
    Backend,
    Deadline,
    HostRecord,
    HostRoot,
    HostRoots,
    PluginConfig,
    SizeBytes,
    absence,
    call_all_with_deadline,
    current_timing,
    encode_host,
    read_host,
)
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    ConfigError,
    StorageError,
    StorageTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from penstock.core.types import BlobInfo, ReadRequest

log = logging.getLogger("penstock")

T = TypeVar("T")

_COMMITS = "commits/"
_RECORDS = (_COMMITS, "notes/", "tier/")
"""Prefixes of the records that every host has; they count only in roots of the newest epoch."""

_MOST_KNOWN = 1 << 16


class HostsConfig(PluginConfig):
    """Options of `hosts`: a root on each host.

    Attributes:
        path: The path, URL or table of the root on this host. Each host must have a place of its
            own there, not a shared one.
        copies: The number of other hosts that hold a copy of each host's data.
        domain: A label such as the rack. Hosts with the same label may fail together, so copies go
            to a host with another label if there is one. Default: each host is on its own.
        copy_bytes_per_s: Maximum bytes per second that a host copies from others; None sets no
            limit.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    path: str | dict[str, Any] = Field(repr=False)  # may hold credentials
    copies: int = Field(default=0, ge=0)
    domain: str = ""
    copy_bytes_per_s: SizeBytes | None = Field(default=None, gt=0)


class HostsBackend(HostRoots):
    """Writes to the root of this host; reads, lists and deletes in the roots of all hosts.

    Names of blobs and parts contain the uid of the save and the rank, so only records have the same
    names in several roots. The first change by a job begins a new epoch, whose number is stored in
    the roots of all its hosts. Records in `commits/`, `notes/` and `tier/` count only in roots of
    the newest epoch: otherwise a host that missed a job would bring back records that the job
    deleted or replaced.
    """

    name: ClassVar[str] = "hosts"
    Config: ClassVar[type[PluginConfig]] = HostsConfig

    def __init__(self, config: HostsConfig, /, *, root: Backend | None = None) -> None:
        """Wrap the open root of this host; `close` closes it."""
        if root is None:
            msg = "hosts needs the root of this host: open it from a configuration, or give a root"
            raise ConfigError(msg)
        if root.tiers:
            msg = "path must be one place, not tiers: make hosts the fast tier of a tiered backend"
            raise ConfigError(msg)
        if config.copies and not root.capabilities.renames:
            msg = f"{root.url} cannot hold copies of other hosts: path must be a folder"
            raise ConfigError(msg)
        super().__init__(root)
        self.copies = config.copies
        self.domain = config.domain
        self.copy_bytes_per_s = config.copy_bytes_per_s
        self.roots = (HostRoot("", 0, root),)
        self._newest = 0
        self._joined = self._leads = self._began = False
        self._lock = threading.Lock()  # held while an epoch begins; guards the lines above
        # Held while records are deleted: else `publish_again` could bring one back.
        self._deleting = threading.Lock()
        self._known: dict[str, HostRoot] = {}  # for each blob that this host lacks, a root with it

    @classmethod
    def open(cls, config: Any, /, *, open_backend: Callable[[Any], Backend]) -> Self:
        """Open the root of this host."""
        root = open_backend(config.path)
        try:
            return cls(config, root=root)
        except BaseException:
            root.close()
            raise

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Return the options of `hosts:///abs/path`."""
        return cls.Config.model_validate({"path": f"file://{url.partition('://')[2]}", **options})

    @property
    def url(self) -> str:
        """The URL of this host's root; with the scheme `hosts` if the root is a folder."""
        url = self.inner.url
        return f"hosts({url})" if "file://" not in url else url.replace("file://", "hosts://", 1)

    def absent(self) -> tuple[str, ...]:
        """See `HostRoots.absent`."""
        record = self.last_job()
        if record is None:
            return ()
        here: Counter[str] = Counter()
        for root in self.roots:
            # A host may have another name in each job, as pods do, or the name of another host.
            there = read_host(root.backend) if root.epoch == self._newest else None
            here[root.host if there is None else there.host] += 1
        return tuple(sorted(Counter(record.hosts) - here))

    def join(self, own: HostRoot, others: Sequence[HostRoot], /, *, leads: bool) -> None:
        """See `HostRoots.join`."""
        with self._lock:
            self.roots = (own, *others)
            self._newest = max(root.epoch for root in self.roots)
            self._joined, self._leads, self._began = True, leads, False

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Read each blob from the first root that has it, starting with this host's root."""
        elsewhere = self._known.keys() & {request.name for request in requests}
        try:
            self.inner.read([request for request in requests if request.name not in elsewhere])
        except (BlobNotFoundError, BlobTruncatedError):  # a copy may be shorter
            if len(self.roots) == 1:
                raise
            rest = requests
        else:
            rest = [request for request in requests if request.name in elsewhere]
        by_name: dict[str, list[ReadRequest]] = defaultdict(list)
        for request in rest:
            by_name[request.name].append(request)
        for name, some in by_name.items():
            self._first(name, methodcaller("read", some))

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Read with `submit_read` of this host's root; if that root lacks bytes, with `read`."""
        if any(request.name in self._known for request in requests):
            return Backend.submit_read(self, requests)
        return self._submit_or_read(self.inner, requests, (BlobNotFoundError, BlobTruncatedError))

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """Read a record from the first root that has it, starting with this host's root."""
        return self._first(name, lambda root: root.read_record(name, limit_bytes=limit_bytes))

    def stat(self, name: str, /) -> BlobInfo:
        """Return the size and time of a blob in the first root that has it."""
        return self._first(name, lambda root: root.stat(name))

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """List the blobs of all roots.

        The process that has begun the epoch lists commit records without asking other hosts.

        Raises:
            StorageError: A host does not answer, so its blobs are unknown.
        """
        if self._began and prefix.startswith(_COMMITS):
            return self.inner.list(prefix)
        infos: dict[str, BlobInfo] = {}
        for root, listed in self._at_all(lambda root: root.list(prefix)).items():
            for info in listed:
                if info.name != HOST_NAME and self._counts(root, info.name):
                    # The largest: a truncated file must not hide the good copy of another host.
                    known = infos.setdefault(info.name, info)
                    if info.size_bytes > known.size_bytes:
                        infos[info.name] = info
        return [infos[name] for name in sorted(infos)]

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """Publish in this host's root; records in `commits/`, `notes/` and `tier/` in all roots.

        With `exclusive`, no other root may have the name. A failure to publish on another host is
        only logged: that host's root lacks the record until the next job publishes it there. A note
        begins no epoch: a process on one host that was away would become the last job, and hosts
        with newer checkpoints would lose them. It fails if a host does not answer.
        """
        if name.startswith("notes/"):
            counting = [root for root in self.roots if self._counts(root, name)]
            self._at_all(lambda root: root.publish(name, data), counting)
            return
        self._begin_epoch()
        others = self.roots[1:]
        if exclusive and others:
            with suppress(BlobNotFoundError):
                url = self._first(name, lambda root: (root.stat(name), root.url))[1]
                msg = f"{name} already exists on {url}"
                raise BlobExistsError(msg)
        self.inner.publish(name, data, exclusive=exclusive)
        if not name.startswith(_RECORDS):
            return
        for root, outcome in self._called(others, lambda root: root.publish(name, data)):
            if isinstance(outcome, BaseException):
                log.warning("host %s lacks the record %s: %s", root.host, name, str(outcome))

    def delete(self, names: Sequence[str], /) -> None:
        """Delete in all roots.

        Raises:
            StorageError: A host does not answer, so its root may still have the blobs. Or other
                hosts of the last job have not joined, and nothing was deleted.
        """
        self._check_all_joined()
        self._begin_epoch()
        with self._deleting:
            self._at_all(lambda root: root.delete(names), self.roots[1:])
            self.inner.delete(names)  # last: what another host still has must be listed
        for name in names:
            self._known.pop(name, None)

    def publish_again(self, name: str, root: HostRoot, /) -> None:
        """See `HostRoots.publish_again`."""
        with self._deleting:
            data = self.read_record(name, limit_bytes=self.stat(name).size_bytes)
            root.backend.publish(name, data)

    def check_may_delete(self) -> None:
        """See `HostRoots.check_may_delete`."""
        if self._joined and not self._leads:
            # Without a new epoch, a host that is away would bring the deleted records back.
            msg = "nothing was deleted: on hosts, only rank 0 may delete or rewind"
            raise StorageError(msg)
        self._check_all_joined()

    def sweep(self, before_s: float, /) -> None:
        """Sweep all roots."""
        self._at_all(lambda root: root.sweep(before_s))

    def close(self) -> None:
        """Close the connections to the other hosts, then this host's root."""
        for root in self.roots[1:]:
            root.backend.close()
        super().close()

    # -- below --------------------------------------------------------------------------------

    def _check_all_joined(self) -> None:
        if not self._joined and (why := absence(self)):
            raise StorageError(why)

    def _counts(self, root: HostRoot, name: str) -> bool:
        return root.epoch == self._newest or not name.startswith(_RECORDS)

    def _first(self, name: str, call: Callable[[Backend], T]) -> T:
        """Return the result of `call` for the first root that has `name`.

        Raises:
            BlobNotFoundError: No root has it.
            StorageError: A host does not answer, and no other root has it.
        """
        known = self._known.get(name)
        roots = [root for root in self.roots if self._counts(root, name)]
        failures: list[StorageError] = []
        for root in sorted(roots, key=lambda root: root is not known):
            try:
                found = call(root.backend)
            except StorageError as error:
                failures.append(error)
            else:
                if root is not self.roots[0]:
                    if len(self._known) >= _MOST_KNOWN:
                        self._known.clear()
                    self._known[name] = root
                return found
        raise min(failures, key=lambda error: isinstance(error, BlobNotFoundError))

    def _at_all(
        self, call: Callable[[Backend], T], roots: Sequence[HostRoot] | None = None
    ) -> dict[HostRoot, T]:
        """Return the result of `call` for each root; default: all roots.

        Raises:
            StorageError: A root failed; the call was made on all of them.
        """
        results: dict[HostRoot, T] = {}
        for root, outcome in self._called(self.roots if roots is None else roots, call):
            if isinstance(outcome, BaseException):
                raise outcome
            results[root] = outcome
        return results

    def _called(
        self, roots: Sequence[HostRoot], call: Callable[[Backend], T]
    ) -> Iterable[tuple[HostRoot, T | BaseException]]:
        """Call `call` on all roots in parallel; return each root with its result or error."""
        deadline = Deadline(current_timing().stuck_s)
        outcomes = call_all_with_deadline(
            "hosts",
            [partial(call, root.backend) for root in roots],
            deadline,
            lambda: StorageTimeoutError(f"a host did not answer for {deadline.limit_s:g} s"),
        )
        return zip(roots, outcomes, strict=True)

    def _begin_epoch(self) -> None:
        """Begin the epoch of this job on all hosts, once, before its first change.

        Gives each root the records that count, and then deletes its other records. Publishes the
        new epoch after all roots have the records. So after a crash at any moment, all roots of the
        newest epoch have the records that count, and records in other roots do not count.

        Raises:
            ConfigError: Two hosts have one root, and no record was changed.
            StorageError: A host does not answer. Or its root has records from before it was used
                with `hosts`, and no record was changed.
        """
        with self._lock:
            if not self._leads or self._began:
                return
            self._check_apart()
            records: dict[str, bytes] = {}
            for info in (info for prefix in _RECORDS for info in self.list(prefix)):
                with suppress(BlobNotFoundError):  # not a file
                    records[info.name] = self.read_record(info.name, limit_bytes=info.size_bytes)
            # The time in ms orders jobs that have no host in common.
            epoch = max(int(1000 * current_timing().clock.wall_s()), self._newest + 1)
            hosts = tuple(root.host for root in self.roots)
            newest = max(self.roots, key=lambda root: root.epoch)
            run = newest.run or secrets.token_hex(16)
            there = {root: self._records_of(root) for root in self.roots}
            for root in self.roots:
                self._give(root, records, there[root])
            for root in self.roots:
                record = HostRecord(root.host, epoch, hosts, run)
                root.backend.publish(HOST_NAME, encode_host(record))
            self.roots = tuple(root._replace(epoch=epoch, run=run) for root in self.roots)
            self._known = {}
            self._newest = epoch
            # From here on, records are published in this root first, and deleted in it last.
            self._began = True

    def _check_apart(self) -> None:
        """Refuse roots that are one place, where each file would count as a copy of itself."""
        if len(self.roots) == 1:
            return
        probe = f"clock/{secrets.token_hex(8)}-"
        names = [f"{probe}{number}" for number in range(len(self.roots))]
        left = iter(names)
        try:
            self._at_all(lambda root: root.publish(next(left), b""))
            listed = self._at_all(lambda root: root.list(probe))
        finally:
            self._called(self.roots, lambda root: root.delete(names))
        if shared := [root.host for root in self.roots if len(listed[root]) > 1]:
            msg = (
                f"the hosts {', '.join(shared)} share a root with another host, such as a "
                "folder that they all see: give each host a place of its own"
            )
            raise ConfigError(msg)

    def _records_of(self, root: HostRoot) -> set[str]:
        listed = {info.name for prefix in _RECORDS for info in root.backend.list(prefix)}
        if listed and not root.epoch and self._newest and read_host(root.backend) is None:
            msg = (
                f"the root of host {root.host} has commit records from before it was used with "
                "hosts, and other hosts have newer ones: move it elsewhere, or use an empty path"
            )
            raise StorageError(msg)
        return listed - {HOST_NAME}

    def _give(self, root: HostRoot, records: dict[str, bytes], there: set[str]) -> None:
        if records and self._newest and not root.epoch:
            # Else a crash leaves records that look like records from before the root was used with
            # hosts. Without run and epoch: after a crash, a job on this host alone lacks records,
            # and must not become the last job of the run, which deletes them on the other hosts.
            last = self.last_job()
            assert last is not None
            record = replace(last, host=root.host, epoch=0, run="")
            root.backend.publish(HOST_NAME, encode_host(record))
        counts = root.epoch == self._newest
        for name in sorted(records.keys() - there if counts else records):
            root.backend.publish(name, records[name])
        if not counts and (old := there - records.keys()):
            log.warning(
                "host %s missed a job of this run, so its %d old records are deleted",
                root.host,
                len(old),
            )
            root.backend.delete(sorted(old))
