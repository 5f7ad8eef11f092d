"""Entry points -> plugins, each loaded and validated when it is first asked for.

Every complaint names the distribution; one plugin's failure never touches another.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import logging
import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast

from penstock.core.abc import (
    API_VERSION,
    Backend,
    Codec,
    PluginConfig,
    StateProvider,
    says_its_version,
)
from penstock.core.errors import ConfigError, PluginError
from penstock.core.provider_set import ProviderSet
from penstock.core.validation import nearest, validated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from importlib.metadata import EntryPoint

logger = logging.getLogger(__name__)

PluginKind = Literal["provider", "codec", "backend"]
PluginState = Literal["found", "ok", "failed", "conflict"]

GROUPS: dict[PluginKind, str] = {
    "provider": "penstock.providers",
    "codec": "penstock.codecs",
    "backend": "penstock.backends",
}
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
            breaks the contract; `conflict`: another distribution claims the same name.
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
            load: Import and validate each (which may import torch); otherwise only look whether
                its module can be found.
        """
        with self._lock:
            return [
                self._info(kind, name, entry, load=load)
                for kind in GROUPS
                for name in self.names(kind)
                for entry in self._entries(kind)[name]
            ]

    # -- inside ---------------------------------------------------------------------------------

    def _entries(self, kind: PluginKind) -> dict[str, list[EntryPoint]]:
        with self._lock:
            if kind not in self._by_kind:
                self._by_kind[kind] = _by_name(self._given, GROUPS[kind])
            return self._by_kind[kind]

    def _all_providers(self) -> dict[str, tuple[StateProvider, str]]:
        found: dict[str, tuple[StateProvider, str]] = {}
        for name in self.names("provider"):
            entry = self._only("provider", name)
            try:
                cls = cast("type[StateProvider]", self._load("provider", entry))
                provider = self._create("provider", name, cls)
            except PluginError as error:
                if _is_ours(entry):
                    raise
                logger.warning("%s; going on without it", error)
            else:
                found[name] = (provider, _distribution(entry))
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
            raise PluginError(_conflict(kind, name, entries))
        return entries[0]

    def _load(self, kind: PluginKind, entry: EntryPoint) -> type:
        if entry not in self._loaded:
            try:
                self._loaded[entry] = _checked(kind, entry, entry.load())
            except PluginError as error:
                self._loaded[entry] = error
            except Exception as error:  # noqa: BLE001 - a plugin may fail in any way: recorded
                failure = PluginError(
                    f"{_label(kind, entry)} cannot be loaded: {type(error).__name__}: {error}"
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
        except Exception as error:
            label = _label(kind, self._only(kind, name))
            msg = f"{label} cannot be created: {type(error).__name__}: {error}"
            raise PluginError(msg) from error

    def _whence(self, kind: PluginKind, name: str) -> str:
        return _distribution(self._only(kind, name))

    def _info(self, kind: PluginKind, name: str, entry: EntryPoint, *, load: bool) -> PluginInfo:
        state: PluginState = "found"
        error: str | None = None
        entries = self._entries(kind)[name]
        if len(entries) > 1:
            state, error = "conflict", _conflict(kind, name, entries)
        elif load or entry in self._loaded:
            state = "ok"
            try:
                self._load(kind, entry)
            except PluginError as failure:
                state, error = "failed", str(failure)
        elif not _module_exists(entry):
            state = "failed"
            error = f"{_label(kind, entry)} cannot be loaded: no module {entry.module!r}"
        who, version = _who(entry)
        return PluginInfo(kind, name, who, version, state, error, entry.value)


def _by_name(given: Iterable[EntryPoint] | None, group: str) -> dict[str, list[EntryPoint]]:
    if given is None:
        given = importlib.metadata.entry_points(group=group)
    found: dict[str, list[EntryPoint]] = {}
    for entry in given:
        if entry.group == group:
            same = found.setdefault(entry.name, [])
            # One distribution may be found twice, as installed and as built in place.
            if not any(e.value == entry.value and _who(e) == _who(entry) for e in same):
                same.append(entry)
    return found


def _checked(kind: PluginKind, entry: EntryPoint, loaded: object) -> type:
    contract = _CONTRACTS[kind]
    if isinstance(loaded, type) and issubclass(loaded, contract):
        problem = _breach(entry, loaded, contract)
    else:
        problem = f"is not a subclass of {contract.__name__}"
    if problem:
        msg = f"{_label(kind, entry)} cannot be used: {entry.value} {problem}"
        raise PluginError(msg)
    return cast("type", loaded)


def _breach(entry: EntryPoint, cls: Any, contract: type) -> str | None:
    wrong = _breach_of_versions(entry, cls, contract)
    if wrong is not None:
        return wrong
    if inspect.isabstract(cls):
        return f"lacks {', '.join(sorted(cls.__abstractmethods__))}"
    if getattr(cls, "name", None) != entry.name:
        return f"calls itself {getattr(cls, 'name', None)!r}, not {entry.name!r}"
    options = getattr(cls, "Config", PluginConfig)  # providers have none
    if not (isinstance(options, type) and issubclass(options, PluginConfig)):
        return "has a Config that is not a subclass of PluginConfig"
    return None


def _breach_of_versions(entry: EntryPoint, cls: Any, contract: type) -> str | None:
    if type(cls.api_version) is not int:
        return f"has the api_version {cls.api_version!r}: it must be the integer {API_VERSION}"
    if contract is not Backend and type(cls.version) is not int:
        return f"has the version {cls.version!r}: it must be an integer"
    if cls.api_version != API_VERSION:
        older = "penstock" if cls.api_version > API_VERSION else _who(entry)[0]
        return (
            f"is for version {cls.api_version} of the {contract.__name__} contract, "
            f"this Penstock has version {API_VERSION}: upgrade {older}"
        )
    if not says_its_version(cls):
        return (
            f"does not say for which version of the {contract.__name__} contract it was written: "
            f"write `api_version = {API_VERSION}` into the class"
        )
    return None


def _module_exists(entry: EntryPoint) -> bool:
    try:
        return importlib.util.find_spec(entry.module) is not None
    except (ImportError, ValueError):
        return False


def _who(entry: EntryPoint) -> tuple[str, str]:
    # Entry points made by hand belong to nobody.
    return (entry.dist.name, entry.dist.version) if entry.dist else ("(no distribution)", "")


def _distribution(entry: EntryPoint) -> str:
    return " ".join(_who(entry)).strip()


def _is_ours(entry: EntryPoint) -> bool:
    return entry.module.split(".")[0] == __name__.split(".")[0]


def _label(kind: PluginKind, entry: EntryPoint) -> str:
    return f"{kind} {entry.name!r} of {_distribution(entry)}"


def _conflict(kind: PluginKind, name: str, entries: Iterable[EntryPoint]) -> str:
    claims = " and ".join(f"{_distribution(e)} ({e.value})" for e in entries)
    return f"{kind} {name!r} is claimed by {claims}: uninstall all but one"


@cache
def default_registry() -> Registry:
    """The registry of everything installed; one per process."""
    return Registry()
