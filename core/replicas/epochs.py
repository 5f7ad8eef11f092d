"""How commit records are deleted on several hosts: by a new epoch without them. Sans-IO.

A deletion of one host after another would not hold: a host that did not answer, or that copies the
record from the next one meanwhile, would bring it back. So rank 0 proposes a higher epoch with the
records that remain. Its own host joins first, and from then on only records in roots of the new
epoch count. Each host that joins makes its records equal to the proposal's before it writes the
epoch into its root, in this order: `is_late`, `resets`, `copied`, `is_late` again, `deleted`. A
host that does not answer keeps the earlier epoch, and may join a later one.

A job proposes its first epoch before its first commit, once all its hosts have answered. It
publishes commit records only in a root that has its epoch. A host copies a commit record only from
a root of its own epoch, and publishes it only if its epoch is still the same; one lock in each
host covers the check and the publish.
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
    """What rank 0 asks each host to do.

    Attributes:
        epoch: The epoch to write into the root, after everything else.
        members: The hosts that are asked.
        records: The commit records that remain.
        before: The epoch of the roots that have these records. So do roots that have joined.
    """

    epoch: Epoch
    members: frozenset[str]
    records: tuple[str, ...]
    before: Epoch

    def is_late(self, root: RootListing) -> bool:
        """Return whether a root has joined this epoch or a later one, so that nothing is to do.

        Only `epoch` in the root confirms the proposal.
        """
        return root.epoch >= self.epoch

    def resets(self, root: RootListing) -> Epoch:
        """Return the epoch that a host writes into its root before it changes a record.

        A host of an earlier epoch must not count with the others of it: if it is killed halfway, it
        has records of two epochs. But it must count more than hosts of still earlier epochs.
        """
        return root.epoch if root.epoch == self.before else Epoch(root.epoch.number)

    def copied(self, root: RootListing) -> list[str]:
        """Return the records that a host must copy, before it deletes any.

        A copy replaces a record of the same name, which may be of another checkpoint. If hosts
        deleted first, and the host with the only other copy were lost, a record would be lost.
        """
        return [n for n in self.records if root.epoch != self.before or n not in root.files]

    def deleted(self, root: RootListing) -> list[str]:
        """Return the records that a host must delete.

        One lock covers the listing of the root, the deletions, and the write of the epoch. Else a
        record whose copy from another host arrives in between would count again.
        """
        return sorted(set(filter(is_record, root.files)).difference(self.records))


def propose_epoch(
    holdings: Holdings, *, job: str, now_s: float, without: Collection[str] = ()
) -> EpochProposal:
    """Return a proposal of rank 0 to all hosts that answered.

    The number is at least the time, so that a job wins over an earlier job of which it sees no
    host. Data of deleted records is deleted, and the deletion reported, once the hosts that have
    joined would keep a file safe (`HostGroups.is_safe`): until then losses could bring it back.

    Args:
        holdings: The roots of all hosts that answered, rank 0's included.
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
