"""Looking at a state tree: which parts are containers, which are objects, which are one value.

A dict, list or tuple that holds a tensor or another provider's object anywhere below is a
container; one that holds none is one value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.core.errors import PluginError, UnsupportedStateError
from penstock.core.paths import show_path
from penstock.core.plugin_checks import breach_of_priority

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.abc import StateProvider
    from penstock.core.types import ObjectPath

VALUE_FORM = "json"
"""The provider of this form takes every value that nobody else claims."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, complex})


class Providers(Protocol):
    """Where providers are found; the registry is one."""

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


class StaticProviders:
    """A fixed list of provider instances, for embedding and for tests of one's own provider."""

    def __init__(self, providers: Sequence[StateProvider]) -> None:
        self._providers = tuple(providers)

    def for_type(self, kind: type, /) -> StateProvider | None:
        """As `Providers.for_type`."""
        claims = [(_claim(p, kind), p) for p in self._providers]
        ranked = sorted(((c, p) for c, p in claims if c is not None), key=lambda pair: -pair[0])
        if not ranked:
            return None
        if len(ranked) > 1 and ranked[0][0] == ranked[1][0]:
            msg = (
                f"providers {ranked[0][1].name!r} and {ranked[1][1].name!r} both claim "
                f"{kind.__name__} with priority {ranked[0][0]}"
            )
            raise PluginError(msg)
        return ranked[0][1]

    def for_form(self, form: str, /) -> StateProvider:
        """As `Providers.for_form`."""
        for provider in self._providers:
            if form in provider.forms:
                return provider
        msg = f"no provider knows the form {form!r}; is the package that saved it installed?"
        raise PluginError(msg)

    def all(self) -> Sequence[StateProvider]:
        """As `Providers.all`."""
        return self._providers


def _claim(provider: StateProvider, kind: type) -> int | None:
    claim = provider.claims(kind)
    problem = breach_of_priority(claim, kind)
    if problem is not None:
        msg = f"provider {provider.name!r} {problem}; mend it, or uninstall it"
        raise PluginError(msg)
    return claim


@dataclass(frozen=True, slots=True)
class Found:
    """A provider's object in the tree (not a plain value)."""

    path: ObjectPath
    provider: StateProvider
    value: Any


class Scan:
    """One walk over a tree: finds providers' objects, tells containers from values.

    Raises:
        UnsupportedStateError: A container holds itself.
    """

    def __init__(self, providers: Providers) -> None:
        self.value_provider = providers.for_form(VALUE_FORM)
        self.found: list[Found] = []
        self._providers = providers
        self._by_type: dict[type, StateProvider | None] = {}
        self._holds: dict[int, bool] = {}
        self._alive: list[object] = []  # keeps the ids in `_holds` from being reused
        self._active: set[int] = set()

    def provider_for(self, kind: type) -> StateProvider | None:
        """The provider of `kind`; None where only the value provider is left."""
        if kind in self._by_type:
            return self._by_type[kind]
        provider = self._providers.for_type(kind)
        if provider is self.value_provider:
            provider = None
        self._by_type[kind] = provider
        return provider

    def is_container(self, value: object, path: ObjectPath) -> bool:
        """Whether `value` is a dict, list or tuple that holds a provider's object below."""
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
        self._active.discard(key)
        self._holds[key] = holds
        self._alive.append(value)
        return holds


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return ((key if isinstance(key, str) else str(key), child) for key, child in pairs)
