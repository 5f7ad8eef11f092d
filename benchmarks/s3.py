"""Whole saves and restores over S3: Penstock, DCP, and a plain transfer of the same size.

    python benchmarks/s3.py --gb 1 --parallel 16 --mb-per-s 250 --latency-ms 20
    python benchmarks/s3.py --mb-per-s 500 --only "Penstock" --against ../before/.venv/bin/python

The store is `s3_store.py`, a separate process on this machine. DCP uses s3fs through FsspecWriter
and FsspecReader, unchanged and tuned: `--parallel` threads, no `os.sync()` (which syncs local
disks), and a read cache that fetches a block ahead; it needs no checksums and signs no bodies.
obstore moves one object in parts. All except plain DCP have `--parallel` requests in flight, and
parts of 8 MiB if the part size can be set.

State, targets, imports, and a smaller save and restore are made before the clock starts. The clock
stops when the store, or the tensors, have all bytes. `one` restores one tensor of 8 MB.
"""

# ruff: noqa: PLC0415 - each client is imported by the process that measures it

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bench import Benchmark, check, digests, timed

BUCKET = "bench"
PART = 8 << 20
ENVIRONMENT = {
    **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "loopback"),
    **dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull),
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_DEFAULT_REGION": "us-east-1",
}
# The server keeps the memory that it frees: fresh memory can take longer than the transfer.
KEEPING = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
# Shares of the whole: an embedding, large and medium matrices, vectors.
SHARES = [160] + [60] * 6 + [30] * 12 + [8] * 14 + [0.01] * 8
WARM_GB = 0.2  # touches the memory that clients keep for parts in flight


@contextmanager
def serving(options):
    """Start the store, and pass its URL to the measures."""
    os.environ.update(ENVIRONMENT)
    command = [sys.executable, str(Path(__file__).with_name("s3_store.py"))]
    command += [f"--latency-ms={options.latency_ms}", f"--mb-per-s={options.mb_per_s}"]
    environment = {**os.environ, **KEEPING}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    options.url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    try:
        yield
    finally:
        process.kill()
        process.wait()


def ask(options, what):
    method = "POST" if what == "reset" else "GET"
    request = urllib.request.Request(f"{options.url}/-/{what}", method=method)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def state_of(gb):
    """Return tensors of random numbers, by the shares."""
    random = np.random.default_rng(0)
    sizes = [max(1, int(share / sum(SHARES) * gb * 1e9 / 4)) for share in SHARES]
    return {
        f"t{number:02}": torch.from_numpy(random.random(size, dtype=np.float32))
        for number, size in enumerate(sizes)
    }


def checkpoint(system, _, options):
    """Save a state, restore it, and restore one of its tensors."""
    save, restore = system(options)
    small, state = state_of(min(WARM_GB, options.gb)), state_of(options.gb)
    ask(options, "reset")
    save(small, 1)
    restore({name: torch.zeros_like(tensor) for name, tensor in small.items()}, 1)
    targets = {name: torch.full_like(tensor, -1.0) for name, tensor in state.items()}
    figures = {}
    with timed(figures, "save", "CPU"):
        save(state, 2)
    with timed(figures, "restore", "CPU"):
        restore(targets, 2)
    check(digests(targets) == digests(state), system)
    name = next(name for name, tensor in state.items() if tensor.nbytes <= options.gb * 8.1e6)
    one = {name: torch.full_like(state[name], -1.0)}
    before = ask(options, "counts")["bytes_out"]
    with timed(figures, "one"):
        restore(one, 2)
    check(torch.equal(one[name], state[name]), system)
    figures["one, MB sent"] = (ask(options, "counts")["bytes_out"] - before) / 1e6
    return figures | at_the_rate(options, figures)


def plain(_, options):
    """Write and read one object with obstore."""
    write, read = obstore_client(options)
    size = int(options.gb * 1e9)
    source = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    target = np.ones(size, np.uint8)
    warm = min(size, int(WARM_GB * 1e9))
    write(memoryview(source)[:warm])
    read(memoryview(target)[:warm])
    figures = {}
    with timed(figures, "save", "CPU"):
        write(memoryview(source))
    with timed(figures, "restore", "CPU"):
        read(memoryview(target))
    check(np.array_equal(source, target), "obstore")
    return figures | at_the_rate(options, figures)


def at_the_rate(options, figures):
    """Return times divided by the time of the bytes alone at the store's rate."""
    if not options.mb_per_s:
        return {}
    least_s = options.gb * 1e3 / options.mb_per_s
    return {f"{name}, x rate": figures[f"{name}, s"] / least_s for name in ("save", "restore")}


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
    saver, restorer = (penstock.Checkpointer(backend) for _ in range(2))

    def save(state, step):
        saver.save({"model": state}, step, mode="blocking").result()

    def restore(targets, step):
        names = [f"model/{name}" for name in targets]
        restorer.restore({"model": targets}, step, include=names if len(names) == 1 else None)

    return save, restore


def dcp_system(options, *, tuned=False):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    config = {
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"payload_signing_enabled": False},
    }
    store = {"endpoint_url": options.url, "config_kwargs": config}
    writing = {"thread_count": options.parallel, "sync_files": False} if tuned else {}
    reading = {"default_cache_type": "background"} if tuned else {}

    def save(state, step):
        writer = FsspecWriter(f"s3://{BUCKET}/dcp/{step}", **writing, **store)
        dcp.save(state, storage_writer=writer, no_dist=True)

    def restore(targets, step):
        reader = FsspecReader(f"s3://{BUCKET}/dcp/{step}", **reading, **store)
        dcp.load(targets, storage_reader=reader, no_dist=True)

    return save, restore


def obstore_client(options):
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=options.url,
        virtual_hosted_style_request=False,
        unsigned_payload=True,
        client_options={"allow_http": True},
    )
    how = {"use_multipart": True, "chunk_size": PART, "max_concurrency": options.parallel}

    def write(data):
        pieces = (data[at : at + PART] for at in range(0, data.nbytes, PART))
        obstore.put(store, "plain", pieces, **how)

    def read(data):
        def piece(at):
            end = min(at + PART, data.nbytes)
            data[at:end] = memoryview(obstore.get_range(store, "plain", start=at, end=end))

        with ThreadPoolExecutor(options.parallel) as pool:
            list(pool.map(piece, range(0, data.nbytes, PART)))

    return write, read


GROUPS = {
    "s3": {
        "Penstock": partial(checkpoint, penstock_system),
        "DCP": partial(checkpoint, dcp_system),
        "DCP, tuned": partial(checkpoint, partial(dcp_system, tuned=True)),
        "obstore, one object": plain,
    }
}

OPTIONS = {
    "gb": (1.0, "state in 10^9 bytes"),
    "latency_ms": (0.0, "before each answer"),
    "mb_per_s": (0.0, "limit in each direction; 0: no limit"),
    "parallel": (16, "requests at once"),
    "url": (None, "the store; started by this program"),
}
BENCHMARK = Benchmark(__file__, __doc__, GROUPS, OPTIONS, base="Penstock", around=serving)

if __name__ == "__main__":
    BENCHMARK.run()
