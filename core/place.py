"""From a stored tree back to live objects: into a template, or built anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core.abc import Node, PlaceContext, Placement, StateObject, Target
from penstock.core.compare import compare
from penstock.core.containers import assemble, key_segment
from penstock.core.describe import (
    NameTable,
    broken_contract,
    check_root,
    describe_tree,
    plugin_error,
    refuse_ranks,
)
from penstock.core.errors import (
    ConfigError,
    PenstockError,
    RestoreError,
    SelectionError,
    UnsupportedStateError,
)
from penstock.core.stored_tree import StoredTree, children_of
from penstock.core.tree import Scan
from penstock.core.types import Kind, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.core.abc import StateProvider, StoredObject
    from penstock.core.tree import Providers
    from penstock.core.types import ObjectPath

__all__ = ["StoredTree", "place_tree", "rebuild_tree", "stored_value"]

_CONTAINERS = frozenset({"dict", "list", "tuple"})


def place_tree(
    state: object,
    *,
    providers: Providers,
    stored: StoredTree,
    selected: Callable[[ObjectPath], bool],
    allow_pickle: bool,
) -> Placement:
    """Plan the restore of the selected objects of `stored` into the template `state`.

    The result is compared already: `targets` fit what is stored, whatever the template has and
    the checkpoint lacks is in `missing`, every other difference in `problems`. Targets of tied
    objects share one sink. `finish()` assigns the values, sets what must be set last, and
    returns `state`; nothing but targets' memory changes before.

    Raises:
        UnsupportedStateError: The template, or a stored value, cannot be handled.
        FormatError: A stored value cannot be decoded.
    """
    root = check_root(state)
    refuse_ranks()
    context = _Placing(providers, stored, selected, allow_pickle=allow_pickle)
    try:
        context.scan.is_container(root, ())
        placement = context.place_container(root, ())
    except RecursionError as error:
        msg = "the state tree is nested too deeply to be restored"
        raise UnsupportedStateError(msg) from error
    # An optimizer that is matched by order says so; whoever is matched by name needs not.
    placement.notes.setdefault("matched_by", "name")
    return _settled(context.compared(placement))


def rebuild_tree(
    *,
    providers: Providers,
    stored: StoredTree,
    selected: Callable[[ObjectPath], bool],
    device: str | None,
    allow_pickle: bool,
) -> Placement:
    """Plan building the selected objects of `stored` anew; `finish()` returns the dict.

    Modules come back as the dicts that their `load_state_dict` takes, lists of which only some
    items are selected as dicts by index. Tied tensors are one tensor again.

    Raises:
        ConfigError: There is no such device.
        SelectionError: Something of which a part is selected can only be built as a whole.
        UnsupportedStateError: A stored value cannot be handled.
        FormatError: Something stored cannot be decoded.
    """
    _check_device(device)
    context = _Placing(providers, stored, selected, allow_pickle=allow_pickle)
    try:
        placement = context.rebuild((), device=device)
    except RecursionError as error:
        msg = "what is stored is nested too deeply to be built"
        raise RestoreError(msg) from error
    return _settled(context.compared(placement))


def stored_value(
    path: ObjectPath, *, providers: Providers, stored: StoredTree, allow_pickle: bool
) -> object:
    """Decode one stored value.

    Raises:
        KeyError: There is no value object at `path`, or its bytes are not in `stored.values`.
        UnsupportedStateError: It was pickled, or needs something that is not loaded.
        FormatError: It cannot be decoded.
    """
    context = _Placing(providers, stored, lambda _: True, allow_pickle=allow_pickle)
    return context.value(path)


def _check_device(device: object) -> None:
    if device is None or device == "cpu":
        return
    import torch  # noqa: PLC0415 - only where tensors go elsewhere

    try:
        torch.empty(0, device=device)  # type: ignore[call-overload] # what the caller passed
    except (AssertionError, RuntimeError, TypeError) as error:  # torch's ways of saying no
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        msg = (
            f"device={device!r} cannot be used here: give 'cpu', 'cuda' or 'cuda:0'; torch finds "
            f"{count or 'no'} CUDA device{'s' if count > 1 else ''}"
        )
        raise ConfigError(msg) from error


def _check_placement(
    placement: object, provider: StateProvider, path: ObjectPath, what: str
) -> None:
    if not isinstance(placement, Placement):
        msg = f"{what} returned {type(placement).__name__}, not a Placement"
        raise broken_contract(provider, path, msg)


class _Placing(PlaceContext):
    def __init__(
        self,
        providers: Providers,
        stored: StoredTree,
        selected: Callable[[ObjectPath], bool],
        *,
        allow_pickle: bool,
    ) -> None:
        self.allow_pickle = allow_pickle
        self.scan = Scan(providers)
        self._providers = providers
        self._names = NameTable(self.scan)
        self._selected = selected
        self._all = {o.path: o for o in stored.objects}
        self._nodes = {n.path: n for n in stored.nodes}
        self._values = stored.values
        self._aliases = stored.aliases
        self._chosen = {p: o for p, o in self._all.items() if selected(p)}
        self._children = children_of([*self._chosen, *self._empty_nodes()])
        self._built: dict[tuple[ObjectPath, str | None], Placement] = {}

    # What providers ask -------------------------------------------------------------------------

    def place(self, value: object, path: ObjectPath, /) -> Placement:
        provider = self.scan.provider_for(type(value))
        if provider is not None:
            return self._place_by_provider(provider, value, path)
        if self.scan.is_container(value, path):
            return self.place_container(value, path)
        return self._place_by_provider(self.scan.value_provider, value, path)

    def rebuild(self, path: ObjectPath, /, *, device: str | None = None) -> Placement:
        node = self._nodes.get(path)
        if node is not None and node.form not in _CONTAINERS:
            return self._rebuild_by_provider(node, device)
        chosen = self._chosen.get(path)
        if chosen is not None:
            return self._rebuild_leaf(chosen, device)
        if path not in self._children and node is None and path:
            return Placement(missing=[path])
        return self._rebuild_container(node or Node(path, "dict"), device)

    def stored(self, path: ObjectPath, /) -> StoredObject | None:
        return self._chosen.get(path)

    def node(self, path: ObjectPath, /) -> Node | None:
        return self._nodes.get(path)

    def children(self, path: ObjectPath, /) -> Sequence[str]:
        return tuple(self._children.get(path, ()))

    def value(self, path: ObjectPath, /) -> object:
        stored = self._chosen[path]
        if stored.kind is not Kind.VALUE:
            raise KeyError(path)
        finish = self._rebuild_by_provider(stored, None).finish
        return None if finish is None else finish()

    def value_bytes(self, path: ObjectPath, /) -> bytes:
        return self._values[path]

    def selected(self, path: ObjectPath, /) -> bool:
        return self._selected(path)

    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        return self._names.names(tensor)

    # Containers ---------------------------------------------------------------------------------

    def place_container(self, value: Any, path: ObjectPath) -> Placement:
        result = Placement()
        if self._is_other_kind(value, path, result):
            return result
        finishes: list[tuple[Any, object, Callable[[], object]]] = []
        pairs: Iterable[tuple[Any, Any]] = (
            list(value.items()) if isinstance(value, dict) else enumerate(value)
        )
        for key, child in pairs:
            segment = key_segment(key, path)
            placed = self.place(child, (*path, segment))
            result.absorb(placed)
            if placed.finish is None:
                continue
            if isinstance(value, tuple) and (*path, segment) in placed.values:
                result.problems += self._fixed(child, (*path, segment))
            else:
                finishes.append((key, child, placed.finish))

        def finish() -> object:
            for key, child, call in finishes:
                new = call()
                if new is child:
                    continue
                if isinstance(value, tuple):
                    msg = f"{show_path((*path, str(key)))} stands in a tuple and cannot be replaced"
                    raise RestoreError(msg)
                value[key] = new
            return value

        result.finish = finish
        return result

    def _fixed(self, child: object, path: ObjectPath) -> list[str]:
        """A value in a tuple cannot be assigned; it may well be what is stored."""
        if self._is_stored(child, path):
            return []
        return [
            f"{show_path(path)} stands in a tuple and differs from what is stored: make it a list"
        ]

    def _is_stored(self, value: object, path: ObjectPath) -> bool:
        """Whether `value` is the stored one: by its bytes, for `nan == nan` and `1 != True`."""
        stored = self._chosen[path]
        try:
            tree = {"": value}
            described = describe_tree(
                tree, providers=self._providers, allow_pickle=self.allow_pickle
            )
        except UnsupportedStateError:
            return False
        (entry,) = described.entries
        assert isinstance(entry, StateObject)
        frozen = bytes(entry.source.view() or b"")
        return entry.form == stored.form and frozen == self.value_bytes(path)

    def _is_other_kind(self, value: object, path: ObjectPath, result: Placement) -> bool:
        """Note it where the checkpoint has something that is no such container."""
        shown = show_path(path)
        here = type(value).__name__
        node = self._nodes.get(path)
        if path in self._chosen:
            kind = self._chosen[path].kind
            result.problems.append(
                f"{shown} is stored as one {kind}, but is a {here} of objects in the template"
            )
            return True
        if node is None or not path:
            return False
        form = (
            "dict" if isinstance(value, dict) else "tuple" if isinstance(value, tuple) else "list"
        )
        if node.form in _CONTAINERS and node.form != form and path in self._children:
            result.problems.append(
                f"{shown} is stored as a {node.form}, but is a {here} in the template"
            )
            return True
        return False

    def _rebuild_container(self, node: Node, device: str | None) -> Placement:
        path = node.path
        result = Placement()
        segments = list(self._children.get(path, ()))
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
        # Tied objects are one tensor again: the second gets the sink and the value of the first.
        primary = self._aliases.get(stored.path, stored.path)
        first = self._built.get((primary, device))
        if first is None:
            first = self._rebuild_by_provider(stored, device)
            if first.finish is not None:
                first.finish = _once(first.finish)
            self._built[primary, device] = first
            return first
        targets = [Target(stored.path, t.spec, t.region, t.sink) for t in first.targets]
        return Placement(targets, finish=first.finish)

    def _rebuild_by_provider(self, stored: StoredObject | Node, device: str | None) -> Placement:
        provider = self._providers.for_form(stored.form)
        try:
            built = provider.rebuild(stored, device=device, context=self)
        except (PenstockError, RecursionError):
            raise
        except Exception as error:  # out of memory, or a manifest that makes no sense to it
            if why := self._only_whole(stored):
                raise SelectionError(why) from error
            msg = (
                f"{show_path(stored.path) or 'the root'} is stored in the form {stored.form!r}, "
                f"and cannot be built from that: {type(error).__name__}: {error}"
            )
            raise RestoreError(msg) from error
        _check_placement(built, provider, stored.path, "building it")
        why = self._only_whole(stored) if built.missing else ""
        if why:
            built.missing, built.problems = [], [*built.problems, why]
        if built.finish is None and not built.missing and not built.problems:
            msg = "rebuild returned a Placement without finish, so nothing would be built"
            raise broken_contract(provider, stored.path, msg)
        return built

    def _only_whole(self, stored: StoredObject | Node) -> str:
        """Why it cannot be built, if that may be since only a part of it is selected."""
        depth, shown = len(stored.path), show_path(stored.path)
        left = [p for p in self._all if p[:depth] == stored.path and p not in self._chosen]
        if not isinstance(stored, Node) or not left:
            return ""
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        return (
            f"{shown} can only be built as a whole, and {show_path(left[0])}{more} of it is "
            f"not selected: take {shown!r} whole, or read single objects of open()"
        )

    def _place_by_provider(
        self, provider: StateProvider, value: object, path: ObjectPath
    ) -> Placement:
        try:
            placed = provider.place(value, path, context=self)
        except (PenstockError, RecursionError):
            raise
        except Exception as error:
            raise plugin_error(provider, path, "planning its restore", error) from error
        _check_placement(placed, provider, path, "planning its restore")
        return placed

    def compared(self, placement: Placement) -> Placement:
        """Leave only targets that fit; list the rest."""
        known = frozenset(self._children) | frozenset(self._nodes)
        return compare(placement, self._chosen, self._aliases, known)

    def _empty_nodes(self) -> list[ObjectPath]:
        """Selected nodes with no stored object at or below them."""
        above: set[ObjectPath] = set()
        for path in self._all:
            here = path
            while here not in above:
                above.add(here)
                here = here[:-1]
        return [p for p in self._nodes if p and p not in above and self._selected(p)]


def _once(call: Callable[[], object]) -> Callable[[], object]:
    made: list[object] = []

    def finish() -> object:
        if not made:
            made.append(call())
        return made[0]

    return finish


def _settled(placement: Placement) -> Placement:
    """The root's `finish` also runs what must come last."""
    finish, settle = placement.finish, placement.settle

    def finish_all() -> object:
        result = None if finish is None else finish()
        for call in settle:
            call()
        return result

    placement.finish = finish_all
    placement.settle = []
    return placement
