"""Options of the file backends, and how a URL becomes a path."""

from __future__ import annotations

from typing import Literal
from urllib.parse import unquote

from pydantic import Field

from penstock.core.abc import PluginConfig
from penstock.core.errors import ConfigError

DirectMode = Literal["auto", "on", "off"]


class LocalConfig(PluginConfig):
    """Options of every backend that keeps blobs in files.

    Attributes:
        path: Root folder; made at the first write.
        direct_io: `auto` bypasses the page cache where a probe proves it possible, `on` refuses
            to work where it is not, `off` never does.
        allocate_bytes: Window of space allocated ahead of the writes, in bytes; 0 is off. The
            surplus is given back when a blob is sealed.
    """

    path: str = Field(min_length=1)
    direct_io: DirectMode = "auto"
    allocate_bytes: int = Field(default=1 << 30, ge=0)


def path_from_url(url: str) -> str:
    """The path that `url` means: percent-decoded behind a scheme, else taken as it stands.

    Raises:
        ConfigError: It names no folder, or a `file://` URL names another machine.
    """
    scheme, separator, rest = url.partition("://")
    if not (rest if separator else url).strip():
        msg = f"{url!r} names no folder: give a path such as runs/gpt, or file:///absolute/path"
        raise ConfigError(msg)
    if not separator:
        return url
    if scheme == "file" and not rest.startswith(("/", ".", "~")):
        host, _, path = rest.partition("/")
        if host != "localhost":
            msg = f"{url}: a file URL is file:///absolute/path; {host!r} looks like a machine"
            raise ConfigError(msg)
        rest = "/" + path
    return unquote(rest)


def local_options(url: str, options: dict[str, str]) -> dict[str, str]:
    """`options` with the path of `url` added.

    Raises:
        ConfigError: The options hold a path too.
    """
    if "path" in options:
        msg = f"{url}: the path stands in the URL; remove 'path' from its options"
        raise ConfigError(msg)
    return {**options, "path": path_from_url(url)}
