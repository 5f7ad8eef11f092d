"""What a round asks of the store of the job, and what comes back. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.errors import CoordinationError


@dataclass(frozen=True, slots=True)
class Post:
    """Post a value."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """Read values."""

    keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class Decide:
    """Decide a register."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Wait until a key has a value."""

    key: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Rest:
    """Wait until the engine has told something, or the time has passed."""

    timeout_s: float


Operation: TypeAlias = Post | Read | Decide | WaitFor | Rest


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an operation.

    Attributes:
        now_s: The monotonic clock after it.
        value: What was read (a list) or decided (bytes).
        error: Why the outcome is unknown.
    """

    now_s: float
    value: Any = None
    error: CoordinationError | None = None
