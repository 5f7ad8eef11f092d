"""Stands in for Lustre's `lfs`: the options, texts and exit codes of `lfs-setstripe(1)`,
`lfs-getstripe(1)` and `lfs-df(1)`, over plain files whose layout is kept in a user attribute.

It reads the state of the file system from `lfs.json` beside it, and appends its calls to
`calls.jsonl`.
"""

import errno
import json
import os
import struct
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ATTRIBUTE = "user.lov"


def main():
    state = json.loads((HERE / "lfs.json").read_text())
    with (HERE / "calls.jsonl").open("a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\n")
    if state.get("hangs"):
        time.sleep(3600)
    command, *arguments = sys.argv[1:]
    return {"setstripe": setstripe, "getstripe": getstripe, "df": df}[command](state, arguments)


def complain(number, message):
    print(message, file=sys.stderr)
    return number


def setstripe(state, arguments):
    parts, osts, pool, path = [{}], None, "", arguments[-1]
    options = iter(arguments[:-1])
    for option in options:
        if option.lstrip("-") in state.get("unknown_options", ()):
            print(f"lfs setstripe: invalid option -- '{option.lstrip('-')}'", file=sys.stderr)
            return complain(1, "usage: setstripe [--stripe-count|-c STRIPE_COUNT] ...")
        value = next(options)
        if option == "-E":
            parts = [*parts, {"end": value}] if parts != [{}] else [{"end": value}]
        elif option == "-o":
            osts = [int(index) for index in value.split(",")]
        elif option == "-p":
            pool = value
        else:
            parts[-1][option] = value
    size = int(parts[-1].get("-S", 4 << 20))
    if state.get("not_lustre"):
        return complain(errno.ENOTTY, f"error: setstripe: '{path}' is not on a Lustre filesystem")
    if pool and pool not in state.get("pools", ()):
        message = f"error: setstripe: pool '{pool} fsname testfs' does not exist: Invalid argument"
        return complain(errno.EINVAL, message)
    if size % 65536:
        return complain(errno.EINVAL, f"error: bad stripe_size {size}, must be an even multiple")
    return give_birth(state, path, parts, size=size, osts=osts, pool=pool)


def give_birth(state, path, parts, *, size, osts, pool):
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    except OSError as error:
        return complain(error.errno, f"error: setstripe: unable to open '{path}': {error.strerror}")
    if ATTRIBUTE in os.listxattr(fd):
        return complain(errno.EEXIST, f"error: setstripe error for '{path}': stripe already set")
    if state.get("restricted"):
        os.setxattr(fd, ATTRIBUTE, plain(1, 4 << 20, [0]))
        why = "Setstripe is restricted by your administrator, default striping applied"
        return complain(0, f"setstripe warning for '{path}': {why}")
    if state.get("ioctl_fails"):
        return complain(errno.EOPNOTSUPP, f"error: setstripe error for '{path}': not supported")
    known = {ost["index"]: ost for ost in state["osts"]}
    count = int(parts[-1].get("-c", 1))
    count = len(known) if count == -1 else count or 1
    if osts is None:
        room = [index for index, ost in sorted(known.items()) if not ost.get("full")]
        start = int.from_bytes(os.urandom(2), "little")
        osts = [room[(start + n) % len(room)] for n in range(min(count, len(room)))] if room else []
    if not osts or any(index not in known or known[index].get("full") for index in osts):
        code = errno.ENOSPC if all(index in known for index in osts) else errno.EINVAL
        message = f"error: setstripe error for '{path}': {os.strerror(code)}"
        return complain(code, message)  # as the real one: the file stays
    value = plain(len(osts), size, osts, pool)
    if len(parts) > 1:
        head = plain(0, 65536, [], pattern=0x100)
        value = composite([(0, 65536, head), (65536, (1 << 64) - 1, value)])
    os.setxattr(fd, ATTRIBUTE, value)
    os.close(fd)
    return 0


def plain(count, size, osts, pool="", pattern=1):
    magic = 0x0BD30BD0 if pool else 0x0BD10BD0
    value = struct.pack("<IIQQIHH", magic, pattern, 2, 0, size, count, 0)
    value += pool.encode().ljust(16, b"\0") if pool else b""
    return value + b"".join(struct.pack("<QQII", 9, 0, 0, index) for index in osts)


def composite(parts):
    table, blobs, at = b"", b"", 32 + 48 * len(parts)
    for number, (start, end, blob) in enumerate(parts, start=1):
        table += struct.pack("<IIQQIIIQI", number, 0x10, start, end, at, len(blob), 0, 0, 0)
        blobs, at = blobs + blob, at + len(blob)
    return struct.pack("<IIIHHHHQI", 0x0BD60BD0, at, 1, 0, len(parts), 0, 0, 0, 0) + table + blobs


def getstripe(state, arguments):
    path = arguments[-1]
    if "-y" in arguments and state.get("no_yaml"):
        return complain(1, "lfs getstripe: invalid option -- 'y'")
    if "-d" in arguments:
        count = state.get("default_count", 1)
        if "-y" not in arguments:
            print(path)
        print(f"stripe_count:  {count} stripe_size:   4194304 pattern:       0 stripe_offset: -1")
        return 0
    value = os.getxattr(path, ATTRIBUTE)
    size, count = struct.unpack_from("<IH", value, 24)
    osts = [struct.unpack_from("<I", value, 32 + 24 * n + 20)[0] for n in range(count)]
    if "-y" in arguments:
        print(f"lmm_stripe_count:  {count}\nlmm_stripe_size:   {size}\nlmm_pattern:       raid0")
        print(f"lmm_layout_gen:    0\nlmm_stripe_offset: {osts[0]}\nlmm_objects:")
        for index in osts:
            print(f"      - l_ost_idx: {index}\n        l_fid:     0x100000000:0x2:0x0")
        return 0
    print(
        f"{path}\nlmm_stripe_count:  {count}\nlmm_stripe_size:   {size}\nlmm_pattern:       raid0"
    )
    print(f"lmm_layout_gen:    0\nlmm_stripe_offset: {osts[0]}")
    print("\tobdidx\t\t objid\t\t objid\t\t group")
    for index in osts:
        print(f"\t{index:6}\t{4711:14}\t{'0x1267':>13}\t{0:14}\t")
    print()
    return 0


def df(state, arguments):
    print("UUID                   1K-blocks        Used   Available Use% Mounted on")
    print("testfs-MDT0000_UUID      4194304        1664     4112156   1% /mnt/testfs[MDT:0]")
    for ost in state["osts"]:
        free = ost["free_kib"]
        row = f"testfs-OST{ost['index']:04x}_UUID  8388608000 {8388608000 - free} {free}  10% "
        print(f"{row}/mnt/testfs[OST:{ost['index']}] {ost.get('flags', '')}".rstrip())
    print("OST00ff             : inactive device")
    print("\nfilesystem_summary:   8388608000  1  2  1% /mnt/testfs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
