"""Ranks of one host meet by a socket, and get each other's plans and memory."""

import os
import secrets
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from penstock.core.concurrency.timing import Timing
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.hosts.division import ReadPlan
from penstock.core.hosts.meeting import Meeting

WINDOW = 1 << 20
PATIENCE_S = 60.0


def plan(rank):
    return ReadPlan((f"blob{rank}",), np.full((1, 5), 0, np.int64))


def secret_of_a_job():
    """A new one each time: or ranks of another test run could meet these."""
    return secrets.token_hex(16)


def late(limit_s):
    """Ends a rank's wait for others."""
    return Deadline(limit_s).is_over


def meet(ranks, *, jobs=(0,), limit_s=PATIENCE_S, absent=()):
    """The result of each rank, by threads; the ranks are of the `jobs` in turn."""
    found, secret = {}, {job: secret_of_a_job() for job in jobs}

    def one(rank):
        meeting = Meeting(
            secret[jobs[rank % len(jobs)]], ranks, rank, window_bytes=WINDOW, timing=Timing()
        )
        found[rank] = meeting.hold(plan(rank), late(limit_s))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    return found


def part(found):
    for met in found.values():
        if met is not None:
            met.part()


def test_all_get_all_plans_and_see_each_others_memory():
    ranks = (4, 5, 6)
    found = meet(ranks)
    try:
        for me, rank in enumerate(ranks):
            met = found[rank]
            assert [p.blobs for p in met.plans] == [("blob4",), ("blob5",), ("blob6",)]
            assert [number for number, _, _ in met.others] == [n for n in range(3) if n != me]
            met.allocate(WINDOW)
            met.window[me] = 1
        for me, rank in enumerate(ranks):
            for number, line, window in found[rank].others:
                assert window[:3] == bytes(int(n == number) for n in range(3))
                line.send(bytes([me]))
        for rank in ranks:
            assert [line.recv(9) for _, line, _ in found[rank].others] == [
                bytes([number]) for number, _, _ in found[rank].others
            ]
    finally:
        part(found)


def test_others_cannot_write_to_a_window_or_truncate_it():
    found = meet((0, 1))
    try:
        _, _, window = found[0].others[0]
        with pytest.raises(TypeError):
            window[0] = 1
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(found[0].window_fd, 10)
    finally:
        part(found)


def descriptors():
    """The sockets and the shared memory that this process has open."""
    found = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of another thread, which has closed it meanwhile
            found.append((str(file.readlink()), file.stat().st_ino))
    return {one for one in found if one[0].startswith(("socket:", "/memfd:penstock"))}


def test_no_files_are_left():
    before = descriptors()
    part(meet((0, 1, 2)))
    assert descriptors() <= before


def test_the_slot_of_a_waiting_rank_is_freed():
    meeting = Meeting(secret_of_a_job(), (0, 1), 0, window_bytes=WINDOW, timing=Timing())
    assert meeting.hold(plan(0), lambda: True) is None
    assert meeting._address.replace("\0", "@") not in Path("/proc/self/net/unix").read_text()


def test_no_rank_meets_if_one_is_absent():
    assert meet((0, 1, 2), absent=(2,), limit_s=0.3) == {0: None, 1: None}
    assert meet((0, 1, 2), absent=(0,), limit_s=0.3) == {1: None, 2: None}


def test_no_rank_waits_once_all_have_failed():
    assert meet((0, 1), absent=(1,), limit_s=0.0) == {0: None}
    assert meet((0, 1), absent=(0,), limit_s=0.0) == {1: None}


def test_two_jobs_do_not_meet():
    assert meet((0, 1), jobs=("one", "another"), limit_s=0.3) == {0: None, 1: None}


def test_a_stranger_is_disconnected_and_the_ranks_meet():
    secret = secret_of_a_job()
    meeting = Meeting(secret, (0, 1), 0, window_bytes=WINDOW, timing=Timing())
    stop, tries = threading.Event(), []

    def disturb():
        while not stop.is_set():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                try:
                    line.connect(meeting._address)
                    hello = b"x" * 32 + (1).to_bytes(4, "little")
                    socket.send_fds(line, [hello], [line.fileno(), line.fileno()])
                    tries.append(line.recv(10))
                except OSError:
                    continue

    thread = threading.Thread(target=disturb)
    thread.start()
    found = {}
    try:
        one = threading.Thread(
            target=lambda: found.update({0: meeting.hold(plan(0), late(PATIENCE_S))})
        )
        one.start()
        while not tries:
            stop.wait(0.01)
        other = Meeting(secret, (0, 1), 1, window_bytes=WINDOW, timing=Timing())
        found[1] = other.hold(plan(1), late(PATIENCE_S))
        one.join(PATIENCE_S)
    finally:
        stop.set()
        thread.join(30)
    assert set(tries) == {b""}
    assert found[0] is not None
    assert found[1] is not None
    part(found)


def rank_0_waits_in_vain(meeting, begun):
    """The thread in which rank 0 waits for others in vain. Its time ends after some polls once
    `begun` is set.
    """
    looks = []

    def gives_up():
        looks.append(begun.is_set())
        return sum(looks) > 3

    thread = threading.Thread(target=meeting.hold, args=(plan(0), gives_up))
    thread.start()
    return thread


def connect(line, meeting):
    """Connect to rank 0, once it listens."""
    while True:
        try:
            return line.connect(meeting._address)
        except ConnectionRefusedError:
            time.sleep(0.01)


def test_a_silent_connection_holds_up_no_rank():
    meeting = Meeting(secret_of_a_job(), (0, 1), 0, window_bytes=WINDOW, timing=Timing())
    begun = threading.Event()
    thread = rank_0_waits_in_vain(meeting, begun)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        connect(line, meeting)
        begun.set()
        thread.join(PATIENCE_S / 2)
        assert not thread.is_alive()


def test_constant_strangers_delay_no_rank_past_its_deadline():
    meeting = Meeting(secret_of_a_job(), (0, 1), 0, window_bytes=WINDOW, timing=Timing())
    stop, begun = threading.Event(), threading.Event()

    def disturb():
        while not stop.is_set():
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with line, suppress(OSError):
                line.connect(meeting._address)
                line.send(b"x")
                begun.set()

    crowd = [threading.Thread(target=disturb) for _ in range(3)]
    for one in crowd:
        one.start()
    thread = rank_0_waits_in_vain(meeting, begun)
    thread.join(PATIENCE_S / 2)
    alive = thread.is_alive()
    stop.set()
    for one in (*crowd, thread):
        one.join(30)
    assert not alive


def test_stopped_rank_0_with_a_full_queue_delays_none_past_deadline():
    meeting = Meeting(secret_of_a_job(), (0, 1), 1, window_bytes=WINDOW, timing=Timing())
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(meeting._address)
        listener.listen(1)
        refused = 0
        while not refused:
            line = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            line.setblocking(False)
            refused = line.connect_ex(meeting._address)
        found = []
        thread = threading.Thread(
            target=lambda: found.append(meeting.hold(plan(1), late(0.3))),
            daemon=True,
        )
        thread.start()
        thread.join(PATIENCE_S)
        assert found == [None]
