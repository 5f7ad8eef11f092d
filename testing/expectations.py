"""Expectations, lent buffers, data and models that the conformance checks share."""

from __future__ import annotations

import functools
import gc
import inspect
import random
import unittest
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from penstock.core.abc import API_VERSION, says_its_version
from penstock.core.foreign import said
from penstock.core.types import ReadRequest, WriteRequest, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.abc import Backend
    from penstock.core.types import Capabilities

    OpenRoot: TypeAlias = Callable[[str], Backend]
    BackendCheck: TypeAlias = Callable[[OpenRoot], None]
    from collections.abc import Callable

MIB = 1 << 20

_AFTERWARDS = 0x5A
_T = TypeVar("_T")

_NOT_CALLED = frozenset({"Config", "register"})  # `register` is of ABCMeta


class NotDeclaredError(unittest.SkipTest):
    """Signals a skip: the instance does not declare the check's capability.

    Pytest and unittest show it as a skip, with the reason.
    """


class NotTriedError(unittest.SkipTest):
    """Signals a skip: the check cannot run on this machine, or with this store.

    Pytest and unittest show it as a skip, with the reason.
    """


def declared(
    claim: Callable[[Capabilities], bool], what: str, /
) -> Callable[[BackendCheck], BackendCheck]:
    """Run the check only on backends that declare `what`; raise NotDeclaredError for others.

    Only the backend's declaration decides: a caller cannot skip the check of a declared capability.
    """

    def gate(check: BackendCheck) -> BackendCheck:
        @functools.wraps(check)
        def gated(open_root: OpenRoot) -> None:
            with closing(open_root("declared")) as backend:
                claimed = claim(backend.capabilities)
            if not claimed:
                msg = f"the backend does not declare {what}"
                raise NotDeclaredError(msg)
            check(open_root)

        return gated

    return gate


def promise(check: BackendCheck, /) -> BackendCheck:
    """Turn any exception in the check into an AssertionError that names the broken promise."""

    @functools.wraps(check)
    def named(open_root: OpenRoot) -> None:
        with finding(f"while checking that {check.__name__.replace('_', ' ')}"):
            check(open_root)

    return named


def expect_own_api_version(plugin: object, /) -> None:
    """Check that the plugin's own class declares the contract version of this Penstock.

    Raises:
        AssertionError: The class declares no version, or the wrong one.
    """
    version = getattr(plugin, "api_version", None)
    assert version == API_VERSION, (
        f"{type(plugin).__qualname__} declares api_version {version!r}, but this Penstock has "
        f"version {API_VERSION} of the contract"
    )
    cls = type(plugin)
    assert says_its_version(cls), (
        f"write `api_version = {API_VERSION}` into {cls.__qualname__}: an inherited version "
        "changes with Penstock, so a contract change would go unnoticed"
    )


@contextmanager
def finding(what: str, *passing: type[Exception]) -> Iterator[None]:
    """Turn an exception of the block into an AssertionError that names the attempt.

    Args:
        what: The attempt, which begins the message.
        passing: Errors that pass unchanged.

    Raises:
        AssertionError: The block raised another exception, which is the cause.
    """
    try:
        yield
    except unittest.SkipTest:
        raise
    except passing:
        raise
    except AssertionError as error:
        if any(error.args):  # the check has its own message
            raise
        msg = f"{what}: an `assert` without a text failed"
        raise AssertionError(msg) from error
    except Exception as error:
        msg = f"{what}: {said(error)}"
        raise AssertionError(msg) from error


@contextmanager
def raises(*errors: type[Exception], by: str = "the call") -> Iterator[None]:
    """Fail unless the block raises one of `errors`; `by` describes the block in the message."""
    names = " or ".join(error.__name__ for error in errors)
    try:
        yield
    except errors:
        return
    except Exception as error:
        msg = f"{by} must raise {names}, but raised {said(error)}"
        raise AssertionError(msg) from error
    msg = f"{by} must raise {names}, but raised nothing"
    raise AssertionError(msg)


def pattern(length: int, seed: int = 0) -> bytes:
    """Return reproducible bytes without repetitions.

    With repeating bytes, a backend that mixes up offsets would pass.
    """
    return random.Random(seed).randbytes(length)  # noqa: S311 - for comparing, not for secrets


def at_phase(data: bytes, phase: int) -> memoryview:
    """Copy `data` to writable memory whose address is `phase` modulo 4096."""
    import ctypes  # noqa: PLC0415 - only the checks need it

    memory = bytearray(len(data) + 2 * 4096)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = -base % 4096 + phase
    view = memoryview(memory)[start : start + len(data)]
    view[:] = data
    return view


@dataclass(slots=True)
class Model:
    """The write requests of a blob, and the bytes that the blob must contain after them."""

    align: int
    expected: bytearray = field(default_factory=bytearray)
    requests: list[WriteRequest] = field(default_factory=list)
    end: int = 0

    def put(self, *parts: memoryview, gap: int = 0, phase: int | None = None) -> None:
        """Add a request after the last one, in an alignment unit that no other request touches."""
        offset = align_up(self.end, self.align) + gap * self.align
        offset += phase if phase is not None and self.align > 1 else 0
        data = b"".join(parts)
        self.expected.extend(bytes(offset - len(self.expected)))
        self.expected += data
        self.requests.append(WriteRequest(offset, parts))
        self.end = offset + len(data)


def read_all(backend: Backend, name: str, length: int) -> bytes:
    """Read the first `length` bytes of a blob."""
    target = bytearray(length)
    backend.read([ReadRequest(name, 0, memoryview(target))])
    return bytes(target)


def expect(got: object, expected: object, what: str) -> None:
    """Fail unless `got` equals `expected`; `what` describes `got` in the message."""
    assert got == expected, f"{what} is {got!r}, must be {expected!r}"


def expect_names(backend: Backend, prefix: str, expected: list[str]) -> None:
    """Fail unless `list(prefix)` returns these names, in this order."""
    names = [info.name for info in backend.list(prefix)]
    assert names == expected, f"list({prefix!r}) gives {names}, must give {expected}"


def expect_equal(got: bytes, expected: bytes | bytearray) -> None:
    """Compare bytes; the message gives only the first difference."""
    if got == expected:
        return
    pairs = enumerate(zip(got, expected, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
    msg = f"read {len(got)} bytes, expected {len(expected)}; the first difference is at {first}"
    raise AssertionError(msg)


def store(backend: Backend, name: str, model: Model) -> None:
    """Write and seal the requests of `model`, and compare the bytes that are read back."""
    writer = backend.create(name, size_hint=model.end)
    writer.write(model.requests)
    writer.seal(model.end)
    expect_equal(read_all(backend, name, model.end), model.expected)
    expect(backend.stat(name).size_bytes, model.end, f"stat({name!r}).size_bytes after seal")


class Lender:
    """Lends buffers to calls, and overwrites each buffer after its call.

    A call that keeps a view of a buffer is detected, because CPython counts views. A call that
    keeps only an address is not detected, but later finds other bytes there, as long as the lender
    lives.
    """

    def __init__(self) -> None:
        self._memories: list[bytearray] = []

    def lend(self, data: bytes | memoryview, call: str, use: Callable[[memoryview], _T]) -> _T:
        """Lend a copy of `data` to `use`, which makes the call that `call` names.

        Raises:
            AssertionError: A view of the buffer outlives the call.
        """
        memory = bytearray(data)
        self._memories.append(memory)
        result = use(memoryview(memory))  # the only reference is that of the call
        memory[:] = bytes([_AFTERWARDS]) * len(memory)
        if memory and _has_views(memory):
            msg = (
                f"{call} keeps a view of the buffer that it was given, but the buffer is lent only "
                "for the call, and its bytes change afterward: copy what is needed later"
            )
            raise AssertionError(msg)
        return result


def _has_views(memory: bytearray) -> bool:
    for _ in range(2):
        try:
            memory.pop()  # a bytearray with views refuses to change its size
        except BufferError:
            gc.collect()  # once: a view in a dead cycle does not count
        else:
            return False
    return True


def expect_signatures(plugin: object, contract: Any, /) -> None:
    """Check that core can call each method of the plugin with the contract's arguments.

    Raises:
        AssertionError: A method takes other arguments, or is not callable.
    """
    cls = type(plugin)
    for name in dir(contract):
        promised, given = (inspect.getattr_static(owner, name) for owner in (contract, cls))
        if name.startswith("_") or name in _NOT_CALLED or given is promised:
            continue
        if isinstance(promised, property):
            assert not inspect.isfunction(given), (
                f"{cls.__qualname__}.{name} is a method, but core reads it: make it a property"
            )
        elif callable(getattr(contract, name)):
            _expect_call(f"{cls.__qualname__}.{name}", getattr(contract, name), getattr(cls, name))


def _expect_call(name: str, promised: Any, given: Any) -> None:
    assert callable(given), f"{name} is not a method"
    wanted = inspect.signature(promised)
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):
        return  # a function in C without a signature: it may fit
    keywords = [
        key for key, p in wanted.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    # Bound to its class, a class method shows no `cls`; a plain function shows its `self`.
    positional = len(wanted.parameters) - len(keywords)
    positional += inspect.ismethod(promised) - inspect.ismethod(given)
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        msg = (
            f"{name}{_shown(signature)} cannot be called by the contract, {_shown(wanted)}: {error}"
        )
        raise AssertionError(msg) from error


def _shown(signature: inspect.Signature) -> str:
    """Return the signature without annotations, which would make messages long."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))
