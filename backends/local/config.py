"""The options of the file backends, and the path that a URL means."""

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
        path: The root folder; the first write creates it.
        direct_io: `auto` bypasses the page cache if a probe proves that possible, `on` refuses to
            work if it is not, `off` never bypasses it.
        allocate_bytes: The window of space allocated ahead of the writes, in bytes; 0 is off. The
            surplus is freed when a blob is sealed.
        owner: For a root below a folder where every user can create one (`/tmp`, `/dev/shm`):
            `self` refuses a root that belongs to a user other than this one or root, `any` trusts
            every owner.
    """

    path: str = Field(min_length=1, pattern=r"^[^\x00]*$")
    direct_io: DirectMode = "auto"
    allocate_bytes: int = Field(default=1 << 30, ge=0)
    owner: Literal["self", "any"] = "self"


def path_from_url(url: str) -> str:
    """Return the path that `url` means: percent-decoded behind a scheme, else as it is.

    Raises:
        ConfigError: The URL names no folder, or names another machine (`file://host/...`).
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
    """Return `options` with the path of `url` added.

    Raises:
        ConfigError: The options hold a path, too.
    """
    if "path" in options:
        msg = f"{url}: the path stands in the URL; remove 'path' from its options"
        raise ConfigError(msg)
    return {**options, "path": path_from_url(url)}
