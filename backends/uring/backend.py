"""The backend `uring`: files through io_uring; one thread waits for the kernel's completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from penstock.backends.local.backend import LocalBackend
from penstock.backends.local.config import LocalConfig
from penstock.backends.uring.engine import RingEngine
from penstock.backends.uring.ring import Ring

if TYPE_CHECKING:
    from penstock.backends.local.batch import Engine
    from penstock.core.abc import PluginConfig


class UringConfig(LocalConfig):
    """Options of `uring`.

    Attributes:
        depth: The most calls in flight, each of up to 16 MiB.
    """

    depth: int = Field(default=16, ge=1, le=1024)


class UringBackend(LocalBackend):
    """Keeps blobs and records as files, moved by one io_uring.

    With the environment variable `PENSTOCK_DISABLE_URING` set to `1`, `EPERM` or `ENOSYS` it
    refuses to start, as it does where the kernel or a container forbids io_uring.
    """

    name: ClassVar[str] = "uring"
    Config: ClassVar[type[PluginConfig]] = UringConfig
    _config: UringConfig

    def __init__(self, config: UringConfig, /) -> None:
        """Set up the ring, which is the probe; touches no file.

        Raises:
            CapabilityError: io_uring cannot be used here; the message says why.
        """
        super().__init__(config)
        self._running_engine()

    @property
    def _parallel(self) -> int:
        return self._config.depth

    def _open_engine(self) -> Engine:
        return RingEngine(Ring(self._config.depth), self._config.depth)
