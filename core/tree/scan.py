"""Tells which parts of a state tree are containers, which are objects, and which are one value.

A dict, list or tuple that holds a tensor or another provider's object anywhere below is a
container; one that holds none is one value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.core.errors import UnsupportedStateError
from penstock.core.tree.paths import show_path
from penstock.core.types import show_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.abc import StateProvider
    from penstock.core.types import ObjectPath

VALUE_FORM = "json"
"""Form of the provider that takes every value which no other provider claims."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, complex})


class Providers(Protocol):
    """Finds providers by type and by form."""

    def for_type(self, kind: type, /) -> StateProvider | None:
        """The provider that claims `kind` with the highest priority; None when nobody does.

        Raises:
            PluginError: Two claim it with the same priority.
        """
        ...

    def for_form(self, form: str, /) -> StateProvider:
        """The provider that rebuilds `form`.

        Raises:
            PluginError: Nobody does.
        """
        ...

    def all(self) -> Sequence[StateProvider]:
        """Every provider."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """A provider's object in the tree (not a plain value)."""

    path: ObjectPath
    provider: StateProvider
    value: Any


class Scan:
    """One walk over a tree: finds providers' objects, and tells containers from values.

    Args:
        providers: The providers, which decide what is an object.
        thorough: Whether to find all objects. Else a container is looked at only until one object
            in it is found.

    Raises:
        UnsupportedStateError: A container holds itself.
    """

    def __init__(self, providers: Providers, *, thorough: bool = True) -> None:
        self._thorough = thorough
        self.value_provider = providers.for_form(VALUE_FORM)
        self.found: list[Found] = []
        self._providers = providers
        self._by_type: dict[type, StateProvider | None] = {}
        self._holds: dict[int, bool] = {}
        self._alive: list[object] = []  # keeps the ids in `_holds` from being reused
        self._active: set[int] = set()

    def provider_for(self, kind: type) -> StateProvider | None:
        """Return the provider of `kind`; None where only the value provider is left."""
        if kind in self._by_type:
            return self._by_type[kind]
        provider = self._providers.for_type(kind)
        if provider is self.value_provider:
            provider = None
        self._by_type[kind] = provider
        return provider

    def is_container(self, value: object, path: ObjectPath) -> bool:
        """Return whether `value` is a dict, list or tuple that holds a provider's object below."""
        kind = type(value)
        if kind in _PLAIN or not isinstance(value, dict | list | tuple):
            return False
        return self.provider_for(kind) is None and self._visit(value, path)

    def _visit(self, value: Any, path: ObjectPath) -> bool:
        kind = type(value)
        if kind in _PLAIN:
            return False
        provider = self.provider_for(kind)
        if provider is not None:
            self.found.append(Found(path, provider, value))
            return True
        if not isinstance(value, dict | list | tuple):
            return False
        key = id(value)
        known = self._holds.get(key)
        if known is not None:
            return known
        if key in self._active:
            msg = f"{show_path(path)} holds itself: a tree must not have cycles"
            raise UnsupportedStateError(msg)
        self._active.add(key)
        holds = False
        for name, child in _items(value):
            if type(child) not in _PLAIN and self._visit(child, (*path, name)):
                holds = True
                if not self._thorough:
                    break
        self._active.discard(key)
        self._holds[key] = holds
        self._alive.append(value)
        return holds


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return ((key if isinstance(key, str) else show_key(key), child) for key, child in pairs)
