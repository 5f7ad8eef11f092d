"""Forked processes that use a store and then die without closing anything."""

from __future__ import annotations

import mmap
import os
import signal
import time
import warnings
from typing import TYPE_CHECKING, NoReturn

from penstock.core.foreign import said
from penstock.core.testing.expectations import NotTriedError

if TYPE_CHECKING:
    from collections.abc import Callable

_CHILD_S = 60
_WHY_BYTES = 2000  # less than a pipe buffers: the child must not wait for its parent to read
_BREACH, _UNABLE = 2, 1


class ForkedProcess:
    """A child of this process that runs `work` and then dies as by `kill -9`.

    No `finally`, `atexit` or `close` of the caller runs in the child.
    """

    def __init__(self, work: Callable[[], object], /) -> None:
        """Start the child.

        Args:
            work: Runs in the child. Its result is kept until the child dies: an unreferenced
                backend might close itself, and write the data that it had kept back.
        """
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of threads in the parent, whose locks may be held for ever
            # in the child; the child uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _run_and_vanish(work, writer)
        os.close(writer)
        self._pipe = reader

    def join(self, what: str, /) -> None:
        """Wait until the child is dead.

        Args:
            what: The end of the sentence "a forked process could not".

        Raises:
            AssertionError: The child found a breach of the contract.
            NotTriedError: The child could not use the store at all.
        """
        with os.fdopen(self._pipe, "rb") as pipe:
            why = pipe.read().decode(errors="replace")
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return
        if code == _BREACH:
            raise AssertionError(why)
        if code < 0:
            hung = f" (it hung for {_CHILD_S} s)" if -code == signal.SIGALRM else ""
            why = f"signal {-code} ended it{hung}"
        msg = f"a forked process could not {what}: {why}"
        raise NotTriedError(msg)


def _run_and_vanish(work: Callable[[], object], pipe: int) -> NoReturn:
    status = _UNABLE
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CHILD_S)  # a client that does not survive a fork may hang
        kept = work()  # noqa: F841 - held until the process is gone
        status = 0
    except BaseException as error:  # noqa: BLE001 - passed to the parent, which raises it
        breach = isinstance(error, AssertionError)
        status = _BREACH if breach else _UNABLE
        os.write(pipe, (str(error) if breach else said(error)).encode()[:_WHY_BYTES])
    finally:  # no code of the caller may run in the child, not even after an error
        os._exit(status)


class Race:
    """Memory shared by racing processes: the turn of each, and the outcome of each turn.

    Create it before the processes are forked.
    """

    WON, LOST = 1, 2
    _GONE = 255

    def __init__(self, processes: int, turns: int, /) -> None:
        """Allocate the memory, for at most 254 turns."""
        self._processes = processes
        self._turns = turns
        # Bytes, each written by one process only: no write can be torn, so no lock is needed, which
        # a dying process could leave taken.
        self._memory = mmap.mmap(-1, processes * (1 + turns))

    def begin(self, number: int, turn: int, /) -> None:
        """Wait until every process that is still alive has come to `turn`."""
        self._memory[number] = turn + 1
        while min(self._memory[: self._processes]) <= turn:
            time.sleep(0)

    def end(self, number: int, turn: int, outcome: int, /) -> None:
        """Store the outcome of `turn` for the process."""
        self._memory[self._place(number, turn)] = outcome

    def leave(self, number: int, /) -> None:
        """Let the other processes go on without this one."""
        self._memory[number] = self._GONE

    def winners(self, turn: int, /) -> list[int]:
        """Return the numbers of the processes that won `turn`."""
        places = [self._place(number, turn) for number in range(self._processes)]
        return [number for number, at in enumerate(places) if self._memory[at] == self.WON]

    def _place(self, number: int, turn: int) -> int:
        return self._processes + number * self._turns + turn
