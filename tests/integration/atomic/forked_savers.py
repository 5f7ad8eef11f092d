"""Forks savers that are killed, or race each other. Run as a script, or by `Forker`.

One JSON request per line, one JSON answer. The script imports torch once and never has a second
thread, so its forks are whole.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

import torch
from tests.integration.support import start_python

from penstock import Checkpointer, PenstockError
from penstock.core.plugins.registry import default_registry
from penstock.core.storage.open import open_backend
from penstock.testing.faults import CrashAt, FaultyBackend

OPTIONS = {
    "chunk_bytes": 16384,
    "block_bytes": 4096,
    "workers": 1,
    "rules": [{"match": "encoded", "codecs": ["delta", "zstd"]}],
    "deltas": {"every": 4, "max_chain": 2},
}
_PATTERN = torch.randint(1 << 40, (6_000,), generator=torch.Generator().manual_seed(1))
STEP = 5  # of savers that overwrite
_LIMIT_S = 300  # a child that hangs is ended, and the test fails


class Forker:
    """The script in a separate process. A context manager."""

    def __enter__(self):
        self._process = start_python(__file__, stdin=PIPE, stdout=PIPE)
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def ask(self, what, **request):
        self._process.stdin.write(json.dumps({"what": what, **request}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def fill(state, number):
    """Every tensor and value of the state carries `number`, except for the unchanging one."""
    for tensor in (state["raw"], *state["small"]):
        tensor.fill_(number)
    state["encoded"].copy_(_PATTERN + number)  # or no delta would be worth storing
    state["number"] = number


def make(number):
    state = {
        "raw": torch.empty(12_000),
        "still": torch.arange(20_000.0),  # most of the raw data: crumbs are not shared
        "encoded": torch.empty(6_000, dtype=torch.int64),
        "small": [torch.empty(()), torch.empty(3, dtype=torch.float64)],
    }
    fill(state, number)
    return state


def save_until_killed(request, report):
    backend = open_backend(request["url"])
    if request["crash"]:
        call, after, operations = request["crash"]
        backend = CrashAt(backend, call, after=after, kill=True, operations=operations)
    number = request["number"]
    state = make(number)
    options = {**OPTIONS, "retention": request["retention"], "share": request["share"]}
    with Checkpointer(backend, **options) as ckpt:
        while True:
            os.write(report, f"started {number}\n".encode())
            handle = ckpt.save(
                state,
                STEP if request["overwrite"] else number,
                mode="blocking" if number % 3 == 0 else "async",
                overwrite=request["overwrite"],
                metadata={"number": number},
            )
            following = number + 1
            fill(state, following)  # captured already: the stored state must not see it
            handle.result()
            os.write(report, f"done {number}\n".encode())
            number = following


def fork(body):
    """Run `body` in a child, which then ends without any clean-up."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(_LIMIT_S)
            body()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def kill_one(request):
    """Fork a saver, let it commit this many times, wait a moment, kill it; its progress."""
    readable, writable = os.pipe()
    pid = fork(lambda: save_until_killed(request, writable))
    os.close(writable)
    answer = {"started": None, "done": None}
    commits = 0
    with os.fdopen(readable) as lines:
        while request["crash"] or commits < request["commits"]:
            line = lines.readline()
            if not line:
                break
            word, _, number = line.partition(" ")
            answer[word] = int(number)
            commits += word == "done"
        if not request["crash"]:
            time.sleep(request["delay_s"])
            os.kill(pid, signal.SIGKILL)
        for line in lines:
            word, _, number = line.partition(" ")
            answer[word] = int(number)
    _, status = os.waitpid(pid, 0)
    return answer | {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None}


def save_in_a_race(request, number, ready, go, report):
    """Save; with `hold`, every saver reaches its commit before any commits."""
    backend = FaultyBackend(open_backend(request["url"]))
    state = make(number)
    with Checkpointer(backend, **OPTIONS) as ckpt:
        if not request["hold"]:
            os.write(ready, b"r")
            os.read(go, 1)
        try:
            release = threading.Event()
            if request["hold"]:
                held = backend.block("publish", release, match="commits/")
            handle = ckpt.save(state, request["step"], overwrite=request["overwrite"])
            if request["hold"]:
                held.reached.wait()
                os.write(ready, b"r")
                os.read(go, 1)
                release.set()
            handle.result()
        except PenstockError as error:
            ckpt.save(make(number), request["step"] + 1, overwrite=True).result()
            outcome = {"number": number, "error": type(error).__name__, "text": str(error)}
        else:
            outcome = {"number": number, "error": None}
    os.write(report, json.dumps(outcome).encode() + b"\n")


def race(request):
    """Let two savers save one step at the same time; the report of each."""
    ready, is_ready = os.pipe()
    may_go, go = os.pipe()
    readable, report = os.pipe()
    pids = [
        fork(lambda n=number: save_in_a_race(request, n, is_ready, may_go, report))
        for number in request["numbers"]
    ]
    os.close(is_ready)
    os.close(report)
    for _ in pids:
        os.read(ready, 1)
    os.write(go, b"g" * len(pids))
    for pid in pids:
        os.waitpid(pid, 0)
    with os.fdopen(readable) as lines:
        answer = [json.loads(line) for line in lines]
    for end in (ready, may_go, go):
        os.close(end)
    return answer


def main():
    registry = default_registry()
    registry.listing()  # imports every plugin, so no child has to
    assert registry.providers
    for line in sys.stdin:
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would not be whole"
        request = json.loads(line)
        do = {"kill": kill_one, "race": race}[request["what"]]
        print(json.dumps(do(request)), flush=True)


if __name__ == "__main__":
    main()
