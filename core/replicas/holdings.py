"""Which hosts hold which files, which files count, and which must still be copied. Sans-IO.

A root on a host outlives jobs, so a host may return with records of checkpoints that were deleted
or rewound while it was away. So each root has an epoch, and commit records count only in roots of
the highest epoch. All other files count in every root: their names have a uid, and readers verify
checksums.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.format.records import COMMIT_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.core.replicas.placement import HostGroups


class Epoch(NamedTuple):
    """How recent the commit records of a root are: only those of the highest epoch count.

    Attributes:
        number: Higher than all earlier numbers that the job could see.
        job: A random name, so that two jobs that do not see each other never share an epoch.
    """

    number: int = 0
    job: str = ""


@dataclass(frozen=True, slots=True)
class RootListing:
    """The root of one host, as listed.

    Attributes:
        host: The host.
        epoch: The epoch in the record of the root.
        members: The hosts that were asked to join that epoch.
        files: The size of each sealed file in bytes, by name.
    """

    host: str
    epoch: Epoch
    members: frozenset[str]
    files: Mapping[str, int]


def is_record(name: str) -> bool:
    """Return whether a file is a commit record. These count only in the highest epoch."""
    return name.startswith(COMMIT_PREFIX)


class Holdings:
    """The files of all hosts that answered.

    In all methods, `files` maps the files of one checkpoint to their sizes in bytes: its commit
    record, index, parts and blobs, including the blobs that it borrows from other checkpoints.
    """

    def __init__(self, roots: Iterable[RootListing]) -> None:
        """Index the files of these roots by name."""
        self.roots = {root.host: root for root in roots}
        self.epoch = max((root.epoch for root in self.roots.values()), default=Epoch())
        """The highest epoch."""
        self.counting = {root.host for root in self.roots.values() if root.epoch == self.epoch}
        """The hosts whose commit records count."""
        self._sizes: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for host, root in self.roots.items():
            for name, size in root.files.items():
                if host in self.counting or not is_record(name):
                    self._sizes[name][host] = size

    @property
    def absent(self) -> set[str]:
        """The hosts that were asked to join the highest epoch but have not answered this time.

        They may have files that are missing elsewhere, and records that count. So the command
        line, which has no job, deletes nothing while a host is absent.
        """
        asked = (self.roots[host].members for host in self.counting)
        return set().union(*asked).difference(self.roots)

    def records(self) -> list[str]:
        """Return the names of the commit records that count, ascending."""
        return sorted(filter(is_record, self._sizes))

    def holders(self, name: str, size_bytes: int) -> set[str]:
        """Return the hosts that have a file in its full length, if it counts there."""
        sizes = self._sizes.get(name, {})
        return {host for host, size in sizes.items() if size == size_bytes}

    def missing(self, files: Mapping[str, int]) -> list[str]:
        """Return the files that no host has. A checkpoint counts only if no file is missing."""
        return [name for name, size in files.items() if not self.holders(name, size)]

    def unsafe(self, files: Mapping[str, int], groups: HostGroups) -> list[str]:
        """Return the files with too few copies. A checkpoint without such files is replicated."""
        return [n for n, size in files.items() if not groups.is_safe(self.holders(n, size))]

    def pulls(self, files: Mapping[str, int], groups: HostGroups) -> dict[str, list[str]]:
        """Return the files that each host must copy; hosts that must copy none are left out.

        This serves new checkpoints. After a job has started on other hosts, it also serves old
        checkpoints that have lost copies. A host outside the highest epoch must join it before it
        copies a record.
        """
        pulls: defaultdict[str, list[str]] = defaultdict(list)
        for name, size in files.items():
            for host in groups.receivers(self.holders(name, size)):
                if host in self.counting or not is_record(name):
                    pulls[host].append(name)
        return dict(pulls)
