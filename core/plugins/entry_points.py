"""Finds the entry points of a kind, names them in messages, and checks their classes.

Tested in `tests/core/plugins/test_registry.py`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import re
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import ValidationError

from penstock.core.abc import (
    API_VERSION,
    DECLINED,
    Backend,
    Codec,
    CodecContext,
    CodecOutput,
    PluginConfig,
    Replayer,
    StateProvider,
    says_its_version,
)
from penstock.core.abc.provider import breach_of_priority
from penstock.core.distributions import installed, installed_only
from penstock.core.errors import CodecError
from penstock.core.types import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.metadata import Distribution, EntryPoint

PluginKind: TypeAlias = Literal["provider", "codec", "backend", "replayer"]

GROUPS: dict[PluginKind, str] = {
    "provider": "penstock.providers",
    "codec": "penstock.codecs",
    "backend": "penstock.backends",
    "replayer": "penstock.replayers",
}

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def by_name(given: Iterable[EntryPoint] | None, kind: PluginKind) -> dict[str, list[EntryPoint]]:
    """Return the entry points of `kind` by name, from `given` or else all installed packages."""
    group = GROUPS[kind]
    if given is None:
        given = installed(group)
    found: dict[str, list[EntryPoint]] = {}
    for entry in given:
        if entry.group == group:
            same = found.setdefault(entry.name, [])
            # One distribution may be found twice: installed, and built in place.
            if not any(e.value == entry.value and shipper_of(e) == shipper_of(entry) for e in same):
                same.append(entry)
    return found


@installed_only()
def module_exists(entry: EntryPoint) -> bool:
    """Return whether the module of `entry` exists; imports only its parent packages."""
    try:
        return importlib.util.find_spec(entry.module) is not None
    except (ImportError, ValueError):
        return False


def is_ours(entry: EntryPoint) -> bool:
    """Return whether the entry point is part of Penstock itself."""
    return entry.module.split(".")[0] == __name__.split(".")[0]


def shipper_of(entry: EntryPoint) -> tuple[str, str]:
    """Return the name and version of the distribution that ships the entry point."""
    # Manually made entry points have no distribution.
    return _name_and_version(entry.dist) if entry.dist else ("(no distribution)", "")


@functools.lru_cache(maxsize=256)  # each access reads and parses the metadata: 2 ms
def _name_and_version(distribution: Distribution) -> tuple[str, str]:
    return distribution.name, distribution.version


def distribution(entry: EntryPoint) -> str:
    """Return the distribution's name and version for a message."""
    return " ".join(shipper_of(entry)).strip()


def label(kind: PluginKind, entry: EntryPoint) -> str:
    """Return the plugin's name and distribution, for the start of a message."""
    return f"{kind} {entry.name!r} of {distribution(entry)}"


def conflict(kind: PluginKind, name: str, entries: Sequence[EntryPoint]) -> str:
    """Return the error text for several entry points with the same name."""
    # The order in which packages are found is arbitrary. Penstock's own plugin comes first, so that
    # a user who copies the hint can still read the data that this plugin stored.
    entries = sorted(entries, key=lambda entry: (not is_ours(entry), shipper_of(entry)))
    claims = " and ".join(f"{distribution(e)} ({e.value})" for e in entries)
    chosen = json.dumps({kind: {name: shipper_of(entries[0])[0]}})
    return (
        f"{kind} {name!r} is claimed by {claims}: uninstall all but one, or choose one with the "
        f"option prefer, as in prefer={chosen}"
    )


def breach_of_class(cls: Any, contract: Any, /, *, name: str, distribution: str) -> str | None:
    """Return a clause that says how `cls` breaks `contract`, to follow its name; None if valid.

    Args:
        cls: The object loaded from an entry point.
        contract: `StateProvider`, `Codec`, `Backend` or `Replayer`.
        name: Name of the entry point.
        distribution: The distribution to upgrade if the plugin is for an older contract.
    """
    if not (isinstance(cls, type) and issubclass(cls, contract)):
        return f"is not a subclass of {contract.__name__}"
    return (
        _breach_of_versions(cls, contract, distribution)
        or _breach_of_declarations(cls, name)
        or _breach_of_facts(cls)
    )


def _breach_of_declarations(cls: Any, name: str) -> str | None:
    if inspect.isabstract(cls):
        return f"lacks {', '.join(sorted(cls.__abstractmethods__))}"
    if getattr(cls, "name", None) != name:
        return f"calls itself {getattr(cls, 'name', None)!r}, not {name!r}"
    if issubclass(cls, Backend) and not _SCHEME.fullmatch(name):
        return (
            f"is called {name!r}, which no URL can begin with: use only a-z, 0-9, +, . and -, and "
            "begin with a letter"
        )
    options = getattr(cls, "Config", PluginConfig)  # providers have none
    if not (isinstance(options, type) and issubclass(options, PluginConfig)):
        return "has a Config that is not a subclass of PluginConfig"
    # A string would pass for a tuple until a form is looked up in it.
    if issubclass(cls, StateProvider) and not (
        isinstance(cls.forms, tuple) and all(isinstance(form, str) for form in cls.forms)
    ):
        return f"has the forms {cls.forms!r}: they must be a tuple of strings"
    return None


def _breach_of_facts(cls: Any) -> str | None:
    """Check the class attributes that core reads before it calls any method."""
    if issubclass(cls, Codec):
        oldest: object = cls.oldest_readable
        if type(oldest) is not int or not 1 <= oldest <= cls.version:
            return (
                f"declares oldest_readable = {oldest!r}: it must be an integer from 1 to its "
                f"version, {cls.version}"
            )
        for fact in ("lossless", "needs_base"):
            value = getattr(cls, fact, None)
            if not isinstance(value, bool):
                flaw = f"does not declare {fact}" if value is None else f"has {fact} = {value!r}"
                return f"{flaw}: write `{fact} = True` or `{fact} = False` into the class"
    if issubclass(cls, StateProvider) and not _declares(cls, "forms"):
        return (
            "does not declare its forms: list in `forms` what its `rebuild` accepts, or write "
            "`forms = ()` if it describes only forms of other providers"
        )
    return None


def _declares(cls: type, name: str) -> bool:
    """Return whether the class, or a base class other than the contract, sets the attribute."""
    return any(name in vars(base) for base in cls.__mro__ if base is not StateProvider)


def _breach_of_versions(cls: Any, contract: Any, distribution: str) -> str | None:
    if type(cls.api_version) is not int:
        return f"has the api_version {cls.api_version!r}: it must be the integer {API_VERSION}"
    if contract is not Backend and (type(cls.version) is not int or cls.version < 1):
        return f"has the version {cls.version!r}: it must be an integer, at least 1"
    if cls.api_version != API_VERSION:
        older = "penstock" if cls.api_version > API_VERSION else distribution
        return (
            f"is for version {cls.api_version} of the {contract.__name__} contract, "
            f"but this Penstock has version {API_VERSION}: upgrade {older}"
        )
    if not says_its_version(cls):
        return (
            f"does not declare its version of the {contract.__name__} contract: write "
            f"`api_version = {API_VERSION}` into the class"
        )
    return None


def default_arguments(cls: type, /) -> tuple[object, ...] | None:
    """Return the arguments for an instance of `cls` with defaults; None if it needs options."""
    if issubclass(cls, (StateProvider, Replayer)):
        return ()
    try:
        return (cls.Config(),)  # type: ignore[attr-defined] # the class was checked
    except ValidationError:
        return None


def breach_of_instance(plugin: object, /) -> str | None:
    """Test `plugin`, and return a clause that says how it breaks its contract; None if valid.

    Closes a backend.

    Raises:
        Exception: The plugin's own error.
    """
    if isinstance(plugin, StateProvider):
        return breach_of_priority(plugin.claims(object), object)
    if isinstance(plugin, Codec):
        return _breach_of_codec(plugin)
    if isinstance(plugin, Backend):
        return _breach_of_backend(plugin)
    if isinstance(plugin, Replayer):
        answer: object = plugin.handles(object())
        if type(answer) is not bool:
            return f"returned {answer!r} from handles: it must be True or False"
    return None


def _breach_of_codec(codec: Codec) -> str | None:
    """Encode and decode a small chunk, and return a clause with the problem, if any."""
    chunk = bytes(range(250)) * 4
    size: object = codec.max_encoded_size(len(chunk))
    if type(size) is not int or size < 0:
        return f"returned {size!r} from max_encoded_size({len(chunk)}): it must be an int"
    if not isinstance(codec.config, codec.Config):
        return "does not keep its options as `self.config`, so they cannot be stored"
    base = memoryview(chunk[::-1]) if codec.needs_base else None
    context = CodecContext("uint8", 1, (len(chunk),), 0, len(chunk), base, codec.version)
    output: object = codec.output(replace(context, base=None))
    if not isinstance(output, CodecOutput):
        return f"returned {output!r} from output: it must be a CodecOutput"
    try:
        return _breach_of_frames(codec, chunk, memoryview(bytearray(size)), context)
    except CodecError as error:
        return f"refuses {len(chunk)} plain bytes: {error}; return DECLINED for unsuitable data"


def _breach_of_frames(
    codec: Codec, chunk: bytes, out: memoryview, context: CodecContext
) -> str | None:
    decoded = bytearray(len(chunk))
    length: object = codec.encode(memoryview(chunk), out, context=context)
    if length is DECLINED:
        return None
    if type(length) is not int or not 0 <= length <= len(out):
        return f"returned {length!r} from encode: it must be the length of the frame, an int"
    codec.decode(out[:length].toreadonly(), memoryview(decoded), context=context)
    if codec.lossless and decoded != chunk:
        return f"is declared lossless, but {len(chunk)} bytes came back changed"
    return None


def _breach_of_backend(backend: Backend) -> str | None:
    with closing(backend):
        url: object = backend.url
        capabilities: object = backend.capabilities
    if not isinstance(url, str) or not url:
        return f"has {url!r} as its url: it must be a string that shows its location"
    if not isinstance(capabilities, Capabilities):
        return f"has capabilities of type {type(capabilities).__name__}: it must be Capabilities"
    return None
