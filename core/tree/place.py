"""Plans the restore of a stored tree into a template, by the providers of what stands there."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Any

from penstock.core.abc import (
    Placement,
    StateObject,
)
from penstock.core.errors import (
    PenstockError,
    RestoreError,
    UnsupportedStateError,
)
from penstock.core.tree.containers import key_segment
from penstock.core.tree.describe import (
    NameTable,
    check_root,
    describe_tree,
    plugin_error,
    refuse_ranks,
)
from penstock.core.tree.rebuild import (
    CONTAINERS,
    Rebuilding,
    check_placement,
    name_in_errors,
    settled,
)
from penstock.core.tree.scan import Scan
from penstock.core.types import show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.core.abc import StateProvider
    from penstock.core.tree.patterns import SegmentTest
    from penstock.core.tree.scan import Providers
    from penstock.core.tree.stored_tree import StoredTree
    from penstock.core.types import ObjectPath

_TUPLE = "a tuple"
_READ_ONLY = "a read-only mapping"
_ADVICE = {_TUPLE: "make it a list", _READ_ONLY: "pass a dict"}
"""Containers that take no new values, and what a template should have in their place."""


class Placing(Rebuilding):
    """Plans one restore into a template.

    Args:
        providers: The providers, each of which plans the objects that it claims.
        stored: The stored tree.
        selected: Whether the object at a path of the template is selected.
        allow_pickle: Whether stored pickles may be loaded.
        below: Which segments right below a path of the template lead to something selected, as
            `Selection.below`. The rest of the template is not looked at.
    """

    def __init__(
        self,
        providers: Providers,
        stored: StoredTree,
        selected: Callable[[ObjectPath], bool],
        *,
        allow_pickle: bool,
        below: Callable[[ObjectPath], SegmentTest | bool] = lambda _: True,
    ) -> None:
        super().__init__(providers, stored, selected, allow_pickle=allow_pickle)
        self.scan = Scan(providers, thorough=below(()) is True)
        self._names: NameTable | None = None
        self._below = cache(below)
        self._root: dict[Any, Any] = {}

    def place_tree(self, state: object) -> Placement:
        """Plan the restore of the selected objects into the template `state`.

        The result is already compared: `targets` fit the stored objects, `missing` has what only
        the template has, and `problems` every other difference. Targets of tied objects share one
        sink. `finish()` assigns the values, sets what must be set last, and returns `state`; before
        that nothing changes but the memory of targets.

        Raises:
            UnsupportedStateError: The template, or a stored value, cannot be handled.
            FormatError: A stored value cannot be decoded.
        """
        root = self._root = check_root(state)
        refuse_ranks("restore")
        try:
            if self._below(()) is True:
                self.scan.is_container(root, ())
                self._names = NameTable(self.scan)
            placement = self._place_root(state, root)
        except RecursionError as error:
            msg = "the state tree is nested too deeply to be restored"
            raise UnsupportedStateError(msg) from error
        return settled(self._compared(placement))

    # What providers ask -------------------------------------------------------------------------

    def place(self, value: object, path: ObjectPath, /) -> Placement:
        """As the contract says."""
        if not self._leads_on(path):
            return Placement()
        provider = self.scan.provider_for(type(value))
        if provider is not None:
            return self._place_by_provider(provider, value, path)
        if self.scan.is_container(value, path):
            return self._place_container(value, path)
        return self._place_by_provider(self.scan.value_provider, value, path)

    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        """As the contract says."""
        if self._names is None:
            # An optimizer may name any module of the template, whatever is selected.
            scan = Scan(self._providers)
            scan.is_container(self._root, ())
            self._names = NameTable(scan)
        return self._names.names(tensor)

    # ------------------------------------------------------------------------------------------

    def _leads_on(self, path: ObjectPath) -> bool:
        """Return whether something at or below a path of the template may be selected."""
        if not path:
            return True
        test = self._below(path[:-1])
        return test if isinstance(test, bool) else test(path[-1])

    def _place_root(self, state: object, root: dict[Any, Any]) -> Placement:
        """Plan the restore into the root; values go into a mapping that is no dict, too."""
        if root is state:
            return self._place_container(root, ())
        if not isinstance(state, MutableMapping):
            return self._place_container(root, (), fixed=_READ_ONLY)
        before = dict(root)
        placement = self._place_container(root, ())
        finish = placement.finish

        def assign() -> object:
            if finish is not None:
                finish()
            for key, value in root.items():
                if value is not before[key]:
                    state[key] = value
            return state

        placement.finish = assign
        return placement

    def _place_container(
        self, value: Any, path: ObjectPath, *, fixed: str | None = None
    ) -> Placement:
        """Plan the restore into a dict, list or tuple; `fixed` says why it takes no new values."""
        result = Placement()
        owner: Any = value
        fixed = _TUPLE if isinstance(value, tuple) else fixed
        if self._is_other_kind(value, path, result):
            return result
        finishes: list[tuple[Any, object, Callable[[], object]]] = []
        for key, segment, child in self._children_of(value, path):
            here = (*path, segment)
            placed = self.place(child, here)
            result.absorb(placed)
            if placed.finish is None:
                continue
            if fixed and (placed.replaces or here in placed.values):
                result.problems += self._fixed(child, here, placed, fixed)
            else:
                finishes.append((key, child, placed.finish))

        def finish() -> object:
            for key, child, call in finishes:
                new = call()
                if new is child:
                    continue
                if fixed:
                    msg = f"{show_path((*path, str(key)))} stands in {fixed} and cannot be replaced"
                    raise RestoreError(msg)
                owner[key] = new
            return owner

        result.finish = finish
        return result

    def _children_of(self, value: Any, path: ObjectPath) -> list[tuple[Any, str, Any]]:
        """Return keys, segments and values of a container's items that may be selected."""
        pairs: Iterable[tuple[Any, Any]]
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        test = self._below(path)
        if test is False:
            return []
        if test is not True:
            # Filtered first: a container may have a million items, of which one is selected.
            pairs = [(k, child) for k, child in pairs if type(k) is not str or test(k)]
        children = [(key, key_segment(key, path), child) for key, child in pairs]
        return children if test is True else [one for one in children if test(one[1])]

    def _fixed(self, child: object, path: ObjectPath, placed: Placement, fixed: str) -> list[str]:
        """Check a value in a tuple, which cannot be replaced: it may be equal to the stored one."""
        shown = show_path(path)
        if placed.replaces:
            problem = (
                f"{shown} is a {type(child).__name__} that cannot be written in place, and stands "
                f"in {fixed}, where it cannot be replaced: make it writable, or exclude it"
            )
            return [problem]
        if self._is_stored(child, path):
            return []
        return [f"{shown} stands in {fixed} and differs from what is stored: {_ADVICE[fixed]}"]

    def _is_stored(self, value: object, path: ObjectPath) -> bool:
        """Return whether `value` has the bytes of the stored one (`nan == nan`, `1 != True`)."""
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
        """Note a problem where the checkpoint has something else than such a container."""
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
        if node.form in CONTAINERS and node.form != form and path in self._children:
            result.problems.append(
                f"{shown} is stored as a {node.form}, but is a {here} in the template"
            )
            return True
        return False

    def _place_by_provider(
        self, provider: StateProvider, value: object, path: ObjectPath
    ) -> Placement:
        self._check_version(provider, path)
        try:
            placed = provider.place(value, path, context=self)
        except (PenstockError, RecursionError):
            raise
        except Exception as error:
            raise plugin_error(provider, path, "planning its restore", error) from error
        check_placement(placed, provider, path, "planning its restore")
        name_in_errors(placed, provider, path)
        return placed
