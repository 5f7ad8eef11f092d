"""Refuses one place as two tiers: eviction from the faster one would delete the only copy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from penstock.core.abc import Backend


def check_apart(backends: Sequence[Backend], /) -> None:
    """Refuse two tiers that are one folder, even by other paths or engines.

    Raises:
        ConfigError: Two tiers are one folder; the message names them.
    """
    seen: dict[Hashable, str] = {}
    for backend in backends:
        place = _place(backend.url)
        if place is None:
            continue
        if place in seen:
            msg = (
                f"two tiers are one place ({seen[place]} and {backend.url}): what is evicted from "
                "the faster one would be lost. Give each a place of its own."
            )
            raise ConfigError(msg)
        seen[place] = backend.url


def _place(url: str) -> Hashable | None:
    """Return an identity of a folder, the same through links and bind mounts; None for no folder.

    Where the server of a mount is gone, the identity is the path alone: the run opens without that
    tier.
    """
    where = url.partition("://")[2]
    if not where.startswith("/"):
        return None
    path = Path(os.path.realpath(unquote(where)))
    try:
        there = next((p for p in (path, *path.parents) if p.exists()), path)
        status = there.stat()
    except OSError:  # ENOTCONN, ESTALE, EIO: `exists` raises these as well
        return str(path)
    return status.st_dev, status.st_ino, str(path.relative_to(there))
