"""Divides hosts into groups that hold copies of each other's files. Sans-IO.

This is the mixed placement of GEMINI (SOSP'23), over fault domains instead of hosts. A group has
1 + copies hosts. If that does not divide the number of hosts, the last group is larger, and each
file goes from its writer to the next hosts in the ring. So a file is lost only if 1 + copies
neighbors of one ring are lost together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet


@dataclass(frozen=True)  # without slots, for `cached_property`
class HostGroups:
    """The hosts of a job in groups, each of which is a ring.

    Attributes:
        groups: The hosts of each group in the order of its ring.
        size: The number of hosts that hold each file, including the file's writer.
    """

    groups: tuple[tuple[str, ...], ...]
    size: int

    def is_safe(self, holders: AbstractSet[str]) -> bool:
        """Return whether one group has enough holders of a file.

        Only then does the file survive the loss of any `size` - 1 hosts of every group. The same
        number of holders spread over several groups is not enough, because each group could lose
        its few holders.
        """
        return len(holders) >= self.size and self._most_holders(holders)[1] >= self.size

    def receivers(self, holders: AbstractSet[str]) -> list[str]:
        """Return the hosts that must get a copy of a file; empty if the file is safe.

        The receivers follow a holder in the ring of the group with the most holders. The writer of
        a new file is its only holder, so the writer's next neighbors receive the file. Hosts that
        ask at different times may choose different neighbors, which costs an extra copy at worst.
        """
        group, count = self._most_holders(holders)
        if not 0 < count < self.size:
            return []
        windows = [
            [group[(start + i) % len(group)] for i in range(self.size)]
            for start, host in enumerate(group)
            if host in holders
        ]
        best = max(windows, key=lambda window: len(holders & set(window)))
        return [host for host in best if host not in holders][: self.size - count]

    def _most_holders(self, holders: AbstractSet[str]) -> tuple[tuple[str, ...], int]:
        """Return the first group with the most holders, and the number of its holders."""
        counts = Counter(self._numbers[host] for host in holders if host in self._numbers)
        number = min(counts, key=lambda number: (-counts[number], number), default=0)
        return self.groups[number], counts[number]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {host: number for number, group in enumerate(self.groups) for host in group}


def group_hosts(domains: Mapping[str, str], copies: int) -> HostGroups:
    """Divide hosts into groups whose members share no fault domain, where possible.

    The result depends only on the arguments, not on the order of the hosts.

    Args:
        domains: Each host's fault domain: a label such as its rack, or the host itself.
        copies: The number of copies besides the writer's file. If there are fewer other hosts, each
            of them holds a copy.
    """
    size = min(1 + copies, len(domains))
    left: defaultdict[str, list[str]] = defaultdict(list)
    for host in sorted(domains, reverse=True):
        left[domains[host]].append(host)
    groups = []
    remaining = len(domains)
    while remaining:
        count = size if remaining >= 2 * size else remaining
        group: list[str] = []
        while len(group) < count:
            # Largest domains first: else the last groups would get only hosts of one large domain.
            largest = sorted(left, key=lambda domain: (-len(left[domain]), left[domain][-1]))
            group += [left[domain].pop() for domain in largest[: count - len(group)]]
            left = defaultdict(list, {domain: hosts for domain, hosts in left.items() if hosts})
        groups.append(tuple(group))
        remaining -= count
    return HostGroups(tuple(groups), size)
