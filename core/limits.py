"""Limits of the stored format. Writers and readers share them, so that they agree.

A reader refuses anything beyond a limit before it allocates memory. A writer refuses it before it
stores anything, since no reader would accept it. `docs/format.md` lists the limits.
"""

from __future__ import annotations

MAX_INT = (1 << 62) - 1
"""Largest count, offset, dimension or step, so that a sum of two fits into 64 bits everywhere."""

# -- state trees ----------------------------------------------------------------------------------

MAX_SEGMENTS = 1024
"""Most segments of a path that a reader accepts."""

MAX_SAVED_SEGMENTS = 128
"""Most segments of a path that a saver writes.

Building a container takes two to three nested calls for each level, and a value in it up to four
hundred. Python allows a thousand, so every saved tree can be rebuilt.
"""

MAX_PATH_CHARS = 1 << 16
"""Most characters of all segments of a path that a saver writes."""

MAX_KEY_DIGITS = 4300
"""Most decimal digits of an integer that is a key of a container: Python's own default limit."""

MAX_DIMENSIONS = 64
"""Most dimensions of a tensor: numpy's limit."""

MAX_ITEMSIZE = 1 << 20
"""Most bytes of one element."""

MAX_METADATA_DEPTH = 100
"""Most levels of dicts and lists in the user's metadata, and in the `meta` of a node."""

METADATA_LIMIT_BYTES = 16 << 20
"""Most bytes of the user's metadata, as JSON."""

NOTE_LIMIT_BYTES = 64 << 10
"""Most bytes of a note; readers refuse a larger one unread."""

MAX_NOTES = 1000
"""Most notes that a writer adds to a checkpoint: each takes a read wherever it is listed."""

# -- codecs and blobs -----------------------------------------------------------------------------

MAX_CHUNK_BYTES = 1 << 30
"""Most raw bytes of a chunk, which a reader must be able to hold in memory."""

MIN_CHUNK_BYTES = 2048
"""A saver cuts no smaller chunks out of an object, except the first and the last.

A chunk is whole pages, less a remainder if the element size does not divide a page.
"""

SPARE_CHUNKS = 16
"""Chunks that an object may have beyond one for each `MIN_CHUNK_BYTES`."""

MAX_BLOCK_BYTES = 1 << 30
"""Most bytes under one checksum."""

MAX_CODECS = 16
"""Most codecs of a chain."""

MAX_CODEC_NAME_CHARS = 64

MAX_LINKS = 64
"""Most frames that decoding one chunk needs: its own frame, and the bases below it."""

# -- records --------------------------------------------------------------------------------------

RECORD_LIMIT_BYTES = 64 << 20
"""Most bytes of a commit record or an intent; readers refuse a larger one unread."""

MAX_GROUPS = 16
"""A section with more top-level keys does not list them in the head."""

MAX_FRAME_BYTES = 1 << 28
"""Most decompressed bytes of any frame of a part: a reader holds one frame at a time."""

MAX_STORED_FRAME_BYTES = MAX_FRAME_BYTES + (1 << 20)
"""Most stored bytes of a frame of a part: incompressible data grows a little."""

MAX_RATIO = 256
RATIO_FREE_BYTES = 16 << 20
"""A part may decompress to this many bytes, or to `MAX_RATIO` times its stored bytes.

Decoded JSON takes up to 24 times its text, so a few stored kilobytes could ask for gigabytes.
"""

MAX_LISTED_PARTS = 16
"""Most parts that a commit record lists itself; the index lists more."""

MAX_LISTED_BORROWED = 64
"""Most blobs of other saves that a saver lists in a commit record; more go to the index."""

MAX_OBJECTS = 1 << 24
"""Most objects of each part: a part has no room for the shards of more objects."""

MAX_INDEX_HEAD_BYTES = 64 << 20
"""Most bytes of an index's head, which is held in memory: enough for billions of shards."""

FEW_KEYS = 256
MAX_STEPS = 128
"""Most probe steps per key, on average, in a set or dict with more than `FEW_KEYS` keys."""


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
        unique = {id(v): v for v in inner}.values()  # shared parts count once
        level = [child for v in unique for child in (v.values() if isinstance(v, dict) else v)]
    return depth
