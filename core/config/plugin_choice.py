"""The choice of one plugin in a configuration: name, options and place in the file.

Tested in `tests/core/config/test_model.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, PrivateAttr

from penstock.core.abc import Backend, without_credentials

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Origin:
    """The file and the place that a part of a configuration comes from.

    All origins compare equal, so that choices that differ only in their origin are equal.
    """

    what: str = field(default="", compare=False)
    place: str = field(default="", compare=False)

    def below(self, key: str) -> Origin:
        """Return the origin of the key `key` in this part."""
        return Origin(self.what, f"{self.place}.{key}")


class Placed(BaseModel):
    """A part of a configuration that knows its origin, for error messages."""

    _origin: Origin = PrivateAttr(default=Origin())

    @property
    def origin(self) -> Origin:
        """Where the part comes from; empty if it does not come from a file."""
        return self._origin

    def came_from(self, origin: Origin) -> None:
        """Record where the part comes from, unless that is already known."""
        if not self._origin.what:
            self._origin = origin


class PluginChoice(Placed):
    """A plugin's entry-point name and options."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    type: str

    @property
    def options(self) -> dict[str, Any]:
        """All keys except `type`; the plugin's own `Config` checks them when it is opened."""
        return dict(self.model_extra or {})


class BackendConfig(PluginChoice):
    """A backend's entry-point name and options: `{type = "posix", path = "runs/gpt"}`."""

    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        """Yield only the names of the options, since logs must not show credentials."""
        yield "type", self.type
        yield "options", sorted(self.options)


BackendSpec: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | BackendConfig | Backend"


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def shown_url(url: str) -> str:
    """Return `url` without user, password and query."""
    return without_credentials(url) if scheme_of(url) else url


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in lowercase; empty for a path."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else ""
