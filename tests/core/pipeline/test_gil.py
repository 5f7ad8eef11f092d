"""How often a raw save returns to Python: under a busy training loop each return waits."""

from __future__ import annotations

import sys
import threading
from collections import Counter

import torch

import penstock

CHUNK = 16 << 20
CHUNKS = 12


def giving_up(function) -> tuple[str, str] | None:
    """The kind of call, if it releases the GIL and so waits for it afterwards."""
    owner, name = type(getattr(function, "__self__", None)).__name__, function.__name__
    waits = (
        name == "xxh3_64_intdigest"
        or (name == "acquire" and owner in {"lock", "RLock"})
        or (name == "get" and owner == "SimpleQueue")
        or (owner == "module" and name in {"read", "write", "eventfd_read", "poll", "select"})
    )
    return (owner, name) if waits else None


def count_calls(root, chunks: int) -> Counter[tuple[str, str]]:
    """GIL-giving calls of one blocking save of `chunks` chunks, on all of Penstock's threads."""
    calls: Counter[tuple[str, str]] = Counter()
    lock = threading.Lock()

    def profile(frame, event, function) -> None:
        del frame
        if event == "c_call" and (kind := giving_up(function)) is not None:
            with lock:
                calls[kind] += 1

    state = {"w": torch.zeros(chunks * CHUNK // 4)}
    threading.setprofile(profile)  # reaches all threads created from now on: all of them
    sys.setprofile(profile)
    try:
        with penstock.Checkpointer(root, mode="blocking") as ckpt:
            ckpt.save({"w": torch.zeros(3)}, step=1)
            calls.clear()
            ckpt.save(state, step=2)
            return Counter(calls)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_a_raw_save_enters_python_few_times_per_16_mib(tmp_path):
    """Each further 16 MiB costs the 4 hashes of its blocks and at most 6 other calls.

    The goal is 4 in all, checksums included. Queues, futures and completions of batches exceed it
    (about 4.7 measured, mostly with a free lock); this test keeps that from growing unseen.
    """
    few, many = 8, 24
    base, more = count_calls(tmp_path / "a", few), count_calls(tmp_path / "b", many)
    added = more - base
    hashes = sum(count for (_, name), count in added.items() if "xxh3" in name)
    waits = sum(added.values()) - hashes
    assert hashes == 4 * (many - few)
    assert waits <= 6 * (many - few), added
