"""Which hosts hold which files, which files count, and which must still be copied. Sans-IO.

A root on a host outlives jobs, so a host may return with records of checkpoints that were deleted
or rewound while it was away. So each root has an epoch, and commit records count only in roots of
the highest epoch. All other files count in every root: their names have a uid, and readers verify
checksums.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.format.records import COMMIT_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.core.replicas.placement import HostGroups


@dataclass(frozen=True, slots=True)
class RootListing:
    """The root of one host, as listed.

    Attributes:
        host: The host.
        epoch: The epoch in the record of the root.
        files: The size of each sealed file in bytes, by name.
    """

    host: str
    epoch: int
    files: Mapping[str, int]


class Holdings:
    """The files of all hosts that answered.

    In all methods, `files` maps the files of one checkpoint to their sizes in bytes: its commit
    record, index, parts and blobs, including the blobs that it borrows from other checkpoints.
    """

    def __init__(self, roots: Iterable[RootListing]) -> None:
        """Index the files of these roots by name."""
        self.roots = {root.host: root for root in roots}
        newest = max((root.epoch for root in self.roots.values()), default=0)
        self.counting = {host for host, root in self.roots.items() if root.epoch == newest}
        """The hosts whose commit records count."""
        self._sizes: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for host, root in self.roots.items():
            for name, size in root.files.items():
                if self._counts(host, name):
                    self._sizes[name][host] = size

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of each file that counts: the largest, if hosts have several."""
        return {name: max(sizes.values()) for name, sizes in self._sizes.items()}

    def holders(self, name: str, size_bytes: int) -> set[str]:
        """Return the hosts that have a file in its full length, if it counts there."""
        sizes = self._sizes.get(name, {})
        return {host for host, size in sizes.items() if size == size_bytes}

    def unsafe(self, files: Mapping[str, int], groups: HostGroups) -> list[str]:
        """Return the files with too few copies. A checkpoint without such files is replicated."""
        return [n for n, size in files.items() if not groups.is_safe(self.holders(n, size))]

    def pulls(self, files: Mapping[str, int], groups: HostGroups) -> dict[str, list[str]]:
        """Return the files that each host must copy; hosts that must copy none are left out.

        This serves new checkpoints. After a job has started on other hosts, it also serves old
        checkpoints that have lost copies.
        """
        pulls: defaultdict[str, list[str]] = defaultdict(list)
        for name, size in files.items():
            for host in groups.receivers(self.holders(name, size)):
                if self._counts(host, name):
                    pulls[host].append(name)
        return dict(pulls)

    def _counts(self, host: str, name: str) -> bool:
        return host in self.counting or not name.startswith(COMMIT_PREFIX)
