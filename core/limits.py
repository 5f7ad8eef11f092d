"""Limits of the stored format. Writers and readers share them, so that they agree.

A reader refuses anything beyond a limit before it allocates memory. A writer refuses it before it
stores anything, since no reader would accept it. `docs/format.md` lists the limits.
"""

from __future__ import annotations

MAX_INT = (1 << 62) - 1
"""Largest count, offset, dimension or step, so that a sum of two fits into 64 bits everywhere."""

# -- state trees ----------------------------------------------------------------------------------

MAX_SEGMENTS = 1024
"""Maximum segments of a path that a reader accepts."""

MAX_SAVED_SEGMENTS = 128
"""Maximum segments of a path that a saver writes.

Rebuilding nested containers takes two to three nested calls for each level, and a value in them
takes up to four hundred. Python allows a thousand, so every saved tree can be rebuilt.
"""

MAX_PATH_CHARS = 1 << 16
"""Maximum characters of a path, all segments together, that a saver writes."""

MAX_KEY_DIGITS = 4300
"""Maximum decimal digits of an integer key of a container: Python's own default limit."""

MAX_DIMENSIONS = 64
"""Maximum dimensions of a tensor: numpy's limit."""

MAX_ITEMSIZE = 1 << 20
"""Maximum bytes of one element."""

MAX_METADATA_DEPTH = 100
"""Maximum levels of dicts and lists in the user's metadata, and in the `meta` of a node."""

METADATA_LIMIT_BYTES = 16 << 20
"""Maximum bytes of the user's metadata, as JSON."""

NOTE_LIMIT_BYTES = 64 << 10
"""Maximum bytes of a note; readers refuse a larger one unread."""

MAX_NOTES = 1000
"""Maximum notes that a writer adds to a checkpoint: listing the checkpoint reads each of them."""

# -- codecs and blobs -----------------------------------------------------------------------------

MAX_CHUNK_BYTES = 1 << 30
"""Maximum raw bytes of a chunk, which a reader must be able to hold in memory."""

MIN_CHUNK_BYTES = 2048
"""A saver cuts no smaller chunks out of an object, except the first and the last chunk.

A chunk consists of whole pages, less a remainder if the element size does not divide a page.
"""

SPARE_CHUNKS = 16
"""Chunks that an object may have in addition to one for each `MIN_CHUNK_BYTES`."""

MAX_BLOCK_BYTES = 1 << 30
"""Maximum bytes under one checksum."""

MAX_CODECS = 16
"""Maximum codecs of a chain."""

MAX_CODEC_NAME_CHARS = 64

MAX_LINKS = 64
"""Maximum frames that decoding one chunk needs: its own frame, and the bases below it."""

# -- records --------------------------------------------------------------------------------------

RECORD_LIMIT_BYTES = 64 << 20
"""Maximum bytes of a commit record or an intent; readers refuse a larger one unread."""

MAX_GROUPS = 16
"""The head of a part lists the top-level keys of a section only if it has at most this many."""

MAX_FRAME_BYTES = 1 << 28
"""Maximum decompressed bytes of any frame of a part: a reader holds one frame at a time."""

MAX_STORED_FRAME_BYTES = MAX_FRAME_BYTES + (1 << 20)
"""Maximum stored bytes of a frame of a part: incompressible data grows a little."""

MAX_RATIO = 256
RATIO_FREE_BYTES = 16 << 20
"""A part may decompress to this many bytes, or to `MAX_RATIO` times its stored bytes: the larger.

Decoded JSON takes up to 24 times as much memory as its text, so without a limit a few stored
kilobytes could ask for gigabytes.
"""

MAX_LISTED_PARTS = 16
"""Maximum parts that a commit record lists itself; if there are more, the index lists them."""

MAX_LISTED_BORROWED = 64
"""Maximum borrowed blobs that a saver lists in a commit record; a longer list is in the index."""

MAX_OBJECTS = 1 << 24
"""Maximum objects of each part: a part has no room for the shards of more objects."""

MAX_INDEX_HEAD_BYTES = 64 << 20
"""Maximum bytes of an index's head, which is held in memory: enough for billions of shards."""

FEW_KEYS = 256
MAX_STEPS = 128
"""Maximum probe steps per key, on average, in a set or dict with more than `FEW_KEYS` keys."""


def max_decompressed(stored_bytes: int) -> int:
    """Return the most bytes that `stored_bytes` of a part may decompress to."""
    return max(RATIO_FREE_BYTES, MAX_RATIO * stored_bytes)


def max_chunks(nbytes: int) -> int:
    """Return the most chunks that an object of `nbytes` may have."""
    return SPARE_CHUNKS + nbytes // MIN_CHUNK_BYTES


def depth_of(value: object) -> int:
    """Return the depth of nested containers in `value`; stop just beyond `MAX_METADATA_DEPTH`.

    Does not recurse, so it ends for any value, even a value that contains itself.
    """
    depth = 0
    level = [value]
    while depth <= MAX_METADATA_DEPTH:
        inner = [v for v in level if isinstance(v, dict | list | tuple)]
        if not inner:
            break
        depth += 1
        unique = {id(v): v for v in inner}.values()  # visits a shared container once
        level = [child for v in unique for child in (v.values() if isinstance(v, dict) else v)]
    return depth
