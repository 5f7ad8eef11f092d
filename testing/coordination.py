"""The conformance suite of `Coordination`: the promises of the contract, as plain functions.

```python
def open_member(job: str, rank: int) -> Coordination:  # members of the same `job` share values
    return MyCoordination(job=f"{prefix}/{job}")

check_coordination(open_member)                                # all, or with pytest:

@pytest.mark.parametrize("check", COORDINATION_CHECKS, ids=lambda check: check.__name__)
def test_coordination(check): check(open_member)
```

The suite opens all members in one process, each as an instance of its own. It does not test ranks
in separate processes: cover those in your own tests.
"""

# ruff: noqa: D103 - checks explain themselves by their names

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.abc import (
    COORDINATION_VALUE_BYTES,
    Coordination,
    check_coordination_key,
    check_coordination_value,
)
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import CoordinationError
from penstock.testing.expectations import expect, finding, pattern, raises

if TYPE_CHECKING:
    from collections.abc import Callable

    OpenMember: TypeAlias = Callable[[str, int], Coordination]
    CoordinationCheck: TypeAlias = Callable[[OpenMember], None]
    from collections.abc import Sequence

MEMBERS, TURNS = 6, 20
MANY = 200
PATIENCE_S = 30.0
BAD_KEYS = ("", "/abs", "../up", "a//b", "a/", "a b", "a\x00b", "ä")


def _agreed(check: CoordinationCheck) -> CoordinationCheck:
    """Turn any exception in the check into an AssertionError that names the broken promise."""

    @functools.wraps(check)
    def said_in_words(open_member: OpenMember) -> None:
        with finding(f"while checking that {check.__name__.replace('_', ' ')}"):
            check(open_member)

    return said_in_words


def expect_wait(found: object, what: str, *, ends: bool) -> None:
    expect(found, ends, what)


@_agreed
def every_member_reads_what_was_posted(open_member: OpenMember) -> None:
    with open_member("post", 0) as one, open_member("post", 1) as two:
        values = [b"x", bytes(range(256)), pattern(16_384), b"\x00", b'{"n":1}']
        for number, value in enumerate(values):
            one.post(f"slot/{number}", value)
        keys = [f"slot/{number}" for number in range(len(values))]
        for member in (one, two):
            expect(member.read(keys), values, "what was read")
            mixed = member.read([keys[2], "none", keys[0], keys[2]])
            expect(mixed, [values[2], None, values[0], values[2]], "what was read in another order")
        expect(two.read([]), [], "a read of no keys")


@_agreed
def a_post_replaces_the_one_before(open_member: OpenMember) -> None:
    with open_member("replace", 0) as one, open_member("replace", 1) as two:
        for value in (b"first", b"the second, which is longer", b"3"):
            one.post("slot/0", value)
            expect(two.read(["slot/0"]), [value], "what was read after a post")


@_agreed
def many_keys_are_read_at_once_with_and_without_a_value(open_member: OpenMember) -> None:
    with open_member("many", 0) as one, open_member("many", 1) as two:
        keys = [f"slot/{number}" for number in range(MANY)]
        expect(two.read(keys), [None] * MANY, "a read of many keys without values")
        for number in range(0, MANY, 3):
            one.post(keys[number], b"%d" % number)
        expected = [None if number % 3 else b"%d" % number for number in range(MANY)]
        for member in (two, one):
            expect(member.read(keys), expected, "a read of many keys, some with values")


@_agreed
def the_first_value_of_a_register_stays(open_member: OpenMember) -> None:
    with open_member("decide", 0) as one, open_member("decide", 1) as two:
        expect(one.decide("end", b"commit"), b"commit", "what the first decide returned")
        expect(two.decide("end", b"abort"), b"commit", "what a later decide returned")
        expect(one.decide("end", b"abort"), b"commit", "what the winner's later decide returned")
        expect(one.decide("end", b"commit"), b"commit", "what the repeated decide returned")
        expect(two.read(["end", "other"]), [b"commit", None], "what was read")
        expect(two.decide("other", b"\x00\xff"), b"\x00\xff", "what another register returned")


@_agreed
def a_register_that_was_only_looked_at_is_free(open_member: OpenMember) -> None:
    with open_member("look", 0) as one, open_member("look", 1) as two:
        keys = [f"end/{number}" for number in range(MANY)]
        expect(two.read(keys), [None] * MANY, "a read of free registers")
        expect(two.read(keys[:1]), [None], "a read of a free register")
        expect_wait(
            two.wait(keys[0], 0.0),
            "what a wait for a register that was only read returned",
            ends=False,
        )
        expect(one.decide(keys[0], b"mine"), b"mine", "what decide returned")
        expect_wait(two.wait(keys[0], PATIENCE_S), "what a wait for a decision returned", ends=True)


@_agreed
def of_members_in_a_race_exactly_one_decides(open_member: OpenMember) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(MEMBERS) as pool:
        members = [stack.enter_context(open_member("race", rank)) for rank in range(MEMBERS)]
        for turn in range(TURNS):
            start = threading.Barrier(MEMBERS)

            def decide(rank: int, turn: int = turn, start: threading.Barrier = start) -> bytes:
                start.wait()
                return members[rank].decide(f"end/{turn}", b"%d" % rank)

            decisions = set(pool.map(decide, range(MEMBERS)))
            assert len(decisions) == 1, f"members got different decisions: {sorted(decisions)}"
            expect(members[0].read([f"end/{turn}"]), [*decisions], "what the register holds")


@_agreed
def a_wait_ends_with_a_post_a_decision_or_its_time(open_member: OpenMember) -> None:
    with open_member("wait", 0) as one, open_member("wait", 1) as two:
        expect_wait(two.wait("go", 0.0), "a wait of 0 s without a post", ends=False)
        expect_wait(two.wait("go", 0.05), "a wait without a post", ends=False)
        one.post("go", b"1")
        one.decide("end", b"1")
        expect_wait(two.wait("go", 0.0), "a wait of 0 s after the post", ends=True)
        for key, act in (("go2", one.post), ("end2", one.decide)):
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(two.wait, key, PATIENCE_S)
                act(key, b"1")
                expect_wait(waiting.result(), f"a wait that began before {act.__name__}", ends=True)


@_agreed
def a_wait_delays_no_other_call_of_its_member(open_member: OpenMember) -> None:
    with open_member("delay", 0) as one, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.wait, "go", PATIENCE_S)
        one.post("slot/0", b"beat")
        expect(one.read(["slot/0"]), [b"beat"], "what was read during a wait")
        one.decide("end", b"x")
        assert not waiting.done(), "a wait ended without a post"
        one.post("go", b"1")
        expect_wait(waiting.result(), "a wait of the same member", ends=True)


@_agreed
def a_reader_never_sees_a_torn_value(open_member: OpenMember) -> None:
    with open_member("torn", 0) as one, open_member("torn", 1) as two:
        versions = [bytes([n]) * (100 + 5000 * n) for n in range(4)]
        one.post("slot/0", versions[0])
        stop = threading.Event()
        torn: list[int] = []

        def look() -> None:
            while not stop.is_set():
                (value,) = two.read(["slot/0"])
                if value not in versions:
                    torn.append(len(value or b""))

        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(look)
            try:
                for turn in range(5 * TURNS):
                    one.post("slot/0", versions[turn % 4])
            finally:
                stop.set()
            looking.result()
        assert not torn, f"values of {torn[:5]} bytes were read, but never posted"


@_agreed
def jobs_of_other_names_share_nothing(open_member: OpenMember) -> None:
    with open_member("job-0", 0) as one, open_member("job-1", 0) as two:
        one.post("slot/0", b"of the first")
        one.decide("end", b"abort")
        expect(two.read(["slot/0", "end"]), [None, None], "what another job reads")
        expect(two.decide("end", b"commit"), b"commit", "what another job decides")


@_agreed
def values_outlive_the_member_that_gave_them(open_member: OpenMember) -> None:
    one, two = open_member("outlive", 0), open_member("outlive", 1)
    with two:
        one.post("slot/0", b"x" * COORDINATION_VALUE_BYTES)
        one.decide("end", b"commit")
        one.close()
        values = two.read(["slot/0", "end"])
        expect(values, [b"x" * COORDINATION_VALUE_BYTES, b"commit"], "what a closed member left")
        expect(two.decide("end", b"abort"), b"commit", "what decide returned after a close")


@_agreed
def malformed_keys_and_values_are_refused(open_member: OpenMember) -> None:
    with open_member("bad", 0) as one:
        for key in BAD_KEYS:
            for name, call in (
                ("post", lambda k=key: one.post(k, b"x")),
                ("decide", lambda k=key: one.decide(k, b"x")),
                ("read", lambda k=key: one.read([k])),
                ("wait", lambda k=key: one.wait(k, 0.0)),
            ):
                with raises(CoordinationError, by=f"{name} of the malformed key {key!r}"):
                    call()
        for value in (b"", b"x" * (COORDINATION_VALUE_BYTES + 1)):
            for act in (one.post, one.decide):
                with raises(CoordinationError, by=f"{act.__name__} of {len(value)} bytes"):
                    act("slot/0", value)
        expect(one.read(["slot/0"]), [None], "what refused values left")


@_agreed
def close_may_be_repeated_and_ends_all_use(open_member: OpenMember) -> None:
    one = open_member("close", 0)
    one.post("slot/0", b"x")
    one.close()
    one.close()
    for name, call in (
        ("post", lambda: one.post("slot/0", b"y")),
        ("decide", lambda: one.decide("end", b"y")),
        ("read", lambda: one.read(["slot/0"])),
        ("wait", lambda: one.wait("slot/0", 0.0)),
    ):
        with raises(CoordinationError, by=f"{name} after close"):
            call()


COORDINATION_CHECKS: tuple[CoordinationCheck, ...] = (
    every_member_reads_what_was_posted,
    a_post_replaces_the_one_before,
    many_keys_are_read_at_once_with_and_without_a_value,
    the_first_value_of_a_register_stays,
    a_register_that_was_only_looked_at_is_free,
    of_members_in_a_race_exactly_one_decides,
    a_wait_ends_with_a_post_a_decision_or_its_time,
    a_wait_delays_no_other_call_of_its_member,
    a_reader_never_sees_a_torn_value,
    jobs_of_other_names_share_nothing,
    values_outlive_the_member_that_gave_them,
    malformed_keys_and_values_are_refused,
    close_may_be_repeated_and_ends_all_use,
)
"""All checks; each takes the function that opens a member, and raises AssertionError."""


def check_coordination(open_member: OpenMember, /) -> None:
    """Run all checks, each on its own jobs.

    Args:
        open_member: Opens a rank's view of the job with the given name. A job that was not opened
            before must have no values.

    Raises:
        AssertionError: A promise of the contract is broken; the message names it.
    """
    for check in COORDINATION_CHECKS:
        check(open_member)


class MemoryBoard:
    """The values that instances of `MemoryCoordination` share. Thread-safe."""

    def __init__(self) -> None:
        """Create a board without values."""
        self.changed = threading.Condition()  # guards `_values`, and signals changes
        self._values: dict[str, bytes] = {}

    def post(self, key: str, value: bytes) -> None:
        """Set the value of `key`, and wake all waiters."""
        with self.changed:
            self._values[key] = value
            self.changed.notify_all()

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the value of each key; None for a key without a value."""
        with self.changed:
            return [self._values.get(key) for key in keys]

    def decide(self, key: str, value: bytes) -> bytes:
        """Set a value if there is none; return the value that the key then has."""
        with self.changed:
            first = self._values.setdefault(key, value)
            self.changed.notify_all()
            return first

    def holds(self, key: str) -> bool:
        """Return whether `key` has a value; the caller holds `changed`."""
        return key in self._values


class MemoryCoordination(Coordination):
    """One rank's view of a `MemoryBoard`, for ranks that are threads of one process."""

    def __init__(self, board: MemoryBoard) -> None:
        """Attach to `board`."""
        self._board = board
        self._closed = False

    @property
    def host(self) -> str:
        """The name of this machine."""
        return "localhost"

    def post(self, key: str, value: bytes, /) -> None:
        """See `Coordination.post`."""
        check_coordination_value(key, value)
        self._check_open()
        self._board.post(key, bytes(value))

    def read(self, keys: Sequence[str], /) -> list[bytes | None]:
        """See `Coordination.read`. All values are from the same moment."""
        for key in keys:
            check_coordination_key(key)
        self._check_open()
        return self._board.read(keys)

    def decide(self, key: str, value: bytes, /) -> bytes:
        """See `Coordination.decide`."""
        check_coordination_value(key, value)
        self._check_open()
        return self._board.decide(key, bytes(value))

    def wait(self, key: str, timeout_s: float, /) -> bool:
        """See `Coordination.wait`. A change ends the wait at once."""
        check_coordination_key(key)
        self._check_open()
        deadline = Deadline(timeout_s)
        with self._board.changed:
            while not self._board.holds(key) and not deadline.is_over():
                self._board.changed.wait(deadline.left_s())
            return self._board.holds(key)

    def close(self) -> None:
        """See `Coordination.close`."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            msg = "this rank's coordination is closed"
            raise CoordinationError(msg)
