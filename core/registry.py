"""Entry points -> plugins, each loaded and validated when it is first asked for.

Every complaint names the distribution; one plugin's failure never touches another.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast

from penstock.core.abc import Backend, Codec, StateProvider
from penstock.core.entry_points import (
    GROUPS,
    PluginKind,
    by_name,
    conflict,
    distribution,
    is_ours,
    label,
    module_exists,
    who,
)
from penstock.core.errors import ConfigError, PluginError
from penstock.core.plugin_checks import breach_of_class, breach_of_instance, default_arguments
from penstock.core.provider_set import ProviderSet
from penstock.core.validation import nearest, validated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from importlib.metadata import EntryPoint

logger = logging.getLogger(__name__)

PluginState = Literal["found", "ok", "failed", "conflict"]

_CONTRACTS: dict[PluginKind, type] = {
    "provider": StateProvider,
    "codec": Codec,
    "backend": Backend,
}


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One installed plugin, for people.

    Attributes:
        kind: Which contract it claims to fulfil.
        name: Entry-point name.
        distribution: Who ships it.
        version: Of the distribution.
        state: `found`: not loaded yet; `ok`: loaded and valid; `failed`: cannot be loaded or
            created, or breaks the contract; `conflict`: another one claims the same name or form.
        error: Why, when `failed` or `conflict`.
        target: `module:Class`.
    """

    kind: PluginKind
    name: str
    distribution: str
    version: str
    state: PluginState
    error: str | None
    target: str


class Registry:
    """Plugins by kind and name. Thread-safe.

    Args:
        entry_points: What to choose from; default: everything installed, looked up on first use.
    """

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        self._given = None if entry_points is None else tuple(entry_points)
        self._lock = threading.RLock()  # guards all below; nothing is loaded or created twice
        self._by_kind: dict[PluginKind, dict[str, list[EntryPoint]]] = {}
        self._loaded: dict[EntryPoint, type | PluginError] = {}
        self._providers: ProviderSet | None = None

    # -- by kind --------------------------------------------------------------------------------

    def codec_class(self, name: str, /) -> type[Codec]:
        """The codec called `name`.

        Raises:
            PluginError: There is none, or two, or it is broken.
        """
        return cast("type[Codec]", self._class("codec", name))

    def codec(self, name: str, config: Mapping[str, Any], /) -> Codec:
        """A codec with the options that a user gave.

        Raises:
            PluginError: There is no such codec, or it is broken.
            ConfigError: The options do not fit it.
        """
        cls = self.codec_class(name)
        options = validated(cls.Config, config, what=f"options of codec {name!r}")
        return cast("Codec", self._create("codec", name, cls, options))

    def codec_from_record(self, name: str, version: int, config: Mapping[str, Any], /) -> Codec:
        """The codec that reads what a checkpoint says it was written with.

        Raises:
            PluginError: It is not installed, broken, older than what wrote the checkpoint, or
                does not take the stored options.
        """
        cls = self.codec_class(name)
        whence = self._whence("codec", name)
        if version > cls.version:
            msg = (
                f"written by version {version} of codec {name!r}, but {whence} has version "
                f"{cls.version}: upgrade it"
            )
            raise PluginError(msg)
        try:
            options = validated(cls.Config, config, what=f"stored options of codec {name!r}")
        except ConfigError as error:
            msg = f"{error}\n  {whence} cannot read what was written with these options"
            raise PluginError(msg) from error
        return cast("Codec", self._create("codec", name, cls, options))

    def backend_class(self, name: str, /) -> type[Backend]:
        """The backend called `name`.

        Raises:
            PluginError: There is none, or two, or it is broken.
        """
        return cast("type[Backend]", self._class("backend", name))

    @property
    def providers(self) -> ProviderSet:
        """Every provider, one instance each; loads them all.

        A third party's broken provider is left out with one warning; ours must work.

        Raises:
            PluginError: Two claim one name, or one of ours is broken.
        """
        with self._lock:
            if self._providers is None:
                self._providers = ProviderSet(self._all_providers())
            return self._providers

    def names(self, kind: PluginKind, /) -> list[str]:
        """Entry-point names of one kind, sorted; nothing is loaded."""
        return sorted(self._entries(kind))

    def listing(self, *, load: bool = True) -> list[PluginInfo]:
        """Every installed plugin, by kind and name.

        Args:
            load: Import and validate each (which may import torch), and make an instance of those
                that need no options; otherwise only look whether its module can be found.
        """
        with self._lock:
            shared = self._shared_forms() if load else {}
            return [
                self._info(kind, name, entry, load=load, shared=shared)
                for kind in GROUPS
                for name in self.names(kind)
                for entry in self._entries(kind)[name]
            ]

    # -- inside ---------------------------------------------------------------------------------

    def _entries(self, kind: PluginKind) -> dict[str, list[EntryPoint]]:
        with self._lock:
            if kind not in self._by_kind:
                self._by_kind[kind] = by_name(self._given, kind)
            return self._by_kind[kind]

    def _all_providers(self) -> dict[str, tuple[StateProvider, str]]:
        found: dict[str, tuple[StateProvider, str]] = {}
        for name in self.names("provider"):
            entry = self._only("provider", name)
            try:
                cls = cast("type[StateProvider]", self._load("provider", entry))
                provider = self._create("provider", name, cls)
            except PluginError as error:
                if is_ours(entry):
                    raise
                logger.warning("%s; going on without it", error)
            else:
                found[name] = (provider, distribution(entry))
        return found

    def _class(self, kind: PluginKind, name: str) -> type:
        with self._lock:
            return self._load(kind, self._only(kind, name))

    def _only(self, kind: PluginKind, name: str) -> EntryPoint:
        entries = self._entries(kind).get(name, [])
        if not entries:
            names = self.names(kind)
            near = nearest(name, names)
            msg = (
                f"no {kind} called {name!r} is installed{near if near.endswith('?') else ''} "
                f"(installed: {', '.join(names) or 'none'}): install the package that provides it"
            )
            raise PluginError(msg)
        if len(entries) > 1:
            raise PluginError(conflict(kind, name, entries))
        return entries[0]

    def _load(self, kind: PluginKind, entry: EntryPoint) -> type:
        if entry not in self._loaded:
            try:
                self._loaded[entry] = _checked(kind, entry, entry.load())
            except PluginError as error:
                self._loaded[entry] = error
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it may fail in any way: recorded
                failure = PluginError(
                    f"{label(kind, entry)} cannot be loaded: {type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                self._loaded[entry] = failure
        loaded = self._loaded[entry]
        if isinstance(loaded, PluginError):
            # A fresh one at each call, so that tracebacks do not pile up on a shared object.
            raise PluginError(*loaded.args) from loaded.__cause__
        return loaded

    def _create(self, kind: PluginKind, name: str, cls: type, *arguments: object) -> Any:
        try:
            return cls(*arguments)
        except (ConfigError, PluginError):
            raise
        except (Exception, SystemExit) as error:
            whence = label(kind, self._only(kind, name))
            msg = f"{whence} cannot be created: {type(error).__name__}: {error}"
            raise PluginError(msg) from error

    def _whence(self, kind: PluginKind, name: str) -> str:
        return distribution(self._only(kind, name))

    def _info(
        self, kind: PluginKind, name: str, entry: EntryPoint, *, load: bool,
        shared: Mapping[EntryPoint, str],
    ) -> PluginInfo:  # fmt: skip
        state: PluginState = "found"
        error: str | None = None
        entries = self._entries(kind)[name]
        if len(entries) > 1:
            state, error = "conflict", conflict(kind, name, entries)
        elif load or entry in self._loaded:
            state = "ok"
            try:
                cls = self._load(kind, entry)
                if load:
                    self._try(kind, entry, cls)
            except PluginError as failure:
                state, error = "failed", str(failure)
            else:
                if entry in shared:
                    state, error = "conflict", shared[entry]
        elif not module_exists(entry):
            state = "failed"
            error = f"{label(kind, entry)} cannot be loaded: no module {entry.module!r}"
        shipper, version = who(entry)
        return PluginInfo(kind, name, shipper, version, state, error, entry.value)

    def _try(self, kind: PluginKind, entry: EntryPoint, cls: type) -> None:
        """Make one as if nobody had configured it, and ask it what costs nothing."""
        try:
            arguments = default_arguments(cls)
            problem = None if arguments is None else breach_of_instance(cls(*arguments))
        except (Exception, SystemExit) as error:
            msg = f"{label(kind, entry)} cannot be created: {type(error).__name__}: {error}"
            raise PluginError(msg) from error
        if problem is not None:
            msg = f"{label(kind, entry)} cannot be used: it {problem}"
            raise PluginError(msg)

    def _shared_forms(self) -> dict[EntryPoint, str]:
        """What to say of the providers that declare a form which another one declares too."""
        by_form: dict[str, list[EntryPoint]] = {}
        for entries in self._entries("provider").values():
            for entry in entries:
                with suppress(PluginError):  # it is listed as failed
                    for form in dict.fromkeys(self._load("provider", entry).forms):  # type: ignore[attr-defined] # the class was checked
                        by_form.setdefault(form, []).append(entry)
        return {
            entry: f"form {form!r} is declared by "
            f"{' and '.join(label('provider', e) for e in entries)}: uninstall all but one"
            for form, entries in by_form.items()
            if len(entries) > 1
            for entry in entries
        }


def _checked(kind: PluginKind, entry: EntryPoint, loaded: object) -> type:
    problem = breach_of_class(loaded, _CONTRACTS[kind], name=entry.name, distribution=who(entry)[0])
    if problem:
        msg = f"{label(kind, entry)} cannot be used: {entry.value} {problem}"
        raise PluginError(msg)
    return cast("type", loaded)


@cache
def default_registry() -> Registry:
    """The registry of everything installed; one per process."""
    return Registry()
