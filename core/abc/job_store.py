"""The contract of the store by which the ranks of a job agree: post, read, decide once, wait.

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
"""The most bytes of a value; core posts at most 16 KiB, and a few hundred bytes as a rule."""


class Coordination(ABC):
    """Small values that all ranks of one job can read, and registers that are written once.

    Each rank has its own instance; all instances of a job show the same values. There is no other
    communication: no group, no barrier, no order between ranks. So nothing here can be reordered
    against the collectives of training, and a dead rank blocks no other rank.

    **Keys** are names as those of blobs (relative segments of `[A-Za-z0-9._-]`, see
    `check_blob_name`), **values** 1 to 65,536 bytes. A key is either posted or decided, never both,
    and only one rank posts it; core sees to that.

    **Threads.** Thread-safe. `wait` delays no other call of the same instance: a beat must go out
    while another thread waits.

    **Time.** A call ends, or raises, within the call time-out of the implementation (10 s unless it
    says otherwise), even if the store hangs. Only `wait` may take longer: `timeout_s` more.

    **Failure.** Every method raises a CoordinationError if the store cannot be reached, or does not
    answer in time. Nothing is known then: a `post` or a `decide` may have happened, may happen
    later, or never. Both may be repeated: a repeated `decide` returns what was decided, be it by an
    earlier try of its own. An error never means "no". A rank that cannot read a register must treat
    it as unknown, and must not delete data that a decision may need.

    **Life.** Values live at least as long as the job. A register is never freed while a rank of the
    job may still look at it, even a rank that slept for hours: otherwise the sleeper could decide
    again what the others have long acted on.

    A third party's implementation passes `penstock.testing.coordination`.
    """

    @property
    def host(self) -> str | None:
        """The machine where the values are, by name or address; None: it is not known.

        All ranks reach it, so the way there is a way between their machines.
        """
        return None

    @abstractmethod
    def post(self, key: str, value: bytes, /) -> None:
        """Set the value of `key`, and replace the one that is there.

        Every `read` and `wait` that begins after this has returned finds the value, or a later one.
        Readers see whole values, never a mix of two.

        Raises:
            CoordinationError: The store does not answer: the value may be posted now, later or
                never. Or the key or the value is not allowed; nothing was changed then.
        """

    @abstractmethod
    def read(self, keys: Sequence[str], /) -> list[bytes | None]:
        """Return the values of `keys`, in their order; None for a key without a value.

        Reads posts as well as registers. The values need not be of one moment. Made for thousands
        of keys: an implementation needs a number of round trips that does not grow with them, or
        makes them in parallel.

        Raises:
            CoordinationError: The store does not answer, or a key is not allowed.
        """

    @abstractmethod
    def decide(self, key: str, value: bytes, /) -> bytes:
        """Return the value that the register `key` was given first, by any rank.

        Of all calls with this key, of all ranks and at all times, exactly one sets the register to
        its `value`; all return that value. It never changes.

        Raises:
            CoordinationError: The store does not answer: the register may have been set to `value`
                now, later, or never. Call again to learn. Or the key or the value is not allowed;
                nothing was changed then.
        """

    @abstractmethod
    def wait(self, key: str, timeout_s: float, /) -> bool:
        """Wait until `key` has a value; return whether it has one.

        Returns as soon as the implementation can learn of the value, and at the latest
        `timeout_s` seconds after the call, plus one call time-out.

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
    """Refuse a value that no implementation has to take, and a key that none takes.

    Raises:
        CoordinationError: The key is malformed, or the value is empty or too large.
    """
    check_coordination_key(key)
    if not 0 < len(value) <= COORDINATION_VALUE_BYTES:
        msg = f"{key}: a value has 1 to {COORDINATION_VALUE_BYTES} bytes, not {len(value)}"
        raise CoordinationError(msg)
