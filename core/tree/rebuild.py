"""Builds new objects from a stored tree, planned by the providers of the stored forms.

`place` plans the restore into a template, and builds missing objects with this module.

Tested in `tests/core/tree/test_containers.py`.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.abc import (
    Difference,
    Node,
    PlaceContext,
    Placement,
    StoredObject,
    Target,
)
from penstock.core.errors import (
    ConfigError,
    PenstockError,
    PluginError,
    RestoreError,
    SelectionError,
)
from penstock.core.foreign import is_foreign, shipped_by
from penstock.core.tree.cast import may_cast
from penstock.core.tree.checks import broken_contract, checked_placement
from penstock.core.tree.containers import CONTAINERS, assemble
from penstock.core.tree.stored_tree import PathTree, StoredTree
from penstock.core.types import Kind, show_path, show_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.abc import ByteSink, MemoryKey, StateProvider
    from penstock.core.tree.containers import Providers
    from penstock.core.types import ObjectPath, Region, TensorSpec

_CONSTANTS = frozenset({type(None), bool, int, float, complex, str, bytes})


class Rebuilding(PlaceContext):
    """Plans the building of new objects; providers ask it which objects are stored and selected.

    Args:
        providers: The providers, each of which builds its forms.
        stored: The stored tree.
        selected: Returns whether the object at a path is selected.
        allow_pickle: Whether stored pickles may be loaded.
        cast: Whether stored floats may be converted to the template's dtypes.
    """

    def __init__(
        self,
        providers: Providers,
        stored: StoredTree,
        selected: Callable[[ObjectPath], bool],
        *,
        allow_pickle: bool,
        cast: bool = False,
    ) -> None:
        self.allow_pickle = allow_pickle
        self._cast = cast
        self._providers = providers
        self._selected = selected
        self._all = {o.path: o for o in stored.objects}
        self._nodes = {n.path: n for n in stored.nodes}
        self._nodes_below: defaultdict[ObjectPath, list[Node]] | None = None
        self._values = stored.values
        self._aliases = stored.aliases
        self._versions = stored.providers
        self._read_whole = stored.whole
        self._shippers = stored.plugins
        self._chosen = {p: o for p, o in self._all.items() if selected(p)}
        self._children = PathTree([*self._chosen, *self._empty_nodes()])
        self._built: dict[tuple[ObjectPath, str | None], Placement] = {}
        self._assigned: dict[ObjectPath, object] = {}  # constants that some `finish` returned
        self.streamed: Callable[[StoredObject], object] | None = None
        """Returns the object to build in place of a plain tensor; None: build the tensor."""

    def takes(self, spec: TensorSpec, stored: TensorSpec, /) -> bool:
        """Return whether the specs are equal, or differ in floats that a restore may convert."""
        return spec == stored or (self._cast and may_cast(spec, stored))

    def rebuild_tree(self, *, device: str | None, at: ObjectPath = ()) -> Placement:
        """Plan the building of the selected objects; `finish()` returns the dict.

        With `at`, it builds and returns only the object or container at that path. Modules become
        dicts for their `load_state_dict`. Lists with only some items selected become dicts by
        index. Tied tensors are one tensor again.

        Raises:
            ConfigError: There is no such device.
            SelectionError: An object that can only be built whole is selected in part.
            UnsupportedStateError: A stored value cannot be built here.
            FormatError: A stored object cannot be decoded.
        """
        _check_device(device)
        try:
            placement = self.rebuild(at, device=device)
        except RecursionError as error:
            msg = (
                "the stored tree is nested too deeply to be built: read single objects with open()"
            )
            raise RestoreError(msg) from error
        return settled(self._compared(placement))

    def restored_value(self, path: ObjectPath) -> object:
        """Return a selected value for the report.

        A constant is the object that was decoded for the state. Any other value is decoded again,
        so that the report does not change with the state as training continues.

        Raises:
            KeyError: There is no selected value object at `path`.
        """
        return self._assigned[path] if path in self._assigned else self.value(path)

    # The contract of `PlaceContext`, which providers call while they plan.

    def rebuild(self, path: ObjectPath, /, *, device: str | None = None) -> Placement:
        """Plan the building of the object or container at `path`."""
        node = self._nodes.get(path)
        if node is not None and node.form not in CONTAINERS:
            return self._rebuild_by_provider(node, device)
        chosen = self._chosen.get(path)
        if chosen is not None:
            return self._rebuild_leaf(chosen, device)
        if path not in self._children and node is None and path:
            return Placement(missing=[path])
        return self._rebuild_container(node or Node(path, "dict"), device)

    def stored(self, path: ObjectPath, /) -> StoredObject | None:
        """Return the selected stored object at `path`; None if there is none."""
        return self._chosen.get(path)

    def node(self, path: ObjectPath, /) -> Node | None:
        """Return the stored node at `path`; None if there is none."""
        return self._nodes.get(path)

    def nodes(self, path: ObjectPath, /) -> Sequence[Node]:
        """Return the stored nodes right below `path`, selected or not, in stored order."""
        if self._nodes_below is None:
            self._nodes_below = defaultdict(list)
            for node in self._nodes.values():
                self._nodes_below[node.path[:-1]].append(node)
        return self._nodes_below.get(path, [])

    def children(self, path: ObjectPath, /) -> Sequence[str]:
        """Return the next segments of everything selected below `path`, in stored order."""
        return self._children.children(path)

    def value(self, path: ObjectPath, /) -> object:
        """Decode the selected stored value at `path`."""
        stored = self._chosen[path]
        if stored.kind is not Kind.VALUE:
            raise KeyError(path)
        finish = self._rebuild_by_provider(stored, None).finish
        return None if finish is None else finish()

    def value_bytes(self, path: ObjectPath, /) -> bytes:
        """Return the stored bytes of the selected value at `path`."""
        return self._values[path]

    def selected(self, path: ObjectPath, /) -> bool:
        """Return whether the object at `path` of the template is selected."""
        return self._selected(path)

    def provider_version(self, name: str, /) -> int | None:
        """Return the version of provider `name` that the save used; None if it was not used."""
        return self._versions.get(name)

    def whole(self, path: ObjectPath, /) -> PlaceContext:
        """Return a context that selects everything stored at and below `path`."""
        if self._read_whole is None:
            return self
        tree, allow_pickle = self._read_whole(path), self.allow_pickle
        return type(self)(self._providers, tree, lambda _: True, allow_pickle=allow_pickle)

    def _rebuild_container(self, node: Node, device: str | None) -> Placement:
        path = node.path
        result = Placement()
        segments = self._children.children(path)
        finishes: list[tuple[str, Callable[[], object]]] = []
        for segment in segments:
            placed = self.rebuild((*path, segment), device=device)
            result.absorb(placed)
            if placed.finish is not None:
                finishes.append((segment, placed.finish))

        def finish() -> object:
            return assemble(node, {segment: call() for segment, call in finishes})

        result.finish = finish
        return result

    def _rebuild_leaf(self, stored: StoredObject, device: str | None) -> Placement:
        if stored.kind is not Kind.TENSOR:
            return self._rebuild_by_provider(stored, device)
        build: Callable[[StoredObject, str | None], Placement] = self._rebuild_by_provider
        if self.streamed is not None and stored.form == "tensor" and device is None:
            build = self._stream
        # Tied objects are one tensor again: the second gets the sink and the value of the first.
        primary = self._aliases.get(stored.path, stored.path)
        first = self._built.get((primary, device))
        if first is None:
            first = build(stored, device)
            if first.finish is not None:
                first.finish = _once(first.finish)
            self._built[primary, device] = first
            return first
        targets = [Target(stored.path, t.spec, t.regions, t.sink) for t in first.targets]
        return Placement(targets, finish=first.finish)

    def _stream(self, stored: StoredObject, _device: str | None) -> Placement:
        assert self.streamed is not None
        return Placement(finish=partial(self.streamed, stored))

    def _rebuild_by_provider(self, stored: StoredObject | Node, device: str | None) -> Placement:
        provider = self._provider_for_form(stored)
        try:
            built = provider.rebuild(stored, device=device, context=self)
        except (PenstockError, RecursionError):
            raise
        except Exception as error:  # no memory left, or a manifest that contradicts itself
            if why := self._only_whole(stored):
                raise SelectionError(why) from error
            why = show_text(f"{type(error).__name__}: {error}")
            msg = (
                f"{show_path(stored.path) or 'the root'} is stored in the form "
                f"{show_text(repr(stored.form))}, but cannot be built from it: {why}"
            )
            raise RestoreError(msg) from error
        checked_placement(built, provider, stored.path, "building it")
        why = self._only_whole(stored) if built.missing else ""
        if why:
            built.missing, built.problems = [], [*built.problems, why]
        if built.finish is None and not built.missing and not built.problems:
            msg = "rebuild returned a Placement without finish, so nothing would be built"
            raise broken_contract(provider, stored.path, msg)
        if isinstance(stored, StoredObject) and stored.kind is Kind.VALUE:
            self._note_constant(built, stored.path)
        return built

    def _note_constant(self, built: Placement, path: ObjectPath) -> None:
        """Keep an immutable result of `finish` for `restored_value`."""
        call = built.finish
        if call is None:
            return

        def finish() -> object:
            value = call()
            if _is_constant(value):
                self._assigned[path] = value
            return value

        built.finish = finish

    def _only_whole(self, stored: StoredObject | Node) -> str:
        """Return the message for a node that failed because only part of it is selected.

        Empty if all of it is selected, or if `stored` is an object.
        """
        depth, shown = len(stored.path), show_path(stored.path)
        unselected = [p for p in self._all if p[:depth] == stored.path and p not in self._chosen]
        if not isinstance(stored, Node) or not unselected:
            return ""
        more = f" and {len(unselected) - 1} more" if len(unselected) > 1 else ""
        return (
            f"{shown} can only be built as a whole, but the selection lacks "
            f"{show_path(unselected[0])}{more}: select all of {shown!r}, or read single objects "
            "with open()"
        )

    def _provider_for_form(self, stored: StoredObject | Node) -> StateProvider:
        """Return the provider that builds the node or object.

        Raises:
            PluginError: There is none. The error names the missing plugins, and says how to do
                without them.
        """
        try:
            provider = self._providers.for_form(stored.form)
        except PluginError as error:
            shown = show_path(stored.path) or "the root"
            known = {provider.name for provider in self._providers.all()}
            missing = [
                f"{plugin} ({by})"
                for plugin, by in self._shippers.items()
                if plugin.startswith("provider ") and plugin.partition(" ")[2] not in known
            ]
            install = f"; not installed here: {', '.join(missing)}" if missing else ""
            msg = f"{shown}: {error}{install}; to do without this object, pass exclude={shown!r}"
            raise PluginError(msg) from error
        self._check_version(provider, stored.path)
        return provider

    def _check_version(self, provider: StateProvider, path: ObjectPath) -> None:
        """Check that the installed provider is at least as new as the one that the save used.

        A later version may have changed the meaning of the stored objects.

        Raises:
            PluginError: It is older; the error names both versions, and what to upgrade.
        """
        version = self._versions.get(provider.name, 0)
        if version <= provider.version:
            return
        by = self._shippers.get(f"provider {provider.name}")
        msg = (
            f"{show_path(path) or 'the root'} was written by provider {provider.name!r} version "
            f"{version}{f' ({by})' if by else ''}, but the provider here, "
            f"{shipped_by(type(provider))}, has version {provider.version}: upgrade it"
        )
        raise PluginError(msg)

    def _compared(self, placement: Placement) -> Placement:
        """Keep only targets that fit their stored objects; list others as missing or different."""
        fitting: list[Target] = []
        lacking: list[Target] = []
        differing: set[ObjectPath] = set()  # an object may have several targets
        for target in placement.targets:
            path = target.path
            stored = self._chosen.get(path)
            if stored is not None:
                difference = _difference(target, stored, self.takes)
                if difference is None:
                    fitting.append(target)
                elif path not in differing:
                    placement.differ(difference)
                    differing.add(path)
            elif path in self._children or path in self._nodes:
                if path not in differing:
                    placement.differ(_other_kind(path, "a container"))
                    differing.add(path)
            else:
                placement.missing.append(path)
                lacking.append(target)
        filled = {_place_of(target): target.path for target in fitting if lacking}
        placement.tied = {
            target.path: filled[_place_of(target)]
            for target in lacking
            if target.sink.memory is not None and _place_of(target) in filled
        }
        for target in lacking:  # an object is tied only if all of its pieces are filled elsewhere
            if _place_of(target) not in filled:
                placement.tied.pop(target.path, None)
        placement.targets = _tied(fitting, self._aliases)
        placement.missing = list(dict.fromkeys(placement.missing))
        return placement

    def _empty_nodes(self) -> list[ObjectPath]:
        """Return the selected nodes that have no stored object at or below them."""
        stored = PathTree(self._all if self._nodes else ())
        # `selected` records each path that it is called with, so it is called for no other node.
        return [p for p in self._nodes if p and not stored.has(p) and self._selected(p)]


def _place_of(target: Target) -> tuple[MemoryKey | None, tuple[Region, ...]]:
    return target.sink.memory, target.regions


def _tied(targets: list[Target], aliases: Mapping[ObjectPath, ObjectPath]) -> list[Target]:
    """Give targets of the same memory one sink if the stored objects are tied too.

    Other targets of the same memory keep their sinks: `place.disagreements` compares their bytes.
    """
    if are_disjoint(targets):
        return targets
    result: list[Target] = []
    sinks: dict[tuple[MemoryKey, tuple[Region, ...], ObjectPath], ByteSink] = {}
    for target in targets:
        memory, sink = target.sink.memory, target.sink
        if memory is not None:
            key = memory, target.regions, aliases.get(target.path, target.path)
            sink = sinks.setdefault(key, sink)
        if sink is target.sink:
            result.append(target)
        else:
            result.append(Target(target.path, target.spec, target.regions, sink))
    return result


def are_disjoint(targets: Sequence[Target]) -> bool:
    """Return whether certainly no two targets share memory, as in nearly every state.

    Compares only addresses, since a `MemoryKey` of each target would take longer. Returns False if
    a target is not in host memory, or has a third party's sink, which may keep its bytes elsewhere.
    """
    if any(map(is_foreign, {type(target.sink): target.sink for target in targets}.values())):
        return False
    starts, sizes = [], []
    for target in targets:
        sink = target.sink
        if sink.address is not None:
            starts.append(sink.address)
            sizes.append(sink.nbytes)
        elif sink.memory is not None:
            return False
    first, size = np.array(starts, np.uint64), np.array(sizes, np.uint64)
    order = np.argsort(first)
    first, size = first[order], size[order]
    return bool(np.all(first[:-1] + size[:-1] <= first[1:]))


def _difference(
    target: Target, stored: StoredObject, takes: Callable[[TensorSpec, TensorSpec], bool]
) -> Difference | None:
    if stored.kind is not Kind.TENSOR:
        return _other_kind(target.path, "a value")
    here, there = target.spec, stored.spec
    if here == there or takes(here, there):  # mostly equal, which is quicker to check
        return None
    unequal: list[tuple[str, object, object]] = []
    if there.shape != here.shape:
        unequal.append(("shape", list(there.shape), list(here.shape)))
    if there.dtype != here.dtype:
        unequal.append(("dtype", there.dtype, here.dtype))
    if not unequal:
        return None
    text = "; ".join(f"{what} {a} is stored, but the template has {b}" for what, a, b in unequal)
    return Difference(
        target.path,
        stored=", ".join(f"{what} {a}" for what, a, _ in unequal),
        here=", ".join(f"{what} {b}" for what, _, b in unequal),
        sentences=(f"{show_path(target.path)}: {text}",),
        skippable=there.dtype == here.dtype,
        advice="cast=True converts it" if may_cast(here, there) else "",
    )


def _other_kind(path: ObjectPath, stored: str) -> Difference:
    sentence = f"{show_path(path)} is stored as {stored}, but is a tensor in the template"
    return Difference(path, stored, "a tensor", (sentence,), skippable=False)


def settled(placement: Placement) -> Placement:
    """Make the root's `finish` also run the calls that must come last."""
    # Must not refer to the placement: a cycle would keep targets' memory alive after the restore.
    finish, settle = placement.finish, placement.settle

    def finish_all() -> object:
        result = None if finish is None else finish()
        for call in settle:
            call()
        return result

    placement.finish = finish_all
    return placement


def _is_constant(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) in _CONSTANTS


def _once(call: Callable[[], object]) -> Callable[[], object]:
    results: list[object] = []

    def finish() -> object:
        if not results:
            results.append(call())
        return results[0]

    return finish


def _check_device(device: object) -> None:
    if device is None or device == "cpu":
        return
    import torch  # noqa: PLC0415 - only where tensors go elsewhere

    try:
        torch.empty(0, device=device)  # type: ignore[call-overload] # unchecked so far
    except (AssertionError, RuntimeError, TypeError) as error:  # how torch refuses a device
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        msg = (
            f"device={device!r} cannot be used here: pass 'cpu', 'cuda' or 'cuda:0'; torch finds "
            f"{count or 'no'} CUDA device{'s' if count > 1 else ''}"
        )
        raise ConfigError(msg) from error
