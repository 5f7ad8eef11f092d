"""What is wrong with a plugin, as its class stands there and as an instance of it behaves."""

from __future__ import annotations

import inspect
from contextlib import closing
from typing import Any

from pydantic import ValidationError

from penstock.core.abc import (
    API_VERSION,
    Backend,
    Codec,
    PluginConfig,
    StateProvider,
    says_its_version,
)
from penstock.core.types import Capabilities


def breach_of_class(cls: Any, contract: Any, /, *, name: str, distribution: str) -> str | None:
    """What `cls` lacks to fulfil `contract`, to follow its name in a sentence; None: nothing.

    Args:
        cls: What an entry point has loaded.
        contract: `StateProvider`, `Codec` or `Backend`.
        name: Of the entry point.
        distribution: Who ships it: to be upgraded, if it is for an older contract.
    """
    if not (isinstance(cls, type) and issubclass(cls, contract)):
        return f"is not a subclass of {contract.__name__}"
    return _breach_of_versions(cls, contract, distribution) or _breach_of_declarations(cls, name)


def _breach_of_declarations(cls: Any, name: str) -> str | None:
    if inspect.isabstract(cls):
        return f"lacks {', '.join(sorted(cls.__abstractmethods__))}"
    if getattr(cls, "name", None) != name:
        return f"calls itself {getattr(cls, 'name', None)!r}, not {name!r}"
    options = getattr(cls, "Config", PluginConfig)  # providers have none
    if not (isinstance(options, type) and issubclass(options, PluginConfig)):
        return "has a Config that is not a subclass of PluginConfig"
    # A string would pass for a tuple, until a form is looked for in it.
    if issubclass(cls, StateProvider) and not _is_tuple_of_names(cls.forms):
        return f"has the forms {cls.forms!r}: they must be a tuple of strings"
    return None


def _is_tuple_of_names(forms: object) -> bool:
    return isinstance(forms, tuple) and all(isinstance(form, str) for form in forms)


def _breach_of_versions(cls: Any, contract: Any, distribution: str) -> str | None:
    if type(cls.api_version) is not int:
        return f"has the api_version {cls.api_version!r}: it must be the integer {API_VERSION}"
    if contract is not Backend and type(cls.version) is not int:
        return f"has the version {cls.version!r}: it must be an integer"
    if cls.api_version != API_VERSION:
        older = "penstock" if cls.api_version > API_VERSION else distribution
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


def default_arguments(cls: type, /) -> tuple[object, ...] | None:
    """What makes an instance of `cls` that nobody has configured; None: it needs options."""
    if issubclass(cls, StateProvider):
        return ()
    try:
        return (cls.Config(),)  # type: ignore[attr-defined] # the class was checked
    except ValidationError:
        return None


def breach_of_instance(plugin: object, /) -> str | None:
    """What `plugin` answers that core cannot use, as a clause; None: nothing that was asked.

    A backend is closed.

    Raises:
        Exception: Whatever the plugin raises.
    """
    if isinstance(plugin, StateProvider):
        return breach_of_claim(plugin, object)
    if isinstance(plugin, Codec):
        size: object = plugin.max_encoded_size(1000)
        fine = type(size) is int and size >= 0
        return None if fine else f"says {size!r} for max_encoded_size(1000): it must be an int"
    if isinstance(plugin, Backend):
        return _breach_of_backend(plugin)
    return None


def breach_of_claim(provider: StateProvider, kind: type, /) -> str | None:
    """What is wrong with what `provider.claims(kind)` returns, as a clause; None: nothing."""
    return breach_of_priority(provider.claims(kind), kind)


def breach_of_priority(claim: object, kind: type, /) -> str | None:
    """What is wrong with an answer of `claims(kind)`, as a clause; None: nothing."""
    # Not `isinstance`: who returns True means "yes", and would get the priority 1.
    if claim is None or type(claim) is int:
        return None
    return (
        f"returned {claim!r} of type {type(claim).__name__} from claims({kind.__qualname__}): it "
        "must return an int, the priority, or None"
    )


def _breach_of_backend(backend: Backend) -> str | None:
    with closing(backend):
        url: object = backend.url
        capabilities: object = backend.capabilities
    if not isinstance(url, str) or not url:
        return f"says {url!r} for its url: it must be a string that shows where it is"
    if not isinstance(capabilities, Capabilities):
        return f"has capabilities of type {type(capabilities).__name__}: it must be Capabilities"
    return None
