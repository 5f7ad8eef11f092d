"""A fixed list of providers in place of those that are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.abc.provider import breach_of_priority
from penstock.core.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import StateProvider


class StaticProviders:
    """A fixed list of provider instances, for tests of one's own provider."""

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
