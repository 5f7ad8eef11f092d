"""Deletes commit records on several hosts, by a new epoch without these records. Sans-IO.

Each root has an epoch, and commit records count only in roots of the highest epoch. Deleting a
record on one host after another would not be final: a host that did not answer would bring the
record back, and so would a host that copies it meanwhile from a host that still has it. So rank 0
proposes a higher epoch with the records that remain. Rank 0's own host joins first, and from then
on only records in roots of the new epoch count. Each host that joins makes its records equal to the
proposal's before it writes the epoch into its root, in this order: `is_late`, `resets`, `copied`,
`is_late` again, `deleted`. A host that does not answer keeps the earlier epoch, and may join a
later one.

A job proposes its first epoch before its first commit, once all its hosts have answered. It
publishes commit records only in a root that has its epoch. A host copies a commit record only from
a root of its own epoch, and publishes the copy only if its epoch is still the same. One lock in
each host covers the check and the publish.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.replicas.holdings import Epoch, is_record

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.core.replicas.holdings import Holdings, RootListing


@dataclass(frozen=True, slots=True)
class EpochProposal:
    """Rank 0's request to each host to join a new epoch.

    Attributes:
        epoch: The epoch to write into the root, after everything else.
        members: The hosts that are asked to join.
        records: The commit records that remain.
        before: The previous epoch. A host that joins copies records only from roots of that epoch,
            or from roots that have already joined.
    """

    epoch: Epoch
    members: frozenset[str]
    records: tuple[str, ...]
    before: Epoch

    def is_late(self, root: RootListing) -> bool:
        """Return whether a root is already in this epoch or a later one, and has nothing to do.

        A root has joined this proposal only if its epoch equals `epoch`.
        """
        return root.epoch >= self.epoch

    def resets(self, root: RootListing) -> Epoch:
        """Return the epoch that a host writes into its root before it changes a record.

        A root of the epoch `before` keeps its epoch. A root of an earlier epoch keeps only the
        number, without the job. If its host is killed halfway, the root has records of two epochs,
        and must not count like the roots that have only records of its old epoch. But it must rank
        above roots of still earlier epochs.
        """
        return root.epoch if root.epoch == self.before else Epoch(root.epoch.number)

    def copied(self, root: RootListing) -> list[str]:
        """Return the records that a host must copy, before it deletes any.

        A copy replaces a record of the same name, which may belong to another checkpoint. If hosts
        deleted records before they copied, the loss of one host could lose a record's last copy.
        """
        return [n for n in self.records if root.epoch != self.before or n not in root.files]

    def deleted(self, root: RootListing) -> list[str]:
        """Return the records that a host must delete.

        One lock must cover the listing of the root, the deletions, and the write of the epoch. Else
        a record that is copied from another host in between would count again.
        """
        return sorted(set(filter(is_record, root.files)).difference(self.records))


def propose_epoch(
    holdings: Holdings, *, job: str, now_s: float, without: Collection[str] = ()
) -> EpochProposal:
    """Return rank 0's proposal to all hosts that answered.

    The epoch's number is at least the time in milliseconds, so that this job wins over an earlier
    job even if it sees none of that job's hosts.

    The caller deletes the data of the deleted records, and reports the deletion, only after enough
    hosts have joined to keep a file safe (`HostGroups.is_safe`). Until then, the loss of hosts
    could bring the records back.

    Args:
        holdings: The roots of all hosts that answered, including rank 0's.
        job: A random name, the same for the whole job.
        now_s: The time in seconds since 1970.
        without: The commit records to delete.
    """
    return EpochProposal(
        epoch=Epoch(max(holdings.epoch.number + 1, int(now_s * 1000)), job),
        members=frozenset(holdings.roots),
        records=tuple(name for name in holdings.records() if name not in without),
        before=holdings.epoch,
    )
