"""What the tools that kill processes share: forks, what these report, and how a tool ends."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the tools use parts of the tests

LIMIT_S = 300  # of a child
MOST_CHARS = 1500  # of an error: a pipe takes lines of less than 4 KiB whole


class Reports:
    """A pipe on which forked processes report, one JSON object a line."""

    def __init__(self) -> None:
        self._readable, self._writable = os.pipe()
        self._text = b""

    def say(self, what: str, **more: Any) -> None:
        """Report to the parent."""
        os.write(self._writable, json.dumps({"what": what, **more}).encode() + b"\n")

    def hear(self, wait_s: float) -> Iterator[dict[str, Any]]:
        """Yield what was reported; wait for it at most so long."""
        while select.select([self._readable], [], [], max(0.0, wait_s))[0]:
            *lines, self._text = (self._text + os.read(self._readable, 1 << 16)).split(b"\n")
            yield from map(json.loads, lines)
            wait_s = 0

    def close(self) -> None:
        """Close both ends."""
        os.close(self._readable)
        os.close(self._writable)


def fork(who: str, reports: Reports, body: Callable[[], None]) -> int:
    """Run `body` in a child, which reports an error and ends without any clean-up."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(LIMIT_S)  # where the tool itself is killed
        faulthandler.register(signal.SIGUSR1)
        body()
        status = 0
    except BaseException as error:  # noqa: BLE001 - the parent has to hear of it
        text = f"{who}: {type(error).__name__}: {error}"[:MOST_CHARS]
        reports.say("problem", who=who, text=text)
    finally:
        os._exit(status)


def end(pid: int) -> int:
    """Kill a process, and return how it ended."""
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def show_where(pid: int) -> None:
    """Let a process that hangs print where."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1)


def parser(doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """Return a parser with the options of all these tools."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--seconds", type=float, default=seconds, help="at most")
    made.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(24))
    made.add_argument("--root", type=Path, help="parent of the roots; default: temporary")
    return made
