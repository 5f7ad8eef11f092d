"""Defines the records of the manifest, and their names in the store. Sans-IO.

`commit_record` (also for intents and notes), `part`, `section` and `index` read and write their
bytes; `docs/format.md` describes every byte. Every decoder validates names, bounds and digests, and
raises `FormatError`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.limits import MAX_INT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.core.types import Kind, ObjectPath, Region, Role, TensorSpec, WorstErrors

COMMIT_PREFIX = "commits/"
DATA_PREFIX = "data/"
NOTES_PREFIX = "notes/"

_UID = re.compile(r"[0-9a-f]{32}")
_COMMIT = re.compile(r"commits/([0-9]{8,19})-([0-9]{1,19})\.json")
_DATA = re.compile(r"data/([0-9a-f]{32})/.+", re.DOTALL)
_OF_NOTES = re.compile(r"notes/([0-9a-f]{32})/.+", re.DOTALL)
_NOTE = re.compile(r"notes/([0-9a-f]{32})/([0-9]{8})-([0-9a-f]{16})\.json")
_BLOB = re.compile(r"data/([0-9a-f]{32})/blobs/[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class CodecRecord:
    """One link of a chain, as stored."""

    name: str
    version: int
    config: dict[str, Any]


Chain = tuple[CodecRecord, ...]
"""Codecs in the order of encoding; the empty chain is raw."""


@dataclass(frozen=True, slots=True)
class ChoiceRecord:
    """The choice of a rule with `codecs = "auto"` for one class of objects, in one save.

    Attributes:
        objects: The class: role and dtype, `"optimizer float32"`.
        codec: The codec; None keeps the objects raw.
        why: The reason, in words.
    """

    objects: str
    codec: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Frame:
    """The stored form of one chunk in a blob.

    Attributes:
        blob: Number of the blob in the part's table.
        offset: Byte offset in the blob. For raw frames `offset % 4096` is the phase (see
            `PAGE_BYTES`).
        length: Stored bytes.
        raw_length: Bytes of the chunk.
        chain: Number of the chain in the part's table; 0 is raw.
        checksums: xxh3-64 of each block (see `blocks`) of a raw frame, or of all stored bytes of an
            encoded frame.
        raw_checksum: xxh3-64 of the bytes that an encoded frame decodes to; None for a raw frame.
        lengths: Output length of each codec of the chain except the last.
        elements: The dtype name and the bytes per element of an encoded slab of one dtype; None for
            any other frame.
        base: The frame that this one is encoded against; None if its first codec needs no base.
        content: xxh3-128 of the chunk, by which later saves find equal chunks; None if unknown.
    """

    blob: int
    offset: int
    length: int
    raw_length: int
    chain: int
    checksums: tuple[int, ...]
    raw_checksum: int | None = None
    lengths: tuple[int, ...] = ()
    elements: tuple[str, int] | None = None
    base: Frame | None = None
    content: int | None = None

    def links(self) -> Iterator[Frame]:
        """Yield the frame itself, then the bases that it decodes with."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.base


class ChunkRef(NamedTuple):  # a frozen dataclass takes three times as long, once for each chunk
    """Raw bytes `[start, stop)` of a shard are bytes `[at, at + stop - start)` of a frame's chunk.

    `frame` is the number of the frame in its section.
    """

    frame: int
    at: int
    start: int
    stop: int


class ShardRecord(NamedTuple):  # as `ChunkRef`
    """One rank's region of an object, and the chunks with its bytes, in order and without gaps."""

    region: Region
    chunks: tuple[ChunkRef, ...]


class ObjectRecord(NamedTuple):  # as `ChunkRef`
    """One object as one part describes it.

    With `same_as`, it is tied to that object, whose bytes it shares. With `derived`, its elements
    are those of that object, rounded to nearest even. In both cases it has no shards, and the
    errors of that object apply. If several ranks save, `shards` are those of one rank, which may
    hold nothing of the object; the records of the other parts differ only in their shards.

    `frames` are the frames of its section, to which its shards refer by number, and `head` is the
    head of its part. `ordinal` numbers objects and nodes in the order in which the tree was
    described. `errors` are the errors that lossy codecs caused in its elements; None if no lossy
    codec changed it, or if its elements are not floats.
    """

    ordinal: int
    path: ObjectPath
    kind: Kind
    spec: TensorSpec
    role: Role
    form: str
    frames: Sequence[Frame]
    head: PartHead
    shards: tuple[ShardRecord, ...] = ()
    same_as: ObjectPath | None = None
    derived: ObjectPath | None = None
    errors: WorstErrors | None = None


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A container, or a composite such as a module or an optimizer.

    A container without a node is a dict with string keys.
    """

    ordinal: int
    path: ObjectPath
    form: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Section:
    """The unit in which a part is read: a few thousand objects, with their frames."""

    frames: tuple[Frame, ...]
    objects: tuple[ObjectRecord, ...]
    nodes: tuple[NodeRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class BlobRecord:
    """A blob that the part refers to; `length` as sealed."""

    name: str
    length: int


@dataclass(frozen=True, slots=True)
class SectionInfo:
    """The location of one section in a part, and its digest.

    Attributes:
        offset: Byte offset in the part.
        length: Stored bytes.
        raw_length: Bytes once decompressed.
        sha256: Digest of the stored bytes, 64 hex digits.
        objects: Number of objects in it.
        nodes: Number of nodes in it.
        groups: Top-level keys in it; None if there are too many to list.
    """

    offset: int
    length: int
    raw_length: int
    sha256: str
    objects: int
    nodes: int
    groups: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class PartHead:
    """The head of a part: its tables, and the locations of its sections and its shard table.

    `choices` has the codec choice of each class of objects; empty without an `auto` rule.
    """

    uid: str
    rank: int
    world_size: int
    step: int
    block_bytes: int
    blobs: tuple[BlobRecord, ...]
    chains: tuple[Chain, ...]
    shards: SectionInfo
    sections: tuple[SectionInfo, ...]
    choices: tuple[ChoiceRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class PartEntry:
    """A part as the commit record names it. The head has the digests of the rest."""

    name: str
    length: int
    head_length: int
    head_sha256: str

    @property
    def rank(self) -> int:
        """The rank that wrote the part."""
        return int(self.name.rpartition("/")[2].partition(".")[0])


@dataclass(frozen=True, slots=True)
class ManyParts:
    """Replaces the parts in a commit record if the index lists them.

    Attributes:
        count: Number of parts.
        length: Bytes of all parts.
    """

    count: int
    length: int


@dataclass(frozen=True, slots=True)
class BorrowedTable:
    """Replaces borrowed blobs in a commit record: a table at the end of the index lists them.

    Attributes:
        count: Number of blobs.
        length: Bytes of the table, the last bytes of the index.
        sha256: Digest of the table, 64 hex digits.
        saves: The bytes of the borrowed blobs of each save, by uid, ascending.
    """

    count: int
    length: int
    sha256: str
    saves: dict[str, int]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """The index as the commit record names it. The head has the digests of the rest."""

    name: str
    length: int
    head_length: int
    head_sha256: str


@dataclass(frozen=True, slots=True)
class BaseEntry:
    """The earlier checkpoint against which a checkpoint is encoded.

    Attributes:
        uid: The uid of that checkpoint.
        step: Its step.
        age: The number of checkpoints since one without a base, at least 1.
    """

    uid: str
    step: int
    age: int


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The record whose name makes a checkpoint exist.

    Attributes:
        uid: Name of the attempt, 32 hex digits.
        step: Training step, at least 0.
        generation: The highest generation of a step wins. Overwrites are even, compactions are odd.
        created: UTC time of the commit, `YYYY-MM-DDTHH:MM:SSZ`.
        world_size: Number of ranks that saved.
        index: The index.
        parts: One for each rank that stored anything, in order of ranks; empty with `many_parts`.
        objects: Number of objects, tied ones included.
        bytes_raw: Bytes of all objects.
        bytes_stored: Bytes of the save's own blobs.
        codecs: Codecs used, name to version.
        providers: Providers used, name to version.
        borrowed: Blobs of other saves that the parts refer to, ascending by name; empty with
            `many_borrowed`. `survey.borrowed_blobs` has them in either case.
        base: The earlier checkpoint that frames are encoded against; None if there is none.
        compacts: The uid of the checkpoint of the same step that was compacted to this one; empty
            if none was.
        metadata: The user's metadata, JSON.
        penstock: Version of Penstock that wrote the record.
        engine: Name of the engine that wrote the blobs (`"uring"`), for users.
        plugins: Third-party plugins used, such as `"codec acme"`, each with name and version of its
            distribution.
        many_parts: The number and size of the parts if the index lists them; None if `parts` does.
        many_borrowed: The totals of the borrowed blobs by save if the index lists the blobs; None
            if `borrowed` does.
    """

    uid: str
    step: int
    generation: int
    created: str
    world_size: int
    index: IndexEntry
    parts: tuple[PartEntry, ...]
    objects: int
    bytes_raw: int
    bytes_stored: int
    codecs: dict[str, int] = field(default_factory=dict)
    providers: dict[str, int] = field(default_factory=dict)
    borrowed: tuple[BlobRecord, ...] = ()
    base: BaseEntry | None = None
    compacts: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    penstock: str = ""
    engine: str = ""
    plugins: dict[str, str] = field(default_factory=dict)
    many_parts: ManyParts | None = None
    many_borrowed: BorrowedTable | None = None

    @property
    def origin(self) -> str:
        """The uid under which notes on the checkpoint are stored. A compaction keeps it."""
        return self.compacts or self.uid

    @property
    def part_count(self) -> int:
        """The number of parts, wherever they are listed."""
        return len(self.parts) if self.many_parts is None else self.many_parts.count

    @property
    def bytes_needed(self) -> int:
        """The bytes of all blobs that the checkpoint needs, borrowed ones included."""
        return self.bytes_stored + self.bytes_borrowed

    @property
    def bytes_borrowed(self) -> int:
        """The bytes of the borrowed blobs, wherever they are listed."""
        if self.many_borrowed is not None:
            return sum(self.many_borrowed.saves.values())
        return sum(blob.length for blob in self.borrowed)

    @property
    def references(self) -> tuple[str, ...]:
        """The uids of the other saves whose blobs the checkpoint needs, ascending."""
        if self.many_borrowed is not None:
            return tuple(self.many_borrowed.saves)
        return tuple(sorted({uid for blob in self.borrowed if (uid := blob_uid(blob.name))}))


@dataclass(frozen=True, slots=True)
class IntentRecord:
    """The record of a save in flight. It stays after the commit, until the data of its uid goes.

    Attributes:
        uid: Name of the attempt.
        step: Training step.
        references: Other uids whose blobs the save will refer to, ascending.
        host: Name of the saver's machine, for users.
        pid: Process id of the saver there, for users.
        started: When the save began, in the form of `CommitRecord.created`.
        refreshed: When this record was last written; its age counts by the store's clock.
        process: Identity of the saver's process on its machine, by which another process there
            detects that the saver has ended. Empty if unknown.
        place: URL under which the saver writes. The same data at another place is a copy.
    """

    uid: str
    step: int
    references: tuple[str, ...] = ()
    host: str = ""
    pid: int = 0
    started: str = ""
    refreshed: str = ""
    process: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """Metadata and tags that were added to a checkpoint after its commit.

    Attributes:
        uid: The `origin` of the checkpoint.
        number: Its place among the notes on that checkpoint; later notes override earlier ones.
        id: Random, 16 hex digits, since two writers may choose the same number.
        metadata: The user's metadata, JSON.
        tags: For each tag, True if the note sets the tag, False if the note removes the tag.
    """

    uid: str
    number: int
    id: str
    metadata: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name under which the note is stored."""
        return f"{notes_prefix(self.uid)}{self.number:08d}-{self.id}.json"


def is_uid(text: str) -> bool:
    """Return whether `text` is a well-formed uid."""
    return _UID.fullmatch(text) is not None


def commit_name(step: int, generation: int) -> str:
    """Return the name of a commit record."""
    return f"{COMMIT_PREFIX}{step:08d}-{generation}.json"


def parse_commit_name(name: str) -> tuple[int, int] | None:
    """Return step and generation of a commit record's name; None if `name` is not one."""
    match = _COMMIT.fullmatch(name)
    if match is None:
        return None
    step, generation = int(match[1]), int(match[2])
    if max(step, generation) > MAX_INT or commit_name(step, generation) != name:
        return None
    return step, generation


def generation_above(names: Iterable[str]) -> int:
    """Return the generation that overwrites commit records of these names, all of one step.

    It is even, and higher than the generation of a compaction of any of them, which is odd. So a
    compaction never takes the name of an overwrite, even in another tier, and never hides an
    overwrite that has begun.
    """
    parsed = [parse_commit_name(name) for name in names]
    highest = max((generation for _, generation in filter(None, parsed)), default=None)
    return 0 if highest is None else compacted_generation(highest) + 1


def compacted_generation(generation: int) -> int:
    """Return the generation of the compaction of a checkpoint of this generation."""
    return (generation + 1) | 1


def notes_prefix(origin: str) -> str:
    """Return the prefix of all notes on checkpoints of one origin."""
    return f"{NOTES_PREFIX}{origin}/"


def notes_origin(name: str) -> str | None:
    """Return the origin that a name below `notes/` belongs to; None for any other name."""
    match = _OF_NOTES.fullmatch(name)
    return match[1] if match else None


def note_number(name: str) -> int:
    """Return the number of a note; 0 if `name` is not the name of a note."""
    match = _NOTE.fullmatch(name)
    return int(match[2]) if match else 0


def data_prefix(uid: str) -> str:
    """Return the prefix of all names of one attempt's data."""
    return f"{DATA_PREFIX}{uid}/"


def mark_name(uid: str) -> str:
    """Return the name of the mark that an attempt has yet to be copied to the next tier."""
    return f"{data_prefix(uid)}drain.json"


def staying_name(uid: str) -> str:
    """Return the name of the mark that keeps an attempt from being copied to the next tier."""
    return f"{data_prefix(uid)}stays.json"


def lease_name(uid: str) -> str:
    """Return the name of the lease of a copy that writes the data of an attempt."""
    return f"{data_prefix(uid)}copy.json"


def intent_name(uid: str) -> str:
    """Return the name of an attempt's intent."""
    return f"{data_prefix(uid)}intent.json"


def index_name(uid: str) -> str:
    """Return the name of an attempt's index."""
    return f"{data_prefix(uid)}index"


def part_name(uid: str, rank: int) -> str:
    """Return the name of the part that `rank` writes."""
    return f"{data_prefix(uid)}parts/{rank:05d}.json.zst"


def blob_name(uid: str, rank: int, number: int, kind: str) -> str:
    """Return the name of a blob; `kind` is `"raw"` or `"enc"`."""
    return f"{data_prefix(uid)}blobs/{rank:05d}-{number}.{kind}"


def data_uid(name: str) -> str | None:
    """Return the uid that a name below `data/` belongs to; None for any other name."""
    match = _DATA.fullmatch(name)
    return match[1] if match else None


def borrowed_from(blobs: Iterable[BlobRecord], uid: str) -> tuple[BlobRecord, ...]:
    """Return the blobs that belong to other saves than `uid`, ascending by name."""
    foreign = [blob for blob in blobs if blob_uid(blob.name) != uid]
    return tuple(sorted(foreign, key=lambda blob: blob.name))


def blob_uid(name: str) -> str | None:
    """Return the uid of a well-formed blob name; None for any other name."""
    match = _BLOB.fullmatch(name)
    return match[1] if match else None
