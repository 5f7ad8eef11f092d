"""One place is no two tiers: what is evicted from the faster one would be gone from the other."""

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
    """Refuse tiers that are one folder, by whatever path or engine.

    Raises:
        ConfigError: Two are; names them.
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
    """What tells a folder from all others, links and bind mounts seen through; None: no folder.

    Of a mount whose server is gone the path alone: it is a tier that is away, and the run opens
    without it.
    """
    where = url.partition("://")[2]
    if not where.startswith("/"):
        return None
    path = Path(os.path.realpath(unquote(where)))
    try:
        there = next((p for p in (path, *path.parents) if p.exists()), path)
        status = there.stat()
    except OSError:  # ENOTCONN, ESTALE, EIO: of those, `exists` says nothing
        return str(path)
    return status.st_dev, status.st_ino, str(path.relative_to(there))
