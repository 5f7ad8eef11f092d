"""Whole saves and restores over S3: Penstock, DCP, and the best plain transfer of as many bytes.

    python benchmarks/s3_peers.py [--gb 1] [--rounds 3] [--latency-ms 20] [--mb-per-s 500]
        [--parallel 8] [--only penstock dcp obstore] [--against ../before]

The store is `s3_store.py`, a process of its own on this machine; `--latency-ms` and `--mb-per-s`
are its. Contenders take turns, each in a process of its own:

    penstock   `save(mode="blocking")` and `restore`, checksums on
    dcp        `torch.distributed.checkpoint` over s3fs: FsspecWriter and FsspecReader as they are
    dcp-tuned  the same with thread_count=`--parallel` and without `os.sync()`, which syncs local
               disks; reading, which knows no threads, by a cache that fetches a block ahead
    backend    one blob by Penstock's own backend, without the engine; `backend-bare` also without
               the CRC of each part
    obstore    one object, put in parts and read by ranges
    s3fs       one object, `pipe_file` and `cat_ranges`

`--against` names another checkout of this project, which has a `.venv` of its own: each contender
takes turns with the one of that checkout, shown as `... (then)`.

All but `dcp` have the same requests in flight (`--parallel`; Penstock's own default is 16), and
parts of 8 MiB where parts can be chosen. The s3fs clients are spared checksums and the signing of
bodies, which other S3 clients here do not do either; Penstock sends a CRC of each part.

The state, its targets, imports, and a smaller save and restore come before the clock starts. It
stops once the store has all of it (the checkpoint is committed), or all of it is in the tensors.
Values are compared afterwards. `one` is the restore of one tensor out of all, with the bytes that
the server sent for it. Figures are medians, with the least and most; MB are 10^6 bytes, CPU is that
of the client. Ratios are of times, so that less is better: to the faster `dcp`, to the fastest
plain transfer, and with `--mb-per-s` to the time that the bytes alone take at that rate.
"""

# ruff: noqa: PLC0415 - each client is imported by the process that measures it

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
import warnings
from pathlib import Path

from s3 import BUCKET, ENVIRONMENT, make_bucket, obstore_client, penstock_client

PART = 8 << 20
PEERS = ("dcp", "dcp-tuned")
PLAIN = ("obstore", "s3fs")
OURS = ("backend", "backend-bare")
CONTENDERS = ("penstock", *PEERS, *OURS, *PLAIN)
# Shares of the whole: an embedding, large and middling matrices, vectors.
SHARES = [160] + [60] * 6 + [30] * 12 + [8] * 14 + [0.01] * 8
WARM_GB = 0.2  # touches the memory that clients keep for parts on their way


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--mb-per-s", type=float, default=0.0)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--against", type=Path, help="another checkout, to take turns with")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    if options.contender:
        options.server = options.url  # what the clients of s3.py call it
        return print(json.dumps(measure(options)))
    rate = f"{options.mb_per_s:g} MB/s" if options.mb_per_s else "no limit"
    print(
        f"{options.gb:g} GB in {len(SHARES)} tensors, {options.parallel} requests at once; "
        f"store: latency {options.latency_ms:g} ms, {rate}; "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    return show(options, collect(options))


def collect(options):
    """Per contender and direction, the figures of each round."""
    process, url = serve(options)
    results = {}
    try:
        for number in range(options.rounds):
            for name, tree in turns(options, number):
                size = ["--gb", str(options.gb), "--parallel", str(options.parallel)]
                command = [*program(tree), *size, "--contender", name, "--url", url]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                shown = f"{name} (then)" if tree else name
                for direction, figures in json.loads(done.stdout.splitlines()[-1]).items():
                    results.setdefault(shown, {}).setdefault(direction, []).append(figures)
                ask(url, "reset")
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    finally:
        process.kill()
        process.wait()
    return results


def turns(options, number):
    """Contenders in the order of a round, each with its checkout; None: this one."""
    trees = [None, options.against] if options.against else [None]
    return [(n, tree) for n in options.only for tree in trees[:: 1 if number % 2 else -1]]


def program(tree):
    if tree is None:
        return [sys.executable, __file__]
    return [str(tree / ".venv/bin/python"), str(tree / "benchmarks/s3_peers.py")]


def serve(options):
    command = [sys.executable, str(Path(__file__).with_name("s3_store.py"))]
    command += ["--latency-ms", str(options.latency_ms), "--mb-per-s", str(options.mb_per_s)]
    command += ["--touch-gb", str(options.gb * 1.1 + 2 * WARM_GB)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, f"http://127.0.0.1:{int(process.stdout.readline())}"


def ask(url, what):
    method = "POST" if what == "reset" else "GET"
    with urllib.request.urlopen(urllib.request.Request(f"{url}/-/{what}", method=method)) as answer:
        return json.loads(answer.read())


# -- what is printed ----------------------------------------------------------------------------


def show(options, results):
    for direction in ("save", "restore", "one"):
        print()
        for name, found in results.items():
            if direction in found:
                print(line(name, direction, found[direction]))
        for text in ratios(options, results, direction):
            print(text)


def line(name, direction, rounds):
    seconds = [figures["seconds"] for figures in rounds]
    typical = statistics.median(seconds)
    last = rounds[-1]
    text = f"{name:20}{direction:8}{typical:8.3f} s ({min(seconds):.3f} .. {max(seconds):.3f})"
    text += f" {last['bytes'] / typical / 1e6:7.0f} MB/s"
    text += f"  CPU {statistics.median(figures['cpu_s'] for figures in rounds):6.2f} s"
    text += f"  {last['requests']} requests"
    if direction == "one":
        text += f", {last['moved'] / 1e6:.2f} MB sent for {last['bytes'] / 1e6:.2f}"
    return text


def ratios(options, results, direction):
    if direction not in results.get("penstock", ()):
        return
    ours = seconds_of(results, "penstock", direction)
    for what, names in (("dcp", PEERS), ("plain", PLAIN), ("then", ("penstock (then)",))):
        theirs = {n: seconds_of(results, n, direction) for n in names}
        theirs = {name: seconds for name, seconds in theirs.items() if seconds}
        if theirs:
            best = min(theirs, key=lambda name: statistics.median(theirs[name]))
            pairs = [a / b for a, b in zip(ours, theirs[best], strict=True)]
            yield (
                f"  penstock / best {what} ({best}): "
                f"{statistics.median(ours) / statistics.median(theirs[best]):.3f} "
                f"(by round {min(pairs):.3f} .. {max(pairs):.3f})"
            )
    if options.mb_per_s:
        wire_s = results["penstock"][direction][0]["bytes"] / options.mb_per_s / 1e6
        yield f"  penstock / bytes at the rate: {statistics.median(ours) / wire_s:.3f}"


def seconds_of(results, name, direction):
    return [figures["seconds"] for figures in results.get(name, {}).get(direction, ())]


# -- one contender, in its own process ----------------------------------------------------------


def measure(options):
    warnings.filterwarnings("ignore")
    make_bucket(options.url)
    if options.contender in (*OURS, *PLAIN):
        return measure_plain(options)
    return measure_checkpoint(options)


def measure_checkpoint(options):
    import torch

    save, restore = {"penstock": penstock_system, "dcp": dcp_system, "dcp-tuned": tuned_system}[
        options.contender
    ](options)
    small, state = build(min(WARM_GB, options.gb)), build(options.gb)
    targets = {name: torch.full_like(tensor, -1.0) for name, tensor in state.items()}
    one = next(name for name, tensor in state.items() if tensor.nbytes < PART)
    save(small, 1)
    restore(wiped(small), 1)
    size = sum(tensor.nbytes for tensor in state.values())
    found = {"save": timed(options.url, size, lambda: save(state, 2))}
    found["restore"] = timed(options.url, size, lambda: restore(targets, 2))
    same(targets, state)
    part = {one: torch.full_like(state[one], -1.0)}
    found["one"] = timed(options.url, state[one].nbytes, lambda: restore(part, 2))
    same(part, {one: state[one]})
    return found


def measure_plain(options):
    import numpy as np

    clients = {
        "backend": penstock_client,
        "backend-bare": functools.partial(penstock_client, checksums=False),
        "obstore": obstore_client,
        "s3fs": s3fs_client,
    }
    size = sum(share_bytes(options.gb))
    source = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    target = np.ones(size, np.uint8)
    write, read = clients[options.contender](options, PART)
    warm = min(size, int(WARM_GB * 1e9))
    write(memoryview(source)[:warm])
    read(memoryview(target)[:warm])
    target.fill(1)
    ask(options.url, "reset")  # Penstock's backend refuses to write a blob that is there
    sent = source.tobytes() if options.contender == "s3fs" else memoryview(source)
    found = {"save": timed(options.url, size, lambda: write(sent))}
    found["restore"] = timed(options.url, size, lambda: read(memoryview(target)))
    if not np.array_equal(source, target):
        message = f"{options.contender} did not read what it had written"
        raise SystemExit(message)
    return found


def timed(url, size, task):
    """Seconds and CPU seconds of a task, and what the server counted."""
    before = ask(url, "counts")
    began, cpu = time.perf_counter(), sum(os.times()[:2])
    task()
    seconds, cpu = time.perf_counter() - began, sum(os.times()[:2]) - cpu
    counts = {k: n - before.get(k, 0) for k, n in ask(url, "counts").items()}
    moved = counts.pop("bytes_out", 0), counts.pop("bytes_in", 0)
    return {
        "bytes": size,
        "seconds": seconds,
        "cpu_s": cpu,
        "moved": moved[0],
        "requests": sum(counts.values()),
    }


def share_bytes(gb):
    return [max(1, int(share / sum(SHARES) * gb * 1e9 / 4)) * 4 for share in SHARES]


def build(gb):
    import numpy as np
    import torch

    random = np.random.default_rng(0)
    return {
        f"t{number:02}": torch.from_numpy(random.random(size // 4, dtype=np.float32))
        for number, size in enumerate(share_bytes(gb))
    }


def wiped(state):
    return {name: tensor.clone().fill_(-1.0) for name, tensor in state.items()}


def same(found, expected):
    import torch

    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    if wrong:
        message = f"not restored: {', '.join(wrong)}"
        raise SystemExit(message)


# -- the contenders -----------------------------------------------------------------------------


def penstock_system(options):
    import penstock

    backend = {
        "type": "fsspec",
        "url": f"s3://{BUCKET}/run",
        "options": {"endpoint_url": options.url},
        "parallel": options.parallel,
        "part_bytes": PART,
    }
    saver, restorer = penstock.Checkpointer(backend), penstock.Checkpointer(backend)

    def save(state, step):
        saver.save({"model": state}, step, mode="blocking").result()

    def restore(targets, step):
        names = [f"model/{name}" for name in targets]
        restorer.restore({"model": targets}, step, include=names if len(names) == 1 else None)

    return save, restore


def tuned_system(options):
    return dcp_system(
        options,
        {"thread_count": options.parallel, "sync_files": False},
        {"default_cache_type": "background"},
    )


def dcp_system(options, writing=None, reading=None):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    store = s3fs_options(options)

    def save(state, step):
        writer = FsspecWriter(f"s3://{BUCKET}/dcp/{step}", **(writing or {}), **store)
        dcp.save(state, storage_writer=writer, no_dist=True)

    def restore(targets, step):
        reader = FsspecReader(f"s3://{BUCKET}/dcp/{step}", **(reading or {}), **store)
        dcp.load(targets, storage_reader=reader, no_dist=True)

    return save, restore


def s3fs_options(options):
    return {
        "endpoint_url": options.url,
        "config_kwargs": {
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"payload_signing_enabled": False},
        },
    }


def s3fs_client(options, part):
    import numpy as np
    import s3fs

    fs = s3fs.S3FileSystem(
        use_listings_cache=False, max_concurrency=options.parallel, **s3fs_options(options)
    )
    path = f"{BUCKET}/plain"

    def write(data):
        # It takes bytes only, and sends so many parts at a time.
        fs.pipe_file(path, bytes(data), chunksize=part)

    def read(data):
        starts = list(range(0, data.nbytes, part))
        stops = [min(at + part, data.nbytes) for at in starts]
        count = len(starts)
        found = fs.cat_ranges([path] * count, starts, stops, batch_size=options.parallel)
        for at, piece in zip(starts, found, strict=True):
            np.copyto(np.frombuffer(data, np.uint8)[at : at + part], np.frombuffer(piece, np.uint8))

    return write, read


if __name__ == "__main__":
    main()
