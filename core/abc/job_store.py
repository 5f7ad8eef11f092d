"""The contract of the store through which a job's ranks agree: post, read, decide once, wait.

Tested in `tests/core/ranks/test_coordination.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from penstock.core.abc.backend import check_blob_name
from penstock.core.errors import CoordinationError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

COORDINATION_VALUE_BYTES = 1 << 16
"""The most bytes of a value; core posts at most 16 KiB, usually a few hundred bytes."""


class Coordination(ABC):
    """Small values that all ranks of one job can read, and registers that are written once.

    Each rank has its own instance; all instances of a job show the same values. There is no other
    communication: no group, no barrier, no order between ranks. So nothing here can be reordered
    against the collectives of training, and a dead rank blocks no other rank.

    **Keys** are names like those of blobs (relative segments of `[A-Za-z0-9._-]`, see
    `check_blob_name`), **values** 1 to 65,536 bytes. A key is either posted or decided, never both,
    and only one rank posts it; core ensures that.

    **Threads.** Thread-safe. `wait` delays no other call of the same instance: one thread must be
    able to post a beat while another waits.

    **Time.** A call ends, or raises, within the call time-out of the implementation (10 s unless it
    says otherwise), even if the store hangs. Only `wait` may take longer, by `timeout_s`.

    **Failure.** Every method raises a CoordinationError if the store cannot be reached, or does not
    answer in time. The outcome is unknown then: a `post` or `decide` may have happened, may happen
    later, or never. Both may be repeated: a repeated `decide` returns the decided value, even if
    its own earlier try set it. An error never means "no". A rank that cannot read a register must
    treat it as unknown, and must not delete data that a decision may need.

    **Life.** Values live at least as long as the job. A register is never freed while a rank of the
    job may still read it, even a rank that slept for hours: otherwise that rank could decide again
    what the others have already acted on.

    Third-party implementations pass `penstock.testing.coordination`.
    """

    @property
    def host(self) -> str | None:
        """The machine that holds the values, by name or address; None if it is not known.

        All ranks reach it, so the route to it is a route between their machines.
        """
        return None

    @abstractmethod
    def post(self, key: str, value: bytes, /) -> None:
        """Set the value of `key`, replacing any earlier value.

        Every `read` and `wait` that begins after this has returned sees the value, or a later one.
        Readers see whole values, never a mix of two.

        Raises:
            CoordinationError: The store does not answer: the value may be posted now, later or
                never. Or the key or value is not allowed, and nothing was changed.
        """

    @abstractmethod
    def read(self, keys: Sequence[str], /) -> list[bytes | None]:
        """Return the values of `keys`, in their order; None for a key without a value.

        Reads both posts and registers. The values need not be from one moment. Made for thousands
        of keys: the number of an implementation's round trips does not grow with them, or it makes
        them in parallel.

        Raises:
            CoordinationError: The store does not answer, or a key is not allowed.
        """

    @abstractmethod
    def decide(self, key: str, value: bytes, /) -> bytes:
        """Return the value that any rank first gave to the register `key`.

        Of all calls with this key, by all ranks and at all times, exactly one sets the register to
        its `value`; all return that value. It never changes.

        Raises:
            CoordinationError: The store does not answer: the register may be set to `value` now,
                later, or never. Call again to learn. Or the key or value is not allowed, and
                nothing was changed.
        """

    @abstractmethod
    def wait(self, key: str, timeout_s: float, /) -> bool:
        """Wait until `key` has a value; return whether it has one.

        Returns as soon as the implementation can learn of the value, and at the latest `timeout_s`
        seconds plus one call time-out after the call.

        Raises:
            CoordinationError: The store does not answer, or the key is not allowed.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release what this instance holds; idempotent. Later calls raise a CoordinationError.

        Values stay for the other ranks. Where the values live in the process of one rank, that
        rank closes last: see the implementation.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_coordination_key(key: str, /) -> None:
    """Refuse a key that is not of the form of a blob name.

    Raises:
        CoordinationError: The key is malformed.
    """
    try:
        check_blob_name(key)
    except StorageError as error:
        raise CoordinationError(str(error)) from error


def check_coordination_value(key: str, value: bytes, /) -> None:
    """Refuse a key or a value that the contract does not allow.

    Raises:
        CoordinationError: The key is malformed, or the value is empty or too large.
    """
    check_coordination_key(key)
    if not 0 < len(value) <= COORDINATION_VALUE_BYTES:
        msg = f"{key}: a value has 1 to {COORDINATION_VALUE_BYTES} bytes, not {len(value)}"
        raise CoordinationError(msg)
