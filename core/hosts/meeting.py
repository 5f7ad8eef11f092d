"""Brings the ranks of a host together: they exchange plans, windows and sockets.

A window is memory of one rank that the other ranks can read. The first rank listens on a socket of
the abstract namespace, which leaves no file. It sends each rank the plans and windows of all ranks,
and a socket to each other rank. Either all ranks get the same data or none gets any, so all divide
the reads the same way.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import select
import socket
import struct
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from itertools import combinations
from typing import TYPE_CHECKING

from penstock.core.hosts.division import ReadPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.concurrency.timing import Timing

_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sI")
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_ALL = b"all are here"
_CLOSED_ON_EXEC = socket.MSG_CMSG_CLOEXEC


@dataclass(frozen=True, slots=True)
class Met:
    """The plans, windows and sockets that a rank has after a meeting.

    Attributes:
        plans: The plans of all ranks, including this one, in the order of ranks.
        window: This rank's own window: memory that the other ranks can read. `allocate` gives it
            pages.
        window_fd: The descriptor of the window's file.
        others: For each other rank, its index in `plans`, a socket to it, and its window.
    """

    plans: tuple[ReadPlan, ...]
    window: mmap.mmap
    window_fd: int
    others: tuple[tuple[int, socket.socket, mmap.mmap], ...]

    def allocate(self, size_bytes: int) -> None:
        """Allocate memory for the first `size_bytes` of the window.

        Must be called before these bytes are touched: if memory runs out, touching them kills the
        process, but allocating them raises an error.

        Raises:
            OSError: There is not enough memory.
        """
        os.posix_fallocate(self.window_fd, 0, min(size_bytes, len(self.window)))

    def part(self) -> None:
        """Leave the meeting; the other ranks keep their mappings. Idempotent."""
        for _, line, window in self.others:
            line.close()
            _unmap(window)
        _unmap(self.window)
        _close(self.window_fd)


class Meeting:
    """A meeting of the ranks of a host."""

    def __init__(
        self, secret: str, ranks: Sequence[int], rank: int, *, window_bytes: int, timing: Timing
    ) -> None:
        """Prepare.

        Args:
            secret: Known only to the ranks of this job; new for each meeting.
            ranks: The ranks that meet, at least two.
            rank: This rank.
            window_bytes: Size of each window, in whole pages.
            timing: Sets how often a rank checks for the others.
        """
        seed = f"{secret}/{ranks[0]}".encode()
        self._token = hashlib.blake2b(seed, digest_size=_TOKEN_BYTES, person=b"token").digest()
        name = hashlib.blake2b(seed, digest_size=16, person=b"name").hexdigest()
        self._address = f"\0penstock-{name}"
        self._ranks = tuple(ranks)
        self._me = self._ranks.index(rank)
        self._window_bytes = window_bytes
        self._timing = timing

    def hold(self, plan: ReadPlan, gives_up: Callable[[], bool]) -> Met | None:
        """Exchange plans, windows and sockets with the other ranks.

        Args:
            plan: The reads that this rank needs.
            gives_up: Returns whether to stop waiting for the other ranks; called repeatedly.

        Returns:
            The plans of all ranks, and the connections to the others; None if not all ranks came.

        Raises:
            OSError: This process cannot get a socket or shared memory.
            ValueError: Data from another rank cannot be read.
        """
        with ExitStack() as fds:
            mine = [_memory(plan.encode(), fds), _room(self._window_bytes, fds)]
            if self._me == 0:
                got = self._lead(mine, gives_up, fds)
            else:
                got = self._follow(mine, gives_up, fds)
            return None if got is None else self._met(mine, got)

    # -- the first one -----------------------------------------------------------------------------

    def _lead(
        self, mine: list[int], gives_up: Callable[[], bool], fds: ExitStack
    ) -> list[int] | None:
        members = range(1, len(self._ranks))
        lines: dict[int, socket.socket] = {}
        held = {0: mine}
        listener = fds.enter_context(_new_socket())
        listener.bind(self._address)
        listener.listen(len(self._ranks))
        silent: list[socket.socket] = []  # connected, but not identified yet
        while len(held) < len(self._ranks):
            for line in self._ready([listener, *silent]):
                if line is listener:
                    new = fds.enter_context(_accepted(listener))
                    if _user_of(new) == os.geteuid():
                        silent.append(new)
                    else:
                        new.close()
                    continue
                silent.remove(line)
                member = self._welcome(line, held, fds)
                if member is None:
                    line.close()
                else:
                    lines[member] = line
            # Checked in each iteration: a stranger that keeps connecting must not block this rank.
            if len(held) < len(self._ranks) and gives_up():
                return None
        ends = self._socket_pairs(fds)
        windows = {member: held[member][1] for member in held}
        for member in members:
            others = [o for o in range(len(self._ranks)) if o != member]
            sent = [held[o][0] for o in others] + [windows[o] for o in others]
            sent += [ends[member, o].fileno() for o in others]
            with suppress(OSError):  # the rank is gone: the others find its socket closed
                socket.send_fds(lines[member], [_ALL], sent)
        others = [*members]
        keep = [os.dup(ends[0, o].fileno()) for o in others]
        for fd in keep:
            fds.callback(_close, fd)
        return [held[o][0] for o in others] + [windows[o] for o in others] + keep

    def _welcome(
        self, line: socket.socket, held: dict[int, list[int]], fds: ExitStack
    ) -> int | None:
        """Receive a rank's plan and window, and return the rank's index; None for a stranger."""
        with suppress(OSError):
            data, got, _, _ = socket.recv_fds(line, _HELLO.size, 2, _CLOSED_ON_EXEC)
            for fd in got:
                fds.callback(_close, fd)
            if len(data) == _HELLO.size and len(got) == 2:  # noqa: PLR2004 - plan and window
                token, member = _HELLO.unpack(data)
                if token == self._token and 0 < member < len(self._ranks) and member not in held:
                    held[member] = list(got)
                    return int(member)
        return None

    def _socket_pairs(self, fds: ExitStack) -> dict[tuple[int, int], socket.socket]:
        found = {}
        for one, other in combinations(range(len(self._ranks)), 2):
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            found[one, other], found[other, one] = map(fds.enter_context, ends)
        return found

    # -- the others --------------------------------------------------------------------------------

    def _follow(
        self, mine: list[int], gives_up: Callable[[], bool], fds: ExitStack
    ) -> list[int] | None:
        line = fds.enter_context(_new_socket())
        while True:
            try:
                line.connect(self._address)
            except (ConnectionRefusedError, BlockingIOError):  # not listening, or its queue is full
                if gives_up():
                    return None
                time.sleep(self._timing.hosts_poll_first_s)
            else:
                break
        if _user_of(line) != os.geteuid():
            return None
        socket.send_fds(line, [_HELLO.pack(self._token, self._me)], mine)
        while not self._ready([line]):
            if gives_up():
                return None
        count = 3 * (len(self._ranks) - 1)
        data, got, _, _ = socket.recv_fds(line, len(_ALL), count, _CLOSED_ON_EXEC)
        for fd in got:
            fds.callback(_close, fd)
        return list(got) if data == _ALL and len(got) == count else None

    # -- all ---------------------------------------------------------------------------------------

    def _met(self, mine: list[int], got: list[int]) -> Met:
        others = [o for o in range(len(self._ranks)) if o != self._me]
        count = len(others)
        plans = {self._me: mine[0], **dict(zip(others, got[:count], strict=True))}
        with ExitStack() as opened:
            ways = []
            for other, window, line in zip(
                others, got[count : 2 * count], got[2 * count :], strict=True
            ):
                if os.fstat(window).st_size != self._window_bytes:
                    msg = "another rank's window has the wrong size"
                    raise ValueError(msg)
                memory = mmap.mmap(window, self._window_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
                opened.callback(memory.close)
                way = opened.enter_context(socket.socket(fileno=os.dup(line)))
                ways.append((other, way, memory))
            own = mmap.mmap(mine[1], self._window_bytes, mmap.MAP_SHARED)
            opened.callback(own.close)
            read = tuple(_plan_in(plans[member]) for member in sorted(plans))
            window_fd = os.dup(mine[1])
            opened.pop_all()
        return Met(read, own, window_fd, tuple(ways))

    def _ready(self, lines: Sequence[socket.socket]) -> list[socket.socket]:
        """Wait briefly for data or connections; return those of `lines` that have any."""
        poller = select.poll()
        by_fd = {line.fileno(): line for line in lines}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        return [by_fd[fd] for fd, _ in poller.poll(1000 * self._timing.hosts_poll_most_s)]


def _new_socket() -> socket.socket:
    """Return a non-blocking socket: the peer may be stopped, or a stranger that never answers."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(0)
    return line


def _accepted(listener: socket.socket) -> socket.socket:
    line, _ = listener.accept()
    line.settimeout(0)
    return line


def _user_of(line: socket.socket) -> int:
    data = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(data)[1]
    return user


def _room(size: int, fds: ExitStack) -> int:
    """Return a file in memory that other processes can map. Its pages are not allocated yet.

    Its size is sealed: if it shrank, an access beyond its end would kill the process.
    """
    fd = os.memfd_create("penstock-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fds.callback(_close, fd)
    os.ftruncate(fd, size)
    fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)
    return fd


def _memory(data: bytes, fds: ExitStack) -> int:
    fd = os.memfd_create("penstock-plan", os.MFD_CLOEXEC)
    fds.callback(_close, fd)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return fd


def _plan_in(fd: int) -> ReadPlan:
    size = os.fstat(fd).st_size
    data = bytearray(size)
    at = 0
    while at < size:
        read = os.preadv(fd, [memoryview(data)[at:]], at)
        if not read:
            msg = "the plan of another rank was truncated"
            raise ValueError(msg)
        at += read
    return ReadPlan.decode(memoryview(data))


def _unmap(memory: mmap.mmap) -> None:
    with suppress(BufferError):  # a view still exists: the mapping is freed with the view
        memory.close()


def _close(fd: int) -> None:
    with suppress(OSError):
        os.close(fd)
