"""Names of keys, and their contents.

| key | type | holds |
|---|---|---|
| `penstock:<prefix>:root` | hash | a field per group, and a counter |
| `penstock:<prefix>:group:<group>` | hash | an entry per name of the group, and its birth |
| `penstock:<prefix>:chunk:<id>:<n>` | string | the n-th chunk of a blob, or a whole record |
| `penstock:<prefix>:dead` | hash | ids of blobs that were given up: late writes may yet come |

The names of a group expire together: those that share their first two segments. All data of one
save is one group, each commit record is another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_UID = re.compile(rb"(?<![0-9A-Za-z])[0-9a-f]{32}(?![0-9A-Za-z])")


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of the keys of one root."""

    prefix: str

    @property
    def base(self) -> str:
        """The prefix of all keys."""
        return f"penstock:{self.prefix}"

    @property
    def root(self) -> str:
        """The hash of groups."""
        return f"{self.base}:root"

    def group(self, group: str) -> str:
        """The hash of one group's entries."""
        return f"{self.base}:group:{group}"

    def chunk(self, blob: str, number: int) -> str:
        """One chunk of the blob of that id."""
        return f"{self.base}:chunk:{blob}:{number}"


@dataclass(frozen=True, slots=True)
class Entry:
    """The record of one name in a root; the scripts write it as words.

    Attributes:
        sealed: Whether readers may see it.
        blob: Random id: no two blobs share chunks, even if a name is used again.
        size_bytes: Of an unsealed blob: the announced size.
        chunk_bytes: Of a record: its size, at least 1.
        modified_us: By the server's clock.
    """

    sealed: bool
    blob: str
    size_bytes: int
    chunk_bytes: int
    modified_us: int

    @classmethod
    def parse(cls, words: bytes) -> Entry:
        """The entry in a field of a group."""
        state, blob, size, chunk, modified, _ = words.decode().split(" ")
        return cls(state == "S", blob, int(size), int(chunk), int(modified))


def group_of(name: str) -> str:
    """The group that `name` lives and expires with."""
    return "/".join(name.split("/", 2)[:2])


def groups_named(name: str, data: bytes) -> list[str]:
    """Groups other than its own whose uid stands in a record; what it needs to be of any use."""
    uids = sorted({match.decode() for match in _UID.findall(data)})
    return [group for group in (f"data/{uid}" for uid in uids) if group != group_of(name)]
