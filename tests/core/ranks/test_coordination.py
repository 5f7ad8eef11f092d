"""Every implementation keeps the promises of the contract, and the suite notices broken ones."""

import inspect
import itertools
import threading
from contextlib import closing, suppress

import pytest
import torch.distributed as dist
from tests.integration.ranks.slow_link import SlowLink

from penstock.core.abc import COORDINATION_VALUE_BYTES
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import ConfigError, CoordinationError
from penstock.core.ranks.torch_job import TorchCoordination, job_prefix
from penstock.testing import coordination as suite
from penstock.testing.coordination import (
    COORDINATION_CHECKS,
    MemoryBoard,
    MemoryCoordination,
    check_coordination,
)

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def tcp_store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def on_boards():
    boards = {}
    return lambda job, rank: MemoryCoordination(boards.setdefault(job, MemoryBoard()))


def on_store(store):
    number = next(NUMBERS)
    return lambda job, rank: TorchCoordination(store, prefix=f"{number}/{job}")


@pytest.fixture(params=["memory", "tcp", "hash", "file"])
def open_member(request, tmp_path):
    if request.param == "memory":
        return on_boards()
    if request.param == "tcp":
        return on_store(request.getfixturevalue("tcp_store"))
    if request.param == "file":
        return on_store(dist.FileStore(str(tmp_path / "store"), 1))
    return on_store(dist.HashStore())


def test_coordination_conforms(open_member):
    check_coordination(open_member)


def test_no_check_is_forgotten():
    written = {
        function
        for name, function in inspect.getmembers(suite, inspect.isfunction)
        if list(inspect.signature(function).parameters) == ["open_member"]
    }
    assert written - {suite.check_coordination} == set(COORDINATION_CHECKS)


# -- what the suite notices ------------------------------------------------------------------------


class LastWins(MemoryCoordination):
    def decide(self, key, value):
        self.post(key, value)
        return value


class OwnAnswer(MemoryCoordination):
    def decide(self, key, value):
        super().decide(key, value)
        return value


class Touching(MemoryCoordination):
    def read(self, keys):
        for key in keys:
            self._board.decide(key, b"\x00")
        return [None if value == b"\x00" else value for value in super().read(keys)]


class OneAtATime(MemoryCoordination):
    def __init__(self, board):
        super().__init__(board)
        self._lock = threading.Lock()

    def post(self, key, value):
        with self._lock:
            super().post(key, value)

    def wait(self, key, timeout_s):
        with self._lock:
            return super().wait(key, min(timeout_s, 0.2))


class Unordered(MemoryCoordination):
    def read(self, keys):
        return super().read(sorted(keys))


class Shared(MemoryCoordination):
    BOARD = MemoryBoard()

    def __init__(self, board):
        super().__init__(self.BOARD)


class Unchecked(MemoryCoordination):
    def post(self, key, value):
        self._board.post(key, value)


@pytest.mark.parametrize(
    "broken", [LastWins, OwnAnswer, Touching, OneAtATime, Unordered, Shared, Unchecked]
)
def test_the_suite_notices(broken):
    boards = {}
    with pytest.raises(AssertionError, match=r"\w"):
        check_coordination(lambda job, rank: broken(boards.setdefault(job, MemoryBoard())))


# -- the store of torch ----------------------------------------------------------------------------


def test_after_a_hung_call_others_wait_a_fraction_of_their_timeout(tcp_store):
    with closing(SlowLink(tcp_store.port)) as link:
        client = dist.TCPStore("127.0.0.1", link.port, is_master=False)
        with TorchCoordination(client, prefix="hangs", call_s=1.0) as member:
            member.post("key", b"value")
            link.delay_s = 2.5
            for limit in ("1", r"0\.25", r"0\.25"):
                with pytest.raises(CoordinationError, match=rf"did not answer in {limit} s"):
                    member.read(["key"])
            link.delay_s = 0.0
            deadline = Deadline(60.0)
            while not deadline.is_over():
                with suppress(CoordinationError):
                    assert member.read(["key"]) == [b"value"]
                    break
            assert not deadline.is_over()
            link.delay_s = 2.5
            with pytest.raises(CoordinationError, match="did not answer in 1 s"):
                member.read(["key"])


def test_a_slow_store_is_used_again_after_a_timed_out_call(tcp_store):
    with closing(SlowLink(tcp_store.port)) as link:
        client = dist.TCPStore("127.0.0.1", link.port, is_master=False)
        with TorchCoordination(client, prefix="slow", call_s=2.0) as member:
            member.post("key", b"value")
            link.delay_s = 0.12  # for each of two round trips
            assert member.read(["key"]) == [b"value"]
            link.delay_s = 1.2
            with pytest.raises(CoordinationError, match="did not answer in 2 s"):
                member.read(["key"])
            link.delay_s = 0.4  # longer than the timeout after a hung call
            answers, deadline = [], Deadline(60.0)
            while not answers and not deadline.is_over():
                with suppress(CoordinationError):
                    answers = member.read(["key"])
            assert answers == [b"value"]


def test_a_store_that_cannot_be_cloned_is_refused():
    with pytest.raises(ConfigError, match=r"a Store cannot be cloned .*: use a TCPStore"):
        TorchCoordination(dist.Store(), prefix="job")


def test_without_a_store_the_default_groups_is_used():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        first, second = job_prefix(), job_prefix()
        with TorchCoordination(prefix=first) as one, TorchCoordination(prefix=second) as other:
            one.post("slots/00000", b"x")
            assert one.read(["slots/00000"]) == [b"x"]
            assert other.read(["slots/00000"]) == [None]
    finally:
        dist.destroy_process_group()


def test_prefixes_differ_between_restarts_and_instances(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    first, second = job_prefix(), job_prefix()
    assert first.startswith("penstock/3/")
    assert first != second


def test_ranks_of_nodes_with_other_restart_counts_meet_in_this_store(monkeypatch):
    """torchrun counts on each node only the failures of its own processes."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    for restarts in "03":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        assert job_prefix().startswith("penstock/0/")


def test_a_register_that_is_empty_in_the_store_is_free(tcp_store):
    with TorchCoordination(tcp_store, prefix=f"{next(NUMBERS)}/touched") as member:
        keys = [f"end/{n}" for n in range(100)]
        member.read(keys)  # appends nothing to each, to read them in one call
        assert not member.wait(keys[0], 0.0)
        assert member.decide(keys[0], b"x" * COORDINATION_VALUE_BYTES)[:2] == b"xx"
        assert member.decide(keys[0], b"y")[:2] == b"xx"
