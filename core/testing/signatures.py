"""Checks that core can call the methods of a plugin as its contract has them."""

from __future__ import annotations

import inspect
from typing import Any

_NOT_CALLED = frozenset({"Config", "register"})  # `register` is of ABCMeta


def expect_signatures(plugin: object, contract: Any, /) -> None:
    """Check that core can call each method of the plugin as the contract has it.

    Raises:
        AssertionError: A method takes other arguments, or is none.
    """
    cls = type(plugin)
    for name in dir(contract):
        promised, found = (inspect.getattr_static(owner, name) for owner in (contract, cls))
        if name.startswith("_") or name in _NOT_CALLED or found is promised:
            continue
        if isinstance(promised, property):
            assert not inspect.isfunction(found), (
                f"{cls.__qualname__}.{name} is a method: core reads it, so make it a property"
            )
        elif callable(getattr(contract, name)):
            _expect_call(f"{cls.__qualname__}.{name}", getattr(contract, name), getattr(cls, name))


def _expect_call(name: str, promised: Any, found: Any) -> None:
    assert callable(found), f"{name} is no method"
    wanted = inspect.signature(promised)
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # a function in C without a signature: it may fit
    keywords = [
        key for key, p in wanted.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    # Bound to its class, a class method shows no `cls`; a plain function shows its `self`.
    positional = len(wanted.parameters) - len(keywords)
    positional += inspect.ismethod(promised) - inspect.ismethod(found)
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        msg = (
            f"{name}{_shown(signature)} cannot be called as the contract has it, "
            f"{_shown(wanted)}: {error}"
        )
        raise AssertionError(msg) from error


def _shown(signature: inspect.Signature) -> str:
    """Return the signature without annotations, which would make a message of many lines."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))
