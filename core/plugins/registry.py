"""Creates plugins from entry points on first use, and chooses the provider of a type or form.

Every error names the distribution. A third party's broken plugin does not affect other plugins.
"""

from __future__ import annotations

import logging
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

from penstock.core.abc import Backend, Codec, Replayer, StateProvider
from penstock.core.abc.provider import breach_of_priority
from penstock.core.config.explain import validated
from penstock.core.distributions import installed_only
from penstock.core.errors import ConfigError, PluginError
from penstock.core.foreign import is_foreign
from penstock.core.plugins.entry_points import (
    GROUPS,
    PluginKind,
    breach_of_class,
    breach_of_instance,
    by_name,
    conflict,
    default_arguments,
    distribution,
    is_ours,
    label,
    module_exists,
    shipper_of,
)
from penstock.core.suggest import nearest
from penstock.core.types import show_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

logger = logging.getLogger(__name__)

PluginState = Literal["found", "ok", "failed", "conflict"]

_CONTRACTS: dict[PluginKind, type] = {
    "provider": StateProvider,
    "codec": Codec,
    "backend": Backend,
    "replayer": Replayer,
}

Preferences: TypeAlias = "Mapping[PluginKind, Mapping[str, str]]"
PluginClass = TypeVar("PluginClass", bound="StateProvider | Codec | Backend | Replayer")


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """Describes an installed plugin to users.

    Attributes:
        kind: The contract that the plugin claims to implement.
        name: Entry-point name.
        distribution: The distribution that ships the plugin.
        version: Version of the distribution.
        state: `found`: not loaded yet; `ok`: loaded and valid; `failed`: cannot be loaded or
            created, or breaks the contract; `conflict`: another plugin claims the same name or
            form.
        error: The reason for `failed` or `conflict`.
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
    """Finds and creates plugins by kind and name. Thread-safe.

    If several distributions claim a name, using it raises an error that lists them, until `prefer`
    chooses one.

    Args:
        entry_points: The entry points to choose from. The default is all installed entry points,
            found on first use.
    """

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        self._given = None if entry_points is None else tuple(entry_points)
        self._lock = threading.RLock()  # guards all below, so that nothing is loaded twice
        self._preferred: dict[tuple[PluginKind, str], str] = {}
        self._registered: dict[tuple[PluginKind, str], EntryPoint] = {}
        self._by_kind: dict[PluginKind, dict[str, list[EntryPoint]]] = {}
        self._loaded: dict[EntryPoint, type | PluginError] = {}
        self._providers: ProviderSet | None = None
        self._replayers: list[Replayer] | None = None

    # -- contents -------------------------------------------------------------------------------

    @property
    def has_own(self) -> bool:
        """Whether classes were added with `register`, so that other processes do not know them."""
        return bool(self._registered)

    def register(self, cls: type[PluginClass], /, *, replace: bool = False) -> type[PluginClass]:
        """Add a plugin that is not installed. Also works as a decorator.

        Only this registry knows the class. Any other process that reads the plugin's data must
        register or install a class with the same name.

        Args:
            cls: A subclass of one of the contracts, registered under its `name`.
            replace: Whether the class replaces another class with that name.

        Raises:
            PluginError: The class breaks its contract, or the name is taken.
        """
        bases = getattr(cls, "__mro__", ())
        kinds: list[PluginKind] = [kind for kind, base in _CONTRACTS.items() if base in bases]
        if not kinds:
            names = ", ".join(contract.__name__ for contract in _CONTRACTS.values())
            msg = f"{cls!r} cannot be registered: it is not a subclass of any of {names}"
            raise PluginError(msg)
        kind, name = kinds[0], str(getattr(cls, "name", ""))
        # A class in a function (`f.<locals>.C`) has a name that no entry point could have.
        module, place = (re.sub(r"[^\w.]", "_", n) for n in (cls.__module__, cls.__qualname__))
        entry = EntryPoint(name, f"{module}:{place}", GROUPS[kind])
        _checked(kind, entry, cls)
        with self._lock:
            if name in self._entries(kind) and not replace:
                owners = " and ".join(distribution(e) for e in self._entries(kind)[name])
                msg = (
                    f"{kind} {name!r} cannot be registered: {owners} has it; use another name, or "
                    "pass replace=True"
                )
                raise PluginError(msg)
            self._registered[kind, name] = entry
            self._loaded[entry] = cls
            self._entries(kind)[name] = [entry]
            self._providers = self._replayers = None
        return cls

    def prefer(self, choices: Preferences, /) -> None:
        """Choose the distribution for names that several distributions claim, by kind and name."""
        with self._lock:
            for kind, names in choices.items():
                for name, chosen in names.items():
                    self._preferred[kind, name] = chosen
            self._providers = self._replayers = None

    def preferring(self, choices: Preferences, /) -> Registry:
        """Return a copy that also prefers `choices`, or this registry itself if there are none."""
        if not any(choices.values()):
            return self
        with self._lock:
            other = Registry(self._given)
            other._preferred = dict(self._preferred)
            for (kind, name), entry in self._registered.items():
                other._registered[kind, name] = entry
                other._loaded[entry] = self._loaded[entry]
                other._entries(kind)[name] = [entry]
        other.prefer(choices)
        return other

    # -- by kind --------------------------------------------------------------------------------

    def codec_class(self, name: str, /) -> type[Codec]:
        """Return the class of the codec `name`.

        Raises:
            PluginError: The codec is broken or not installed, or several distributions claim it.
        """
        return cast("type[Codec]", self._class("codec", name))

    def codec(self, name: str, config: Mapping[str, Any], /) -> Codec:
        """Return the codec `name` with a user's options.

        Raises:
            PluginError: The codec is broken or not installed, or several distributions claim it.
            ConfigError: The options are not valid for the codec.
        """
        cls = self.codec_class(name)
        options = validated(cls.Config, config, what=f"options of codec {name!r}")
        return cast("Codec", self._create("codec", name, cls, options))

    def codec_from_record(self, name: str, version: int, config: Mapping[str, Any], /) -> Codec:
        """Return the codec that decodes frames of the recorded name, version and options.

        Raises:
            PluginError: The codec is not installed, is broken, refuses the stored options, or is
                too old or too new to read the recorded version.
        """
        cls = self.codec_class(name)
        whence = distribution(self._only("codec", name))
        if version > cls.version:
            msg = (
                f"written by version {version} of codec {name!r}, but {whence} has version "
                f"{cls.version}: upgrade it"
            )
            raise PluginError(msg)
        if version < cls.oldest_readable:
            msg = (
                f"written by version {version} of codec {name!r}, but {whence} has version "
                f"{cls.version}, which reads versions {cls.oldest_readable} to {cls.version}: "
                "install an older release to read this data"
            )
            raise PluginError(msg)
        try:
            options = validated(cls.Config, config, what=f"stored options of codec {name!r}")
        except ConfigError as error:
            msg = (
                f"{error}\n  {whence} cannot read data written with these options: install the "
                "release that wrote it"
            )
            raise PluginError(msg) from error
        return cast("Codec", self._create("codec", name, cls, options))

    def is_lossless(self, name: str, /) -> bool | None:
        """Return whether the codec `name` is lossless; None if it is broken or not installed."""
        try:
            return self.codec_class(name).lossless
        except PluginError:
            return None

    def backend_class(self, name: str, /) -> type[Backend]:
        """Return the class of the backend `name`.

        Raises:
            PluginError: The backend is broken or not installed, or several distributions claim it.
        """
        return cast("type[Backend]", self._class("backend", name))

    def shipper(self, plugin: str, /) -> str:
        """Return the distribution and version of a third party's plugin.

        Empty for Penstock's own plugins, and for a plugin without a known distribution.

        Args:
            plugin: Kind and name, as in a commit record: `"codec acme"`.
        """
        kind, _, name = plugin.partition(" ")
        try:
            entry = self._only(cast("PluginKind", kind), name)
        except PluginError:
            return ""
        return "" if is_ours(entry) or entry.dist is None else distribution(entry)

    def preload(self) -> None:
        """Import all providers. A failed import is retried when the provider is needed.

        An import fails, for example, if a package that ships a provider creates a checkpointer
        while it is being imported itself.
        """
        with self._lock:
            for name in self.names("provider") if self._providers is None else ():
                with suppress(PluginError):
                    entry = self._only("provider", name)
                    try:
                        self._load("provider", entry)
                    except PluginError:
                        del self._loaded[entry]

    @property
    def providers(self) -> ProviderSet:
        """All providers, one instance each; the first access loads them.

        Skips a third party's broken provider with one warning.

        Raises:
            PluginError: Two providers claim the same name, or one of Penstock's own is broken.
        """
        with self._lock:
            if self._providers is None:
                self._providers = ProviderSet(self._all("provider"))
            return self._providers

    def replayer(self, optimizer: object, /) -> Replayer | None:
        """Return the replayer that handles an optimizer, or None.

        Asks the replayers of third parties first. Skips a broken one of theirs, with one warning.
        """
        with self._lock:
            if self._replayers is None:
                found = self._all("replayer")
                ours = {name for name in found if is_ours(self._only("replayer", name))}
                self._replayers = [found[name][0] for name in sorted(found, key=ours.__contains__)]
            return next((r for r in [*self._replayers] if self._handles(r, optimizer)), None)

    def names(self, kind: PluginKind, /) -> list[str]:
        """Return the sorted entry-point names of one kind, without loading plugins."""
        return sorted(self._entries(kind))

    def listing(self, *, load: bool = True) -> list[PluginInfo]:
        """Return every installed plugin, by kind and name.

        Args:
            load: Whether to import and validate each plugin (which may import torch), and to create
                an instance if it needs no options. Otherwise only checks that its module exists.
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
        # Locked only the first time. A signal handler that interrupts the loading of plugins may
        # save, and that save waits for a thread that needs the names.
        known = self._by_kind.get(kind)
        if known is None:
            with self._lock:
                known = self._by_kind.setdefault(kind, by_name(self._given, kind))
        return known

    def _all(self, kind: PluginKind) -> dict[str, tuple[Any, str]]:
        found: dict[str, tuple[Any, str]] = {}
        for name in self.names(kind):
            entry = self._only(kind, name)
            try:
                plugin = self._create(kind, name, self._load(kind, entry))
            except PluginError as error:
                if is_ours(entry):
                    raise
                logger.warning("%s; continuing without it", error)
            else:
                found[name] = (plugin, distribution(entry))
        return found

    def _handles(self, replayer: Replayer, optimizer: object) -> bool:
        try:
            return replayer.handles(optimizer)
        except Exception as error:
            if not is_foreign(replayer):
                raise
            whence = label("replayer", self._only("replayer", replayer.name))
            failure = f"{type(error).__name__}: {error}"
            kind = type(optimizer).__qualname__
            logger.warning("%s failed on %s; continuing without it: %s", whence, kind, failure)
            assert self._replayers is not None
            self._replayers.remove(replayer)  # a third party's defect must not stop training
            return False

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
        if len(entries) == 1:
            return entries[0]
        wanted = _canonical(self._preferred.get((kind, name), ""))
        chosen = [entry for entry in entries if _canonical(shipper_of(entry)[0]) == wanted]
        if len(chosen) != 1:
            raise PluginError(conflict(kind, name, entries))
        return chosen[0]

    def _load(self, kind: PluginKind, entry: EntryPoint) -> type:
        if entry not in self._loaded:
            try:
                with installed_only():
                    target = entry.load()
                self._loaded[entry] = _checked(kind, entry, target)
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
            # A new error at each call, so that tracebacks do not accumulate on a shared object.
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

    def _info(
        self, kind: PluginKind, name: str, entry: EntryPoint, *, load: bool,
        shared: Mapping[EntryPoint, str],
    ) -> PluginInfo:  # fmt: skip
        state: PluginState = "found"
        error: str | None = None
        problem = self._clash(kind, name, entry)
        if problem is not None:
            state, error = "conflict", problem
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
        shipper, version = shipper_of(entry)
        return PluginInfo(kind, name, shipper, version, state, error, entry.value)

    def _clash(self, kind: PluginKind, name: str, entry: EntryPoint) -> str | None:
        """Return why this entry point is not used for its name; None if it is used."""
        try:
            chosen = self._only(kind, name)
        except PluginError as error:
            return str(error)
        return None if chosen is entry else f"`prefer` chooses {label(kind, chosen)}"

    def _try(self, kind: PluginKind, entry: EntryPoint, cls: type) -> None:
        """Create an instance with default options, and call its cheap methods."""
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
        """Return a message for each provider with a form that another provider also declares."""
        by_form: dict[str, list[EntryPoint]] = {}
        for entries in self._entries("provider").values():
            for entry in entries:
                with suppress(PluginError):  # it is listed as failed
                    for form in dict.fromkeys(self._load("provider", entry).forms):  # type: ignore[attr-defined] # the class was checked
                        by_form.setdefault(form, []).append(entry)
        messages: dict[EntryPoint, str] = {}
        for form, entries in by_form.items():
            shipped = [entry for entry in entries if is_ours(entry)]
            if len(entries) < 2:  # noqa: PLR2004 - one alone is not a conflict
                continue
            claims = " and ".join(label("provider", entry) for entry in entries)
            end = f"{label('provider', shipped[0])} is used" if len(shipped) == 1 else ""
            for entry in entries:
                if [entry] != shipped:
                    messages[entry] = (
                        f"form {form!r} is declared by {claims}: {end or 'uninstall all but one'}"
                    )
        return messages


def _canonical(name: str) -> str:
    """Return a distribution's name as package indexes normalize it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _checked(kind: PluginKind, entry: EntryPoint, loaded: object) -> type:
    problem = breach_of_class(
        loaded, _CONTRACTS[kind], name=entry.name, distribution=shipper_of(entry)[0]
    )
    if problem:
        msg = f"{label(kind, entry)} cannot be used: {entry.value} {problem}"
        raise PluginError(msg)
    return cast("type", loaded)


@cache
def default_registry() -> Registry:
    """Return this process's registry of all installed plugins."""
    return Registry()


class ProviderSet:
    """The providers in use. Thread-safe.

    Args:
        providers: Providers by entry-point name, each with its distribution.
    """

    def __init__(self, providers: Mapping[str, tuple[StateProvider, str]]) -> None:
        self._providers = dict(providers)
        # Guards `_by_type` and `_warned`; a signal handler that saves may interrupt `for_type`.
        self._lock = threading.RLock()
        self._by_type: WeakKeyDictionary[type, StateProvider | None] = WeakKeyDictionary()
        self._warned: set[str] = set()

    def all(self) -> list[StateProvider]:
        """Return every provider, by name."""
        return [provider for provider, _ in self._providers.values()]

    def for_type(self, kind: type, /) -> StateProvider | None:
        """Return the provider that claims `kind` with the highest priority; None if none does.

        Raises:
            PluginError: Several third-party providers have the same highest priority, and none of
                Penstock's has it; or a priority is invalid.
        """
        with self._lock:
            if kind not in self._by_type:
                self._by_type[kind] = self._choose(kind)
            return self._by_type[kind]

    def for_form(self, form: str, /) -> StateProvider:
        """Return the provider that rebuilds `form`.

        Raises:
            PluginError: No provider rebuilds the form; or several third-party providers do, and
                none of Penstock's.
        """
        names = [name for name, (p, _) in self._providers.items() if form in p.forms]
        if not names:
            known = {f for p in self.all() for f in p.forms}
            msg = (
                f"no installed provider rebuilds {show_text(repr(form))}{nearest(form, known)}: "
                f"the checkpoint was written with a plugin that is not installed here; install it"
            )
            raise PluginError(msg)
        if len(names) > 1:
            names = self._shipped(names, f"form {form!r} is declared by")
        if len(names) > 1:
            msg = f"form {form!r} is declared by {self._named(names)}: uninstall all but one"
            raise PluginError(msg)
        return self._providers[names[0]][0]

    def _shipped(self, names: list[str], what: str) -> list[str]:
        """Reduce `names` to the provider that ships with Penstock, if any, with one warning.

        If conflicts were errors, any installed package could make all checkpoints unreadable.
        """
        shipped = [name for name in names if not is_foreign(self._providers[name][0])]
        if len(shipped) != 1:
            return names
        others = [name for name in names if name not in shipped]
        message = f"{what} {self._named(others)} too: {self._named(shipped)} is used"
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)
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
            if not is_foreign(provider):
                raise
            if name not in self._warned:  # a third party's defect must not stop a save
                self._warned.add(name)
                logger.warning(
                    "%s failed on %s; continuing without it: %s: %s",
                    self._named([name]),
                    kind.__qualname__,
                    type(error).__name__,
                    error,
                )
            return None
        problem = breach_of_priority(claim, kind)
        if problem is not None:
            msg = f"{self._named([name])} {problem}; fix it, or uninstall it"
            raise PluginError(msg)
        return claim

    def _named(self, names: list[str]) -> str:
        return " and ".join(f"provider {n!r} of {self._providers[n][1]}" for n in names)
