"""The backend `posix`, which moves files with a few threads, wherever Python runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from penstock.backends.local.base import LocalBackend, LocalConfig
from penstock.backends.local.threads import ThreadEngine

if TYPE_CHECKING:
    from penstock.backends.local.transfer import Engine
    from penstock.core.abc import PluginConfig


class PosixConfig(LocalConfig):
    """Options of `posix`.

    Attributes:
        parallel: The number of threads, each with one call of up to 16 MiB in flight.
    """

    parallel: int = Field(default=4, ge=1, le=64)


class PosixBackend(LocalBackend):
    """Keeps blobs and records as files, moved by threads that block in `preadv` and `pwritev`."""

    name: ClassVar[str] = "posix"
    Config: ClassVar[type[PluginConfig]] = PosixConfig
    _config: PosixConfig

    @property
    def _parallel(self) -> int:
        return self._config.parallel

    def _open_engine(self) -> Engine:
        return ThreadEngine(self._parallel)
