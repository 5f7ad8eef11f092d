"""From a state tree to its description: objects and nodes in order, and what may be deferred."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.abc import DescribeContext, Node, StateObject
from penstock.core.blame import said
from penstock.core.containers import dict_meta, key_segment, key_types, tuple_class
from penstock.core.entry_checks import BrokenEntryError, checked_entries
from penstock.core.errors import PenstockError, PluginError, UnsupportedStateError
from penstock.core.paths import show_path
from penstock.core.shipping import shipped_by
from penstock.core.tree import Found, Scan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.abc import MemoryKey, StateProvider
    from penstock.core.tree import Providers
    from penstock.core.types import ObjectPath, Role


@dataclass(frozen=True, slots=True)
class Description:
    """A state tree as objects.

    Attributes:
        entries: Objects and nodes, in order; a node comes before what is below it.
        deferrable: Memory that only an optimizer's step in this tree changes.
        providers_used: Name and version of every provider that took part, sorted.
    """

    entries: tuple[StateObject | Node, ...]
    deferrable: frozenset[MemoryKey]
    providers_used: tuple[tuple[str, int], ...]


def describe_tree(state: object, *, providers: Providers, allow_pickle: bool) -> Description:
    """Describe `state` without copying tensors; plain values are frozen to bytes here.

    Raises:
        UnsupportedStateError: Something in it cannot be saved; names its path.
        PluginError: Two providers claim one type, or one breaks its contract; names both.
    """
    root = check_root(state)
    refuse_ranks()
    scan = Scan(providers)
    context = _Describing(scan, providers, allow_pickle=allow_pickle)
    try:
        scan.is_container(root, ())
        entries = _checked(context.describe_root(root))
    except RecursionError as error:
        msg = "the state tree is nested too deeply to be saved"
        raise UnsupportedStateError(msg) from error
    used = sorted({(p.name, p.version) for p in context.used})
    return Description(entries, _deferrable(context.seen), tuple(used))


def check_root(state: object) -> dict[Any, Any]:
    """The root of a state tree is a dict.

    Raises:
        UnsupportedStateError: It is not.
    """
    if not isinstance(state, dict):
        msg = (
            f"the state is a {type(state).__name__}: pass a dict of named parts, such as "
            '{"model": model, "optimizer": optimizer}'
        )
        raise UnsupportedStateError(msg)
    return state


def refuse_ranks() -> None:
    """Several ranks are not supported yet.

    Raises:
        UnsupportedStateError: torch.distributed runs with more than one rank.
    """
    # Looked up, not imported: torch must stay out of this module, and a process that has not
    # imported it has one rank.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    ranks = distributed.get_world_size()
    if ranks > 1:
        msg = (
            f"torch.distributed runs with {ranks} ranks, and Penstock does not support several "
            "ranks yet: save from a process of its own, or gather the state to one rank and save "
            "it after destroy_process_group()"
        )
        raise UnsupportedStateError(msg)


def plugin_error(
    provider: StateProvider, path: ObjectPath, what: str, error: BaseException
) -> PluginError:
    """What a provider raised beside its contract, as one of ours."""
    return PluginError(
        f"{show_path(path) or 'the root'}: {what} failed in provider {provider.name!r} "
        f"({shipped_by(type(provider))}) with {said(error)}"
    )


def broken_contract(provider: StateProvider, path: ObjectPath, what: str) -> PluginError:
    """A provider did what its contract forbids."""
    return PluginError(
        f"{show_path(path) or 'the root'}: provider {provider.name!r} "
        f"({shipped_by(type(provider))}) broke its contract: {what}"
    )


class NameTable:
    """Which names the modules of a tree give to a tensor."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._names: dict[int, tuple[object, list[str], list[str]]] | None = None

    def names(self, tensor: object) -> Sequence[str]:
        """Bare names first, then the same with the tree key in front."""
        if self._names is None:
            self._names = {}
            for found in self._scan.found:
                self._add(found)
        entry = self._names.get(id(tensor))
        return [] if entry is None else [*entry[1], *entry[2]]

    def _add(self, found: Found) -> None:
        assert self._names is not None
        front = ".".join(found.path)
        with _named(found, "naming its parameters"):
            parameters = list(found.provider.parameters(found.value))
        for name, tensor in parameters:
            # The tensor is held so that its id stays its own.
            _, bare, prefixed = self._names.setdefault(id(tensor), (tensor, [], []))
            full = f"{front}.{name}" if name else front
            if (name or front) not in bare:
                bare.append(name or front)
            if full not in prefixed and full not in bare:
                prefixed.append(full)


class _Describing(DescribeContext):
    def __init__(self, scan: Scan, providers: Providers, *, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.used: set[StateProvider] = set()
        self.seen: list[Found] = []
        self._scan = scan
        self._names = NameTable(scan)
        self._forms = frozenset(
            {"dict", "list", "tuple"}.union(*(p.forms for p in providers.all()))
        )

    def describe_root(self, root: dict[Any, Any]) -> Iterator[StateObject | Node]:
        return self._dict(root, ())

    def describe(
        self, value: object, path: ObjectPath, /, *, role: Role | None = None
    ) -> Iterator[StateObject | Node]:
        entries = self._entries(value, path)
        if role is None:
            return entries
        return _with_role(entries, role)

    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        return self._names.names(tensor)

    def _entries(self, value: Any, path: ObjectPath) -> Iterator[StateObject | Node]:
        provider = self._scan.provider_for(type(value))
        if provider is None:
            if self._scan.is_container(value, path):
                return self._container(value, path)
            provider = self._scan.value_provider
        else:
            self.seen.append(Found(path, provider, value))
        self.used.add(provider)
        return self._described(provider, value, path)

    def _described(
        self, provider: StateProvider, value: Any, path: ObjectPath
    ) -> Iterator[StateObject | Node]:
        try:
            yield from checked_entries(
                provider.describe(value, path, context=self), path, self._forms
            )
        except BrokenEntryError as error:
            raise broken_contract(provider, path, str(error)) from None
        except (PenstockError, RecursionError):
            raise
        except Exception as error:
            raise plugin_error(provider, path, "describing it", error) from error

    def _container(self, value: Any, path: ObjectPath) -> Iterator[StateObject | Node]:
        if isinstance(value, dict):
            yield from self._dict(value, path)
            return
        if isinstance(value, tuple):
            name = tuple_class(value, path)
            yield Node(path, "tuple", {"length": len(value)} | ({"class": name} if name else {}))
        elif type(value) is list:
            yield Node(path, "list", {"length": len(value)})
        else:
            msg = (
                f"{show_path(path)} is a {type(value).__module__}.{type(value).__qualname__} "
                "that holds tensors or other objects: pass a plain list of it"
            )
            raise UnsupportedStateError(msg)
        for index, child in enumerate(value):
            yield from self._entries(child, (*path, str(index)))

    def _dict(self, value: dict[Any, Any], path: ObjectPath) -> Iterator[StateObject | Node]:
        segments = [key_segment(key, path) for key in value]
        meta = dict_meta(value, path)
        kinds = key_types(list(value))
        if kinds is not None:
            meta["keys"] = kinds
        if meta or not value:
            yield Node(path, "dict", meta)
        if len(set(segments)) < len(segments):
            twice = next(s for s in segments if segments.count(s) > 1)
            msg = (
                f"{show_path(path) or 'the state'} has two keys that are both written {twice!r}: "
                "give one of them another name"
            )
            raise UnsupportedStateError(msg)
        for segment, child in zip(segments, list(value.values()), strict=True):
            yield from self._entries(child, (*path, segment))


def _with_role(entries: Iterator[StateObject | Node], role: Role) -> Iterator[StateObject | Node]:
    for entry in entries:
        if isinstance(entry, Node) or entry.role is role:
            yield entry
        else:
            # By hand: dataclasses.replace takes three times as long, once per optimizer tensor.
            yield StateObject(
                entry.path, entry.kind, entry.spec, entry.region, role, entry.form, entry.source,
                entry.same_as,
            )  # fmt: skip


def _checked(entries: Iterator[StateObject | Node]) -> tuple[StateObject | Node, ...]:
    """Tie equal memory, refuse two entries at one place."""
    result: list[StateObject | Node] = []
    owners: dict[tuple[MemoryKey, str], ObjectPath] = {}
    objects: set[ObjectPath] = set()
    taken: set[ObjectPath] = set()
    for entry in entries:
        path = entry.path
        if path in taken:
            msg = f"two parts of the state have the path {show_path(path)}: rename one of them"
            raise UnsupportedStateError(msg)
        taken.add(path)
        tied = entry
        if isinstance(entry, StateObject):
            objects.add(path)
            memory = entry.source.memory
            if memory is not None:
                first = owners.setdefault((memory, entry.form), path)
                if first is not path:
                    tied = StateObject(
                        path, entry.kind, entry.spec, entry.region, entry.role, entry.form,
                        entry.source, first,
                    )  # fmt: skip
        result.append(tied)
    above: set[ObjectPath] = set()
    for path in taken:
        parent = path[:-1]
        while parent and parent not in above:
            above.add(parent)
            parent = parent[:-1]
    for path in above & objects:
        msg = (
            f"{show_path(path)} is an object, but other parts of the state stand below it: "
            "rename one of them"
        )
        raise UnsupportedStateError(msg)
    return tuple(result)


@contextmanager
def _named(found: Found, what: str) -> Iterator[None]:
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        raise plugin_error(found.provider, found.path, what, error) from error


def _deferrable(seen: list[Found]) -> frozenset[MemoryKey]:
    claimed: set[MemoryKey] = set()
    unsteady: set[tuple[str, int]] = set()
    for found in seen:
        with _named(found, "claiming its memory"):
            claimed.update(found.provider.claimed_memory(found.value))
    for found in seen if claimed else ():
        with _named(found, "naming its unsteady memory"):
            unsteady.update(found.provider.unsteady_memory(found.value))
    return frozenset(k for k in claimed if (k.device, k.storage) not in unsteady)
