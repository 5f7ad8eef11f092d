"""The contract of the store through which a job's ranks agree: it can post, read, decide and wait.

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
    """Shares small values and write-once registers among all ranks of one job.

    Each rank has its own instance; all instances of a job show the same values. There is no other
    communication: no group, no barrier, no order between ranks. So no call can interfere with the
    collectives of training, and a dead rank blocks no other rank.

    **Keys** are names like those of blobs (relative segments of `[A-Za-z0-9._-]`, see
    `check_blob_name`), **values** 1 to 65,536 bytes. A key is either posted or decided, never both,
    and only one rank posts it; core ensures that.

    **Threads.** Thread-safe. `wait` delays no other call of the same instance: one thread must be
    able to post its rank's progress while another waits.

    **Time.** A call returns or raises within the implementation's call timeout (10 s by default),
    even if the store hangs. Only `wait` may take longer, by `timeout_s`.

    **Failure.** Every method raises a CoordinationError if the store cannot be reached, or does not
    answer in time. The outcome is then unknown: a `post` or `decide` may have happened, may happen
    later, or never. Both may be retried: a retried `decide` returns the decided value, even if the
    first try set it. An error never means "no". A rank that cannot read a register must treat it as
    unknown, and must not delete data that a decision may need.

    **Lifetime.** Values live at least as long as the job. A register is never freed while a rank of
    the job may still read it, even a rank that slept for hours. Otherwise that rank could decide
    differently after the others have acted on the first decision.

    Third-party implementations must pass the checks of `penstock.testing.coordination`.
    """

    @property
    def host(self) -> str | None:
        """Name or address of the machine that holds the values; None if unknown.

        All ranks can reach it, so the network route to it also connects their machines.
        """
        return None

    @abstractmethod
    def post(self, key: str, value: bytes, /) -> None:
        """Set the value of `key`, replacing any earlier value.

        Every `read` and `wait` that begins after `post` returns sees this value or a later one.
        Readers see whole values, never a mix of two.

        Raises:
            CoordinationError: The store does not answer, and the value may be posted now, later or
                never. Or the key or value is not allowed, and nothing was changed.
        """

    @abstractmethod
    def read(self, keys: Sequence[str], /) -> list[bytes | None]:
        """Return the values of `keys`, in their order; None for a key without a value.

        Reads both posts and registers. The values are not a consistent snapshot. Must be fast for
        thousands of keys: the number of round trips does not grow with the number of keys, or the
        round trips run in parallel.

        Raises:
            CoordinationError: The store does not answer, or a key is not allowed.
        """

    @abstractmethod
    def decide(self, key: str, value: bytes, /) -> bytes:
        """Set the register `key` to `value` if it is unset; return the register's value.

        Of all calls for a key, by all ranks at any time, exactly one sets the register. All calls
        return the value that this call has set, which never changes.

        Raises:
            CoordinationError: The store does not answer, and the register may be set to `value`
                now, later or never; another call returns the outcome. Or the key or value is not
                allowed, and nothing was changed.
        """

    @abstractmethod
    def wait(self, key: str, timeout_s: float, /) -> bool:
        """Wait until `key` has a value; return False if the deadline passes first.

        Returns as soon as the implementation sees the value, and at most `timeout_s` seconds plus
        one call timeout after the call.

        Raises:
            CoordinationError: The store does not answer, or the key is not allowed.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release this instance's resources. Idempotent. Later calls raise a CoordinationError.

        The values remain for the other ranks. If one rank's process holds the values, that rank
        must close last: see the implementation.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_coordination_key(key: str, /) -> None:
    """Check that a key has the form of a blob name.

    Raises:
        CoordinationError: The key is malformed.
    """
    try:
        check_blob_name(key)
    except StorageError as error:
        raise CoordinationError(str(error)) from error


def check_coordination_value(key: str, value: bytes, /) -> None:
    """Check that the contract allows a key and its value.

    Raises:
        CoordinationError: The key is malformed, or the value is empty or too large.
    """
    check_coordination_key(key)
    if not 0 < len(value) <= COORDINATION_VALUE_BYTES:
        msg = f"{key}: a value has 1 to {COORDINATION_VALUE_BYTES} bytes, not {len(value)}"
        raise CoordinationError(msg)
