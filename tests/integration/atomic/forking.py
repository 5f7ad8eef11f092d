"""Forked processes that report to their parent, and that the parent kills."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import time

_LIMIT_S = 300  # of a child, in case its parent is killed
MOST_CHARS = 1500  # of an error: a pipe takes lines of less than 4 KiB whole


class Reports:
    """A pipe on which forked processes report, one JSON object a line."""

    def __init__(self):
        self._readable, self._writable = os.pipe()
        self._text = b""

    def say(self, what, **more):
        """Report to the parent."""
        os.write(self._writable, json.dumps({"what": what, **more}).encode() + b"\n")

    def hear(self, wait_s):
        """Yield reports; wait at most `wait_s` seconds for the first."""
        while select.select([self._readable], [], [], max(0.0, wait_s))[0]:
            *lines, self._text = (self._text + os.read(self._readable, 1 << 16)).split(b"\n")
            yield from map(json.loads, lines)
            wait_s = 0

    def close(self):
        """Close both ends."""
        os.close(self._readable)
        os.close(self._writable)


def fork(who, reports, body):
    """Run `body` in a child, which reports an error and exits without any clean-up."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(_LIMIT_S)
        faulthandler.register(signal.SIGUSR1)
        body()
        status = 0
    except BaseException as error:  # noqa: BLE001 - the parent must learn of it
        text = f"{who}: {type(error).__name__}: {error}"[:MOST_CHARS]
        reports.say("problem", who=who, text=text)
    finally:
        os._exit(status)


def end(pid):
    """Kill a process, and return how it ended."""
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def show_where(pid):
    """Let a process that hangs print its stacks."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1)
