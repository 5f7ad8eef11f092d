"""Reads the specs of a checkpoint's objects from its manifest: shapes, dtypes, storage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.errors import SelectionError
from penstock.core.format.records import blob_uid
from penstock.core.tree.paths import parse_path, show_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.format.records import ObjectRecord
    from penstock.core.restore.contents import Contents
    from penstock.core.types import Kind, ObjectPath, Region, Role


class Storage(NamedTuple):
    """How an object is stored.

    Attributes:
        shards: The rectangles in which it is stored, each once.
        codecs: The codecs of its frames, in the order of encoding.
        bytes_stored: Its bytes in the blobs of the checkpoint itself. A slab's bytes are divided
            among its objects.
        bytes_borrowed: Its bytes in blobs of other saves: shared frames, and frames that its own
            frames are encoded against.
    """

    shards: tuple[Region, ...]
    codecs: tuple[str, ...]
    bytes_stored: int
    bytes_borrowed: int


def storage_of(record: ObjectRecord, contents: Contents) -> Storage:
    """Return how an object is stored, from the manifest."""
    shards: dict[Region, None] = {}
    codecs: dict[str, None] = {}
    stored = borrowed = 0
    for part in contents.descriptions(record):
        head, frames = part.head, part.frames
        shards |= dict.fromkeys(shard.region for shard in part.shards)
        # Bytes of the object in each frame: a slab's stored bytes are divided among its objects.
        used: dict[int, int] = defaultdict(int)
        for chunk in (chunk for shard in part.shards for chunk in shard.chunks):
            used[chunk.frame] += chunk.stop - chunk.start
            codecs |= dict.fromkeys(link.name for link in head.chains[frames[chunk.frame].chain])
        for number, size in used.items():
            for link in frames[number].links():
                share = round(link.length * size / link.raw_length)
                if blob_uid(head.blobs[link.blob].name) == head.uid:
                    stored += share
                else:
                    borrowed += share
    return Storage(tuple(shards), tuple(codecs), stored, borrowed)


@dataclass(frozen=True, slots=True)
class Rounding:
    """The codecs of some objects that may have changed their values.

    Attributes:
        lossy: Names of the lossy codecs, which have rounded values; sorted.
        unknown: Names of the codecs that may round: they are not installed, or cannot be loaded;
            sorted.
    """

    lossy: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def lossless(self) -> bool | None:
        """Whether the values are exactly those that were saved; None if unknown."""
        if self.lossy:
            return False
        return None if self.unknown else True


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """One object of a checkpoint, and how it is stored. Reads no data.

    `shards`, `codecs`, `bytes_stored` and `bytes_borrowed` are read from the manifest on each
    access. For a tied or derived object, which has no bytes, they are empty or 0.

    Attributes:
        path: The path, as a tuple.
        kind: `"tensor"` or `"value"`.
        form: What it is built as: `"tensor"`, `"ndarray"`, `"json"`, or a form that a plugin
            defines.
        role: `"parameter"`, `"buffer"`, `"optimizer"` or `"other"`.
        dtype: The name of the dtype, such as `"bfloat16"`; for a value `"uint8"`.
        shape: The shape of the whole tensor; for a value its number of bytes.
        bytes_raw: The bytes of its elements; 0 if it is tied, since its owner counts them.
        same_as: The shown path of the object that it is tied to; None if it is not tied.
        derived: The shown path of the master that it is rounded from; None if it is not derived.
    """

    path: ObjectPath
    kind: Kind
    form: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    bytes_raw: int
    same_as: str | None
    derived: str | None
    _record: ObjectRecord = field(repr=False, compare=False)
    _contents: Contents = field(repr=False, compare=False)

    @property
    def shards(self) -> tuple[Region, ...]:
        """The rectangles in which it is stored, each once, whichever ranks stored them."""
        return storage_of(self._record, self._contents).shards

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs of its frames, in the order of encoding; empty if all are raw."""
        return storage_of(self._record, self._contents).codecs

    @property
    def bytes_stored(self) -> int:
        """Its bytes in the blobs of this checkpoint, with its share of a slab."""
        return storage_of(self._record, self._contents).bytes_stored

    @property
    def bytes_borrowed(self) -> int:
        """Its bytes in the blobs of other saves, which the checkpoint also needs."""
        return storage_of(self._record, self._contents).bytes_borrowed


class Specs(Mapping[str, ObjectSpec]):
    """The specs of all objects by shown path, in tree order; each is made on access.

    Looking up one path reads a piece of the index and one section. Iterating reads the whole
    manifest.
    """

    def __init__(self, contents: Contents) -> None:
        """Keep `contents`; nothing is read until a spec is needed."""
        self._contents = contents

    def __getitem__(self, path: object) -> ObjectSpec:
        """Return the spec of the object at `path`.

        Raises:
            KeyError: No object is there. A container is not an object.
        """
        try:
            record = self._contents.find(parse_path(path)) if isinstance(path, str) else None
        except SelectionError:  # the text is not a shown path
            record = None
        if record is None:
            raise KeyError(path)
        return self._made(record)

    def __iter__(self) -> Iterator[str]:
        return (show_path(record.path) for record in self._contents.objects())

    def __len__(self) -> int:
        return self._contents.record.objects

    def __repr__(self) -> str:
        return f"<specs of {len(self)} objects of step {self._contents.record.step}>"

    def _made(self, record: ObjectRecord) -> ObjectSpec:
        tied, master = record.same_as, record.derived
        return ObjectSpec(
            record.path,
            record.kind,
            record.form,
            record.role,
            record.spec.dtype,
            record.spec.shape,
            0 if tied is not None else record.spec.nbytes,
            None if tied is None else show_path(tied),
            None if master is None else show_path(master),
            record,
            self._contents,
        )
