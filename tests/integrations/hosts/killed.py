"""Runs a program whose process is killed by SIGKILL at a chosen call that changes the store.

`KILL_AT` is the number of the call, counted over all checkpointers of the process; without it, or
on a rank other than `KILL_RANK` (0), nothing is killed. At exit, `calls N` is printed to stderr.
"""

import atexit
import os
import runpy
import sys

import penstock.core.checkpointer as module
from penstock.testing.faults import CrashAt

CHANGES = ("create", "write", "seal", "publish")


class CountingCrash(CrashAt):
    """One count for all backends of a program; otherwise each has its own."""

    calls = 0

    @property
    def _count(self):
        return CountingCrash.calls

    @_count.setter
    def _count(self, value):
        # Each new backend sets it to 0; an adapter may open one per save.
        CountingCrash.calls = max(CountingCrash.calls, value)


def main():
    at = int(os.environ.get("KILL_AT", "0"))
    rank = os.environ.get("RANK", "0")
    if rank == os.environ.get("KILL_RANK", "0"):
        opens = module.open_backend
        module.open_backend = lambda *words, **options: CountingCrash(
            opens(*words, **options), at, kill=True, operations=CHANGES
        )
        atexit.register(lambda: print("calls", CountingCrash.calls, file=sys.stderr, flush=True))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
