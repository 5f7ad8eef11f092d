"""Forks savers and kills them. Run as a script; one JSON request per line, one JSON answer.

This process imports torch once and never has a second thread, so that a fork of it is whole.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

from penstock import Checkpointer
from penstock.core.opening import open_backend
from penstock.core.registry import default_registry
from penstock.core.testing.faults import CrashAt

OPTIONS = {
    "chunk_bytes": 16384,
    "block_bytes": 4096,
    "workers": 1,
    "rules": [{"match": "encoded", "codecs": ["zstd"]}],
}
STEP = 5  # of savers that overwrite


def fill(state, number):
    """Every tensor and value of the state carries `number`."""
    for tensor in (state["raw"], state["encoded"], *state["small"]):
        tensor.fill_(number)
    state["number"] = number


def make(number):
    state = {
        "raw": torch.empty(20_000),
        "encoded": torch.empty(6_000, dtype=torch.int64),
        "small": [torch.empty(()), torch.empty(3, dtype=torch.float64)],
    }
    fill(state, number)
    return state


def save_until_killed(request, report):
    backend = open_backend(request["url"])
    if request["crash"]:
        call, after = request["crash"]
        backend = CrashAt(backend, call, after=after, kill=True)
    number = request["number"]
    state = make(number)
    with Checkpointer(backend, retention=request["retention"], **OPTIONS) as ckpt:
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
            fill(state, following)  # captured already: what is stored must not see it
            handle.result()
            os.write(report, f"done {number}\n".encode())
            number = following


def kill_one(request):
    """Fork a saver, let it commit so many times, wait a moment, kill it; what it got to."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(readable)
            save_until_killed(request, writable)
        finally:
            os._exit(1)
    os.close(writable)
    answer = {"started": None, "done": None}
    commits = 0
    with open(readable) as lines:
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


def main():
    registry = default_registry()
    registry.listing()  # imports every plugin, so that no child has to
    assert registry.providers
    for line in sys.stdin:
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would not be whole"
        print(json.dumps(kill_one(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
