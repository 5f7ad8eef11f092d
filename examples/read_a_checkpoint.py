"""Read a checkpoint of Penstock without Penstock: the page "Storage format" as code.

    python examples/read_a_checkpoint.py RUN_FOLDER [--step N] [--only PREFIX] [--out FILE.npz]

Verifies commit record, index, heads of parts, sections and frames, not the table of borrowed blobs.
Prints path, type and shape of each object, or writes a .npz: bfloat16 and float8 as uint16 and
uint8, since numpy has neither, values as the bytes of their JSON or pickle. In a run with tiers,
each root is a run folder. Without xxhash, frames go unverified. Refuses `log8` and unknown codecs.
"""
# ruff: noqa: ANN001, ANN201, B905, PLR0917 - The page has the types and the lengths.

import argparse
import hashlib
import json
import re
import struct
import zipfile
from functools import lru_cache, partial
from pathlib import Path

import lz4.block
import numpy as np
import zstandard

try:
    import xxhash
except ImportError:
    xxhash = None


def check(good, message):
    if not good:
        raise ValueError(message)


def verified(data, digest, where):
    hashed = hashlib.sha256 if len(digest) == 64 else xxhash and xxhash.xxh3_64
    check(not hashed or hashed(data).hexdigest() == digest, f"{where} is damaged: wrong checksum")
    return data


def shown(path):
    return "/".join(part.replace("%", "%25").replace("/", "%2F") or "%00" for part in path)


def unzstd(data, length=None):
    size = zstandard.frame_content_size(data)
    limit = max(2**24, min(2**28, 256 * len(data)))  # a small file must not fill the memory
    check(0 <= size <= limit and length in {None, size}, f"a zstd frame of {size} bytes")
    return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)


def decode(codec, data, length, config, dtype, itemsize, base):
    """Returns the `length` bytes that the codec encoded; a first codec gets elements of `dtype`."""
    if codec in {"floatsplit 1", "zstd 1"}:
        return (unzstd if codec == "zstd 1" else decode_floatsplit)(data, length)
    if codec == "lz4 1":
        out, end = bytearray(), 0
        while len(out) < length:  # blocks of 4 MiB, each after its length
            at, end = end + 4, end + 4 + int.from_bytes(data[end : end + 4], "little")
            out += lz4.block.decompress(data[at:end], min(2**22, length - len(out)))
        return bytes(out)
    if codec == "delta 1":  # an element after those of the chunk holds the comparison
        words, by_xor = np.split(np.frombuffer(data, f"<u{itemsize}"), [-1])
        base = np.frombuffer(base, words.dtype)  # zigzag order is 0, -1, 1, -2, ...
        return (base ^ words if by_xor[0] else base + (words >> 1 ^ 0 - (words & 1))).tobytes()
    if codec == "factor 1":
        return decode_factor(data, length // 4)
    good = codec == "cast 1" and dtype in {"float32", "float64"} and "float16" in config["to"]
    check(good, f"this reader does not have the codec {codec} {config or ''} for {dtype}")
    half = np.frombuffer(data, "<u2")  # bfloat16 is the top of a float32
    wide = half.view("<f2") if config["to"] == "float16" else (half.astype("<u4") << 16).view("<f4")
    return wide.astype(f"<f{itemsize}").tobytes()


def decode_factor(data, count):
    blocks, words = -(-count // 32768), np.frombuffer(data, "<u2")
    codes, factor, runs, rest = np.split(words, [count, count + 2, count + 2 + blocks])
    tops = codes.astype("<u4") << 16
    multiplied = (tops.view("<f4") * factor.view("<f4")).view("<u4")
    out = np.where(np.isin(tops >> 23 & 0xFF, [0, 0xFF]), tops, multiplied)
    starts, lengths, lows = np.split(rest.astype(int), [runs.sum(), 2 * runs.sum()])
    starts = np.repeat(np.arange(blocks) * 32768, runs) + starts - np.cumsum(lengths) + lengths
    places = np.repeat(starts, lengths) + np.arange(len(lows))
    out[places] = tops[places] | lows
    return out.tobytes()


def decode_floatsplit(data, length):
    version, width, flags, _, block, columns, first, base = struct.unpack_from("<4B4I", data)
    check(version == 1 and flags < 4, f"floatsplit: unknown version {version} or flags {flags}")
    count, at, predicted = length // width, 20, flags & 1
    if predicted:  # a term of each row and column is added to the top 16 bits
        height = -(-(first + count) // columns)
        terms = 16 * np.frombuffer(data, np.uint8, height + columns, at).astype(np.int64)
        row_terms, column_terms, at = base + terms[:height], terms[height:], at + len(terms)
    edges = [0, *range(block - first, count, block), count]  # a predicted block ends with a row
    kinds = data[at : at + len(edges) - 1]
    sizes = {1: [1] * width, 2: [1, 1], 4: [2, 1, 1], 8: [4, 2, 1, 1]}[1 if flags & 2 else width]
    table = np.frombuffer(data, "<u4", len(kinds) * len(sizes), at + len(kinds))
    at, out = at + len(kinds) + table.nbytes, np.zeros(count, f"<u{width}")
    table = table.reshape(len(kinds), -1)[:, ::-1].tolist()  # lists planes from the top
    for start, end, kind, entries in zip(edges, edges[1:], kinds, table):
        planes = []
        for size, entry in zip(sizes, entries):
            stored = data[at : at + (entry & 0xFFFFFFF)]
            plane = decode_plane(entry >> 28, stored, (end - start) * size, kind)
            planes.append(plane.view(f"<u{size}").astype(np.int64))
            at += len(stored)
        if width > 1:
            low, high = planes[-2:]
            top = low & 0x7F | high << 7 | (low & 0x80 if kind == 0 else 0) << 8
            if kind > 1:  # kind 3 has 14 bits, the first is the sign
                top = low | high << 8 if kind == 2 else ((low & 0x3F | high << 6) ^ 0x2000) - 0x2000
            if predicted and kind != 2:
                place = np.arange(first + start, first + end)
                top += row_terms[place // columns] + column_terms[place % columns]
            planes[-2:] = [top & (0x7FFF if kind == 1 else 0xFFFF)]
        for n, plane in enumerate(planes):
            out[start:end] |= plane.astype(out.dtype) << 8 * sum(sizes[:n])
    return out.tobytes()


def decode_plane(method, data, size, kind):
    if method == 2:
        return np.frombuffer(unzstd(data, size), np.uint8)
    if method == 3:  # a bit for each byte, then the bytes that are not 0
        end = 4 + int.from_bytes(data[:4], "little")
        bits = np.unpackbits(np.frombuffer(unzstd(data[4:end]), np.uint8), count=size)
        bits[bits == 1] = np.frombuffer(unzstd(data[end:]) if data[end:] else b"", np.uint8)
        return bits
    stored = np.frombuffer(data, np.uint8)
    if method == 1:  # the bits of the last part are in the free top bits of the others
        parts, bits = (8, 1) if kind == 1 else (4, 2)
        others = stored[: size // parts // 8 * 8 * (parts - 1)].reshape(parts - 1, -1)
        shifts = bits * np.arange(parts - 1, dtype=np.uint8)[:, None]
        last = np.bitwise_or.reduce(others >> 8 - bits << shifts)
        stored = np.concatenate([(others & 0xFF >> bits).ravel(), last, stored[others.size :]])
    check(method < 2 and len(stored) == size, f"floatsplit: a wrong plane of method {method}")
    return stored


def read_commit(root, step):
    names = [re.fullmatch(r"(\d{8,})-(\d+)\.json", p.name) for p in (root / "commits").iterdir()]
    files = {(int(m[1]), int(m[2])): m[0] for m in names if m and step in {None, int(m[1])}}
    check(files, f"{root} has no checkpoint of step {'any' if step is None else step}")
    where = root / "commits" / files[max(files)]  # the highest generation of a step counts
    line, _, body = where.read_bytes().partition(b"\n")
    check(json.loads(line)["penstock"] == 1, f"{where} has an unknown version")
    commit = json.loads(verified(body, json.loads(line)["sha256"], where))
    check(not commit.get("requires"), f"{where} requires {commit.get('requires')}")
    check((commit["step"], commit["generation"]) == max(files), f"{where} has a wrong name")
    return commit


def read_index(root, commit):
    """Returns name, head length and head digest of each part, and the places of all objects."""
    name, at = commit["index"]["name"], commit["index"]["head_length"]
    data, places = (root / name).read_bytes(), set()
    head = verified(data[:at], commit["index"]["head_sha256"], name)
    *version, _, blocks, _ = struct.unpack_from(">4sIQII", head)
    check(version == [b"PSIX", 1], f"{name} has an unknown version")
    for shards, size, sha256 in struct.iter_unpack(">8xII32s", head[24 : 24 + 48 * blocks]):
        columns = unzstd(verified(data[at : at + size], sha256.hex(), name))
        # Path hash, part and section, as planes: the highest byte of all entries first.
        planes = np.frombuffer(columns, np.uint8, 16 * shards).reshape(16, shards)
        places.update(struct.iter_unpack(">QII", planes.T.tobytes()))
        at += size
    if isinstance(commit["parts"], list):
        return [(p["name"], p["head_length"], p["head_sha256"]) for p in commit["parts"]], places
    listed = struct.iter_unpack(">I8xI32s", head[24 + 48 * blocks :])
    name = f"data/{commit['uid']}/parts/%05d.json.zst"
    return [(name % rank, length, sha256.hex()) for rank, length, sha256 in listed], places


def read_objects(root, commit):
    """Returns each object's type, shape and regions, and what it is tied to or derived from."""
    (parts, places), entries = read_index(root, commit), {}
    for part, (name, at, head_sha256) in enumerate(parts):
        data = (root / name).read_bytes()
        head = json.loads(unzstd(verified(data[:at], head_sha256, name)))
        check(head["penstock"] == 1, f"{name} has an unknown version")
        check(not head.get("requires"), f"{name} requires {head.get('requires')}")
        for number, (offset, length, size, sha256, *_) in enumerate(head["sections"]):
            stored = verified(data[at + offset : at + offset + length], sha256, name)
            section = json.loads(unzstd(stored, size))
            chunk = lru_cache(8)(partial(read_chunk, root, head, section["frames"]))
            columns = section["objects"]
            tied, derived = dict(columns["same_as"]), dict(columns.get("derived", ()))
            columns = [columns[name] for name in ("path", "type", "shape", "shards")]
            for n, (segments, kind, shape, shards) in enumerate(zip(*columns)):
                path = shown(segments)
                digest = xxhash and xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogatepass"))
                new = (section["types"][kind], shape, {}, tied.get(n), derived.get(n))
                if xxhash and (digest, part, number) not in places:
                    check(len(parts) > 1 and new[0][0] == "value", f"the index lacks {path}")
                    continue  # this rank has nothing where another has a container
                entry = entries.setdefault(path, new)
                check(entry[:2] == new[:2], f"ranks describe {path} differently")
                for chunks, *region in shards:  # equal regions have equal bytes
                    place = tuple(map(tuple, region or ([0] * len(shape), shape)))
                    entry[2].setdefault(place, (chunk, chunks))
    return entries


def read_chunk(root, head, columns, number, dtype, itemsize):
    """Returns the decoded bytes of a frame; the dtype is that of the object that needs them."""
    frame = {field: column[number] for field, column in columns.items()}
    (name, _), offset, chain = head["blobs"][frame["blob"]], frame["offset"], frame["chain"]
    data = np.fromfile(root / name, np.uint8, frame["length"], offset=offset).tobytes()
    # A raw frame has a checksum for each block, counted from the page in which it begins.
    block, phase = 2**62 if chain else head["block_bytes"], offset % 4096
    for k in range(-(-(phase + len(data)) // block)):
        piece = data[max(0, k * block - phase) : (k + 1) * block - phase]
        verified(piece, frame["checksums"][16 * k : 16 * k + 16], name)
    dtype, itemsize = frame.get("elements") or (dtype, itemsize)
    if (base := frame.get("base")) is not None:
        check(base < number, f"{name}: a frame has a later one as base")
        base = read_chunk(root, head, columns, base, dtype, itemsize)
    lengths = [frame["raw_length"], *frame["lengths"]]  # of each codec's input
    for (codec, version, config), length in reversed(list(zip(head["chains"][chain], lengths))):
        data = decode(f"{codec} {version}", data, length, config, dtype, itemsize, base)
    return verified(data, frame["raw_checksum"], name) if chain else data


def assemble(objects, path):
    (_, dtype, itemsize, *_), shape, regions, tied, derived = objects[path]
    if tied is not None:
        return assemble(objects, shown(tied))
    if derived is not None:  # rounded to nearest even; a saver derives no NaN
        bits = assemble(objects, shown(derived)).view("<u4")
        top = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2")
        return top if dtype == "bfloat16" else bits.view("<f4").astype("<f2")
    out, filled = np.zeros((*shape, itemsize), np.uint8), np.zeros(shape, bool)
    for (offsets, sizes), (chunk, chunks) in regions.items():
        pieces = (chunk(n, dtype, itemsize)[o : o + z] for n, o, z in zip(*[iter(chunks)] * 3))
        place = tuple(slice(at, at + size) for at, size in zip(offsets, sizes))
        out[place] = np.frombuffer(b"".join(pieces), np.uint8).reshape(*sizes, itemsize)
        filled[place] = True
    check(filled.all(), f"{path}: regions do not cover the shape")
    dtype = re.sub("(bfloat|float8|float4|complex32).*", f"u{itemsize}", dtype)  # numpy has none
    return out.view(np.dtype(dtype).newbyteorder("<"))[..., 0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Read a checkpoint of Penstock without Penstock.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, help="instead of the newest")
    parser.add_argument("--only", default="", help="only paths that begin with it")
    parser.add_argument("--out", type=Path, help="write a .npz")
    options = parser.parse_args()
    try:
        commit = read_commit(options.run, options.step)
        objects, arrays = read_objects(options.run, commit), {}
        print(f"step {commit['step']}, generation {commit['generation']}, save {commit['uid']}")
        for path in sorted(path for path in objects if path.startswith(options.only)):
            arrays[path] = assemble(objects, path)
            print(path, *objects[path][0][:2], objects[path][1])
        if options.out:
            with zipfile.ZipFile(options.out, "w") as archive:
                for path, array in arrays.items():
                    with archive.open(f"{path}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, array, allow_pickle=False)
    except (OSError, ValueError, zstandard.ZstdError, lz4.block.LZ4BlockError) as error:
        raise SystemExit(f"refused: {error}") from error
