"""Damage that carries right digests: what stands behind every checksum has to bear it as well.

One case is a string of bytes, whoever made it: hypothesis, `tools/fuzz.py`, or `tests/corpus`.
"""

from __future__ import annotations

import copy
import json
import struct

from penstock.core.format.strict_json import dump_json
from penstock.core.format.zstd import compress, decompress, digest

INTEGERS = (
    -1, 0, 1, 2, 3, 63, 64, 255, 4095, 4096, 1 << 16, 1 << 20, 1 << 28, 1 << 30, (1 << 30) + 1,
    (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 53, (1 << 62) - 1, 1 << 62, 1 << 63, 1 << 64, 10**30,
)  # fmt: skip
TEXTS = (
    "", ".", "..", "../..", "/etc/passwd", "\0", "\ud800", "a" * 300, "x/" * 200, "None", "-1",
    "1_0", "9" * 40, "tensor", "json", "pickle", "ndarray", "dict", "list", "tuple", "module",
    "optimizer", "optimizer_parameter", "stateful", "rng", "grads", "value", "parameter", "uint8",
    "float32", "complex128", "bool", "bits8", "quint8", "S9", "O", "V8", "M8[s]", ">i2", "U3",
    "nn", "_lazy_modules", "int", "defaultdict", "OrderedDict", "os:path", "builtins:eval",
    "collections:OrderedDict", "00" * 8, "ff" * 16, "ff" * 32, "zstd", "lz4", "no such codec",
)  # fmt: skip
OTHERS = (None, True, False, 0.0, -1.5, 1e308, float("nan"), float("inf"), [], {}, [[]], {"$": []})


class Choices:
    """Numbers out of a string of bytes; zeros when it is used up."""

    def __init__(self, data):
        self._data = data
        self._at = 0

    @property
    def left(self):
        return self._at < len(self._data)

    def below(self, count):
        size = 1 if count <= 256 else 2 if count <= 65536 else 4
        piece = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(piece, "big") % count

    def of(self, options):
        return options[self.below(len(options))]


def hostile(choices):
    """A value that nobody expects where it stands."""
    return copy.deepcopy(choices.of(choices.of((INTEGERS, TEXTS, OTHERS))))


def places(value, path=()):
    """Paths of everything within a JSON value, itself included."""
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(child, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def mutated(value, choices):
    """`value` with one thing changed; most of the time near what was right."""
    found = list(places(value))
    path = a_place(value, choices)
    if not path:
        return hostile(choices)
    parent, key = at(value, path[:-1]), path[-1]
    old = parent[key]
    match choices.below(8):
        case 0 | 1:
            parent[key] = hostile(choices)
        case 2:
            parent[key] = near(old, choices)
        case 3:
            del parent[key]
        case 4:
            parent[key] = copy.deepcopy(at(value, choices.of(found)))
        case 5 if isinstance(parent, list):
            parent.insert(key, copy.deepcopy(old))
        case 5:
            parent[str(hostile(choices))] = old
        case 6 if isinstance(old, list) and len(old) > 1:
            one, other = choices.below(len(old)), choices.below(len(old))
            old[one], old[other] = old[other], old[one]
        case 6 if isinstance(old, list):
            old.append(hostile(choices))
        case _:
            other = choices.of(found)
            if other and other[: len(path)] != path and path[: len(other)] != other:
                above = at(value, other[:-1])
                parent[key], above[other[-1]] = above[other[-1]], old
    return value


def a_place(value, choices):
    """A path within a JSON value, every branch as likely as a long one beside it."""
    path = ()
    while isinstance(value, dict | list) and value and (choices.below(8) or not path):
        key = choices.of(list(value)) if isinstance(value, dict) else choices.below(len(value))
        path, value = (*path, key), value[key]
    return path


def near(value, choices):
    """Something of the same kind as `value`."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + choices.of((-4096, -64, -1, 1, 2, 64, 4096, value))
    if isinstance(value, str):
        if value and choices.below(2):
            where = choices.below(len(value))
            return value[:where] + choices.of("0fz/\0%.") + value[where + 1 :]
        return choices.of(TEXTS)
    if isinstance(value, list):
        return value * choices.of((0, 2, 3))
    return dict(list(value.items())[1:]) if isinstance(value, dict) else hostile(choices)


# -- a checkpoint whose records are changed, and bound again ---------------------------------------


def untouched(level, value):
    """What `forge` may be given: changes nothing."""
    return value


def forge(files, change, *, number=0):
    """The files of a checkpoint after changes that no digest gives away.

    Args:
        files: All files of a run that holds one checkpoint, by name.
        change: `change(level, value)` returns what is stored instead: of each "section" and of
            the "hashes", the "head" and the "body" their JSON, of the "index" its bytes. Called
            in this order, so that whatever binds a level is there when it is the next one's turn.
        number: Which of the commit records, ascending.
    """
    files = dict(files)
    commit = sorted(n for n in files if n.startswith("commits/"))[number]
    body = json.loads(files[commit].partition(b"\n")[2].decode("utf-8", "surrogatepass"))
    (entry,) = body["parts"]
    part = files[entry["name"]]
    frames = part[entry["head_length"] :]
    head = unpack(part[: entry["head_length"]])
    rows = [head["hashes"], *head["sections"]]
    changed, end = [], 0
    for place, row in enumerate(rows):
        level = "section" if place else "hashes"
        content = change(level, unpack(frames[row[0] : row[0] + row[1]]))
        raw = content if isinstance(content, bytes) else dump(content)
        frame = compress(raw)
        row[:4] = [end, len(frame), len(raw), digest(frame)]
        if place:
            recount(row, content)
        changed.append(frame)
        end += len(frame)
    head["hashes"][4] = sum(row[4] for row in head["sections"])
    head = change("head", head)
    start = compress(head if isinstance(head, bytes) else dump(head))
    files[entry["name"]] = data = b"".join((start, *changed))
    entry.update(length=len(data), head_length=len(start), head_sha256=digest(start))
    name = body["index"]["name"]
    files[name] = index = change("index", files[name])
    body["index"].update(length=len(index), sha256=digest(index))
    body = change("body", body)
    files[commit] = sealed(body if isinstance(body, bytes) else json.dumps(body).encode())
    return files


def unpack(frame):
    return json.loads(decompress(frame, "").decode("utf-8", "surrogatepass"))


def dump(value):
    return dump_json(value) + b"\n"


def sealed(content, **header):
    """`content` behind the first line that binds it."""
    line = {"penstock": 0, "length": len(content), "sha256": digest(content), **header}
    return json.dumps(line).encode() + b"\n" + content


def recount(row, section):
    """Bring an entry's counts and groups in line with its section, as far as that has any."""
    try:
        paths = section["objects"]["path"]
        nodes = [node[1] for node in section["nodes"]]
        groups = sorted({path[0] for path in [*paths, *nodes] if path})
        row[4:] = [len(paths), len(nodes), groups if len(groups) <= 16 else None]
    except (LookupError, TypeError):
        return


def flipped(data, choices):
    """`data` with some bytes changed, cut off, doubled or put in."""
    data = bytearray(data)
    for _ in range(1 + choices.below(4)):
        where = choices.below(len(data) or 1)
        match choices.below(6):
            case 0 | 1 if data:
                data[where] ^= 1 << choices.below(8)
            case 2:
                data[where : where + 8] = struct.pack(">q", choices.of(INTEGERS[:19]))
            case 3:
                del data[where:]
            case 4:
                data[where:where] = data[where : where + 1 + choices.below(64)]
            case _:
                data[where:where] = bytes([choices.below(256)]) * (1 + choices.below(16))
    return bytes(data)
