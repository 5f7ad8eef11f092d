"""Finds the entry points of a kind, and names one in messages."""

from __future__ import annotations

import functools
import importlib.util
import json
from typing import TYPE_CHECKING, Literal, TypeAlias

from penstock.core.distributions import installed, installed_only

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.metadata import Distribution, EntryPoint

PluginKind: TypeAlias = Literal["provider", "codec", "backend"]

GROUPS: dict[PluginKind, str] = {
    "provider": "penstock.providers",
    "codec": "penstock.codecs",
    "backend": "penstock.backends",
}


def by_name(given: Iterable[EntryPoint] | None, kind: PluginKind) -> dict[str, list[EntryPoint]]:
    """Return the entry points of `kind` among `given`, or among everything installed, by name."""
    group = GROUPS[kind]
    if given is None:
        given = installed(group)
    found: dict[str, list[EntryPoint]] = {}
    for entry in given:
        if entry.group == group:
            same = found.setdefault(entry.name, [])
            # One distribution may be found twice, as installed and as built in place.
            if not any(e.value == entry.value and shipper_of(e) == shipper_of(entry) for e in same):
                same.append(entry)
    return found


@installed_only()
def module_exists(entry: EntryPoint) -> bool:
    """Return whether the module of `entry` can be found; imports only the packages above it."""
    try:
        return importlib.util.find_spec(entry.module) is not None
    except (ImportError, ValueError):
        return False


def is_ours(entry: EntryPoint) -> bool:
    """Return whether the entry point leads into Penstock itself."""
    return entry.module.split(".")[0] == __name__.split(".")[0]


def shipper_of(entry: EntryPoint) -> tuple[str, str]:
    """Return name and version of the distribution that ships the entry point."""
    # Entry points made by hand have no distribution.
    return _name_and_version(entry.dist) if entry.dist else ("(no distribution)", "")


@functools.lru_cache(maxsize=256)  # each look at either reads and parses its metadata: 2 ms
def _name_and_version(distribution: Distribution) -> tuple[str, str]:
    return distribution.name, distribution.version


def distribution(entry: EntryPoint) -> str:
    """Return the distribution's name and version for a message."""
    return " ".join(shipper_of(entry)).strip()


def label(kind: PluginKind, entry: EntryPoint) -> str:
    """Return the plugin's name and distribution, to begin a message with."""
    return f"{kind} {entry.name!r} of {distribution(entry)}"


def conflict(kind: PluginKind, name: str, entries: Sequence[EntryPoint]) -> str:
    """Return the message for several entry points of one name."""
    # Found in the order of folders, which is none. First that of Penstock, so that whoever copies
    # the hint goes on reading what was stored by it.
    entries = sorted(entries, key=lambda entry: (not is_ours(entry), shipper_of(entry)))
    claims = " and ".join(f"{distribution(e)} ({e.value})" for e in entries)
    chosen = json.dumps({kind: {name: shipper_of(entries[0])[0]}})
    return (
        f"{kind} {name!r} is claimed by {claims}: uninstall all but one, or say which by the "
        f"option prefer, as prefer={chosen}"
    )
