"""Tells which stored values lossy codecs have rounded, by the manifest and the codecs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.plan.restore import Located
    from penstock.core.plugins.registry import Registry
    from penstock.core.restore.contents import Contents


@dataclass(frozen=True, slots=True)
class Rounding:
    """The codecs of some objects that may have changed their values.

    Attributes:
        lossy: Names of the lossy codecs, sorted: values are as these have rounded them.
        unknown: Names of the codecs that are not installed, or cannot be loaded, sorted: whether
            they round is not known.
    """

    lossy: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def lossless(self) -> bool | None:
        """Whether the values are exactly those that were saved; None: that is not known."""
        if self.lossy:
            return False
        return None if self.unknown else True


def rounding_of(contents: Contents, objects: Iterable[Located], registry: Registry) -> Rounding:
    """Return which codecs of `objects` round; reads no data.

    A tied object is rounded if the object that it is tied to is, as is a derived one.
    """
    used: set[tuple[int, int]] = set()
    for located in objects:
        stored = contents.master(contents.owner(located))
        for one in contents.descriptions(stored):
            for shard in one.record.shards:
                used.update((one.part, one.frames[chunk.frame].chain) for chunk in shard.chunks)
    names = {
        link.name for part, number in used for link in contents.manifest.head(part).chains[number]
    }
    is_lossless = {name: registry.is_lossless(name) for name in sorted(names)}
    return Rounding(
        tuple(name for name, lossless in is_lossless.items() if lossless is False),
        tuple(name for name, lossless in is_lossless.items() if lossless is None),
    )
