"""Entry points: which there are of a kind, and how messages name one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint

PluginKind: TypeAlias = Literal["provider", "codec", "backend"]

GROUPS: dict[PluginKind, str] = {
    "provider": "penstock.providers",
    "codec": "penstock.codecs",
    "backend": "penstock.backends",
}


def by_name(given: Iterable[EntryPoint] | None, kind: PluginKind) -> dict[str, list[EntryPoint]]:
    """Those of `kind` among `given`, None: among everything installed."""
    group = GROUPS[kind]
    if given is None:
        given = importlib.metadata.entry_points(group=group)
    found: dict[str, list[EntryPoint]] = {}
    for entry in given:
        if entry.group == group:
            same = found.setdefault(entry.name, [])
            # One distribution may be found twice, as installed and as built in place.
            if not any(e.value == entry.value and who(e) == who(entry) for e in same):
                same.append(entry)
    return found


def module_exists(entry: EntryPoint) -> bool:
    """Whether its module can be found; of its packages only the upper ones are imported."""
    try:
        return importlib.util.find_spec(entry.module) is not None
    except (ImportError, ValueError):
        return False


def is_ours(entry: EntryPoint) -> bool:
    """Whether it leads into Penstock itself."""
    return entry.module.split(".")[0] == __name__.split(".")[0]


def who(entry: EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution that ships it."""
    # Entry points made by hand belong to nobody.
    return (entry.dist.name, entry.dist.version) if entry.dist else ("(no distribution)", "")


def distribution(entry: EntryPoint) -> str:
    """The distribution, for a message."""
    return " ".join(who(entry)).strip()


def label(kind: PluginKind, entry: EntryPoint) -> str:
    """The plugin with its distribution, to begin a message with."""
    return f"{kind} {entry.name!r} of {distribution(entry)}"


def conflict(kind: PluginKind, name: str, entries: Iterable[EntryPoint]) -> str:
    """What is wrong where several have one name."""
    claims = " and ".join(f"{distribution(e)} ({e.value})" for e in entries)
    return f"{kind} {name!r} is claimed by {claims}: uninstall all but one"
