"""Chooses the provider for a live type or for a stored form."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from penstock.core.abc.provider import breach_of_priority
from penstock.core.errors import PluginError
from penstock.core.suggest import nearest
from penstock.core.types import show_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.abc import StateProvider

logger = logging.getLogger(__name__)

_OURS = __name__.split(".", maxsplit=1)[0]


def _is_ours(provider: StateProvider) -> bool:
    return type(provider).__module__.split(".")[0] == _OURS


class ProviderSet:
    """The providers in use. Thread-safe.

    Args:
        providers: Providers by entry-point name, each with its distribution.
    """

    def __init__(self, providers: Mapping[str, tuple[StateProvider, str]]) -> None:
        self._providers = dict(providers)
        self._lock = threading.Lock()  # guards `_by_type` and `_warned`
        self._by_type: WeakKeyDictionary[type, StateProvider | None] = WeakKeyDictionary()
        self._warned: set[str] = set()

    def all(self) -> list[StateProvider]:
        """Return every provider, by name."""
        return [provider for provider, _ in self._providers.values()]

    def for_type(self, kind: type, /) -> StateProvider | None:
        """Return the provider that claims `kind` with the highest priority; None if none does.

        Raises:
            PluginError: Two claim it with the same priority, or one with an invalid priority.
        """
        with self._lock:
            if kind not in self._by_type:
                self._by_type[kind] = self._choose(kind)
            return self._by_type[kind]

    def for_form(self, form: str, /) -> StateProvider:
        """Return the provider that rebuilds `form`.

        Raises:
            PluginError: No provider does, or two do.
        """
        names = [name for name, (p, _) in self._providers.items() if form in p.forms]
        if not names:
            known = {f for p in self.all() for f in p.forms}
            msg = (
                f"no installed provider rebuilds {show_text(repr(form))}{nearest(form, known)}: "
                f"the checkpoint was written with a plugin that is not here"
            )
            raise PluginError(msg)
        if len(names) > 1:
            names = self._shipped(names, f"form {form!r} is declared by")
        if len(names) > 1:
            msg = f"form {form!r} is declared by {self._named(names)}: uninstall all but one"
            raise PluginError(msg)
        return self._providers[names[0]][0]

    def _shipped(self, names: list[str], what: str) -> list[str]:
        """Keep the provider that ships with Penstock, with one warning; all if none of them does.

        Else any package that is installed could make all checkpoints unreadable.
        """
        shipped = [name for name in names if _is_ours(self._providers[name][0])]
        if len(shipped) != 1:
            return names
        others = [name for name in names if name not in shipped]
        said = f"{what} {self._named(others)} as well: {self._named(shipped)} is used"
        if said not in self._warned:
            self._warned.add(said)
            logger.warning("%s", said)
        return shipped

    def _choose(self, kind: type) -> StateProvider | None:
        best: list[str] = []
        priority = 0
        for name, (provider, _) in self._providers.items():
            claim = self._claim(name, provider, kind)
            if claim is None or (best and claim < priority):
                continue
            if not best or claim > priority:
                best, priority = [], claim
            best.append(name)
        if len(best) > 1:
            claimed = f"{kind.__module__}.{kind.__qualname__} is claimed with priority {priority}"
            best = self._shipped(best, f"{claimed} by")
            if len(best) > 1:
                msg = f"{claimed} by {self._named(best)}: uninstall all but one"
                raise PluginError(msg)
        return self._providers[best[0]][0] if best else None

    def _claim(self, name: str, provider: StateProvider, kind: type) -> int | None:
        try:
            claim = provider.claims(kind)
        except Exception as error:
            if _is_ours(provider):
                raise
            if name not in self._warned:  # a third party's defect must not stop a save
                self._warned.add(name)
                logger.warning(
                    "%s failed on %s; going on without it: %s: %s",
                    self._named([name]),
                    kind.__qualname__,
                    type(error).__name__,
                    error,
                )
            return None
        problem = breach_of_priority(claim, kind)
        if problem is not None:
            msg = f"{self._named([name])} {problem}; mend it, or uninstall it"
            raise PluginError(msg)
        return claim

    def _named(self, names: list[str]) -> str:
        return " and ".join(f"provider {n!r} of {self._providers[n][1]}" for n in names)
