"""Checks for authors of state providers: plain functions, to be called from any test.

`store` and `Stored` are a checkpoint in memory: what core does with a provider, without files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.core.abc import Node, StateObject, StoredObject
from penstock.core.describe import Description, describe_tree
from penstock.core.place import StoredTree, place_tree, rebuild_tree
from penstock.core.select import Rename, Selection
from penstock.core.testing.expectations import expect_own_api_version
from penstock.core.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import ByteSource, Placement
    from penstock.core.select import Patterns, RenameSpec
    from penstock.core.tree import Providers
    from penstock.core.types import ObjectPath

PIECE_BYTES = 48  # small, so that every sink is filled in several pieces
_CONTAINERS = frozenset({"dict", "list", "tuple"})


@dataclass(frozen=True)
class Stored:
    """A described tree with its bytes.

    Attributes:
        description: What the providers said.
        tree: The same as a restore sees it.
        data: Bytes of every object that is not tied to another.
    """

    providers: Providers
    description: Description
    tree: StoredTree
    data: dict[ObjectPath, bytes]

    def renamed(self, spec: RenameSpec) -> Stored:
        """The same checkpoint with moved paths."""
        rename = Rename(spec)
        moved = rename.apply([o.path for o in self.tree.objects])
        tree = StoredTree(
            [replace(o, path=moved[o.path]) for o in self.tree.objects],
            [replace(n, path=rename(n.path)) for n in self.tree.nodes],
            {moved[p]: v for p, v in self.tree.values.items()},
            {moved[p]: moved[q] for p, q in self.tree.aliases.items()},
        )
        return replace(self, tree=tree, data={moved[p]: v for p, v in self.data.items()})

    def plan(
        self, state: object, include: Patterns = None, exclude: Patterns = None,
        *, allow_pickle: bool = False,
    ) -> Placement:  # fmt: skip
        """The plan of a restore into `state`, nothing filled yet."""
        return place_tree(
            state,
            providers=self.providers,
            stored=self.tree,
            selected=Selection(include, exclude).selects,
            allow_pickle=allow_pickle,
        )

    def restore(
        self, state: object, include: Patterns = None, exclude: Patterns = None,
        *, allow_pickle: bool = False, piece_bytes: int = PIECE_BYTES,
    ) -> Placement:  # fmt: skip
        """Restore into `state`, in small pieces.

        Raises:
            AssertionError: Something is missing or does not fit.
        """
        placement = self.plan(state, include, exclude, allow_pickle=allow_pickle)
        assert not placement.missing, placement.missing
        assert not placement.problems, placement.problems
        self.fill(placement, piece_bytes=piece_bytes)
        assert placement.finish is not None
        placement.finish()
        return placement

    def load(
        self, include: Patterns = None, exclude: Patterns = None, *, device: str | None = None,
        allow_pickle: bool = False,
    ) -> Any:  # fmt: skip
        """Build the tree anew."""
        placement = rebuild_tree(
            providers=self.providers,
            stored=self.tree,
            selected=Selection(include, exclude).selects,
            device=device,
            allow_pickle=allow_pickle,
        )
        assert not placement.problems, placement.problems
        self.fill(placement)
        assert placement.finish is not None
        return placement.finish()

    def fill(self, placement: Placement, *, piece_bytes: int = 1 << 20) -> None:
        """Fill every target once, last pieces first: any order has to do."""
        done: set[int] = set()
        for target in placement.targets:
            if id(target.sink) in done:
                continue
            done.add(id(target.sink))
            data = self.data[self.tree.aliases.get(target.path, target.path)]
            assert len(data) == target.sink.nbytes, target.path
            unit = target.spec.itemsize
            step = max(piece_bytes // unit, 1) * unit if unit else 1
            for start in reversed(range(0, len(data), step)):
                target.sink.copy_in(start, memoryview(data)[start : start + step])
            target.sink.written()


def store(state: object, *, providers: Providers, allow_pickle: bool = False) -> Stored:
    """Describe `state` and take all its bytes at once."""
    description = describe_tree(state, providers=providers, allow_pickle=allow_pickle)
    objects = [e for e in description.entries if isinstance(e, StateObject)]
    nodes = [e for e in description.entries if isinstance(e, Node)]
    data = {o.path: read_source(o.source) for o in objects if o.same_as is None}
    tree = StoredTree(
        [StoredObject(o.path, o.kind, o.spec, o.role, o.form) for o in objects],
        nodes,
        {o.path: data[o.path] for o in objects if o.kind is Kind.VALUE},
        {o.path: o.same_as for o in objects if o.same_as is not None},
    )
    return Stored(providers, description, tree, data)


def read_source(source: ByteSource) -> bytes:
    """All bytes of a source, by `copy_out`."""
    out = bytearray(source.nbytes)
    pending = source.copy_out(0, memoryview(out))
    if pending is not None:
        pending.wait()
    return bytes(out)


def check_source(source: ByteSource, itemsize: int) -> None:
    """A source gives the same bytes whole, in pieces, and as a view.

    Raises:
        AssertionError: It does not.
    """
    whole = read_source(source)
    view = source.view()
    assert (view is None) == (source.address is None), "a view goes with an address"
    if view is not None:
        assert view.contiguous, "the view must be flat"
        assert bytes(view) == whole, "view and copy_out differ"
    for items in (1, 3, 7):
        step = items * max(itemsize, 1)
        for start in range(0, len(whole), max(step, len(whole) // 16 // step * step)):
            out = bytearray(min(step, len(whole) - start))
            pending = source.copy_out(start, memoryview(out))
            if pending is not None:
                pending.wait()
            assert out == whole[start : start + step], f"piece at {start} differs"


def check_provider(
    make: Callable[[], object],
    change: Callable[[Any], object],
    equal: Callable[[Any, Any], bool],
    *,
    providers: Providers,
    loaded: Callable[[Any, Any], bool] | None = None,
) -> None:
    """What core relies on, for values of one kind.

    Args:
        make: A new value, always the same.
        change: Changes a value in place, as training does, or returns a changed one.
        equal: Whether two values have the same state, bit by bit.
        providers: All that are needed, the one under test among them.
        loaded: Whether what `load` gives, without a template, has the state of a value; None: it
            only has to give something.

    Raises:
        AssertionError: The provider breaks the contract.
    """
    value = make()
    _check_declarations(value, providers)
    stored = store({"part": value}, providers=providers)
    _check_description(stored)
    _check_repeats(stored, {"part": value}, providers)

    target = {"part": _changed(make(), change)}
    assert not equal(target["part"], value), "`change` changes nothing: the check would be empty"
    before = store(target, providers=providers).data
    assert not stored.plan(target, include="no-such-part").targets, "unselected, but has targets"
    assert store(target, providers=providers).data == before, "an unselected restore changed it"
    placement = stored.plan(target)
    assert not placement.missing, placement.missing
    assert not placement.problems, placement.problems
    assert store(target, providers=providers).data == before, "planning changed the target"
    stored.fill(placement, piece_bytes=PIECE_BYTES)
    assert placement.finish is not None
    placement.finish()
    got = type(target["part"])
    assert got is type(value), f"`finish` put a {got.__name__} into the tree"
    assert equal(target["part"], value), "restored into a changed target, but not equal"

    fresh = {"part": make()}
    stored.restore(fresh)
    assert equal(fresh["part"], value), "restored into a fresh target, but not equal"
    tree = stored.load()
    assert "part" in tree, "load gives nothing"
    assert loaded is None or loaded(tree["part"], value), "load gives another state"
    _check_mismatch(stored, make)

    empty = replace(stored, tree=StoredTree([]), data={})
    lacking = empty.plan({"part": make()})
    assert lacking.missing or lacking.problems, "an empty checkpoint is not noticed"


def _check_declarations(value: object, providers: Providers) -> None:
    provider = providers.for_type(type(value))
    if provider is None:
        return  # plain data, which the provider of values takes without claiming its type
    expect_own_api_version(provider)
    assert provider.name, "a provider needs a name"
    assert provider.version >= 1, "versions count from 1"
    assert isinstance(provider.forms, tuple), "forms is a tuple of names"
    assert len(set(provider.forms)) == len(provider.forms), "a form is declared twice"
    for other in providers.all():
        shared = set(provider.forms) & set(other.forms) if other is not provider else ()
        assert not shared, f"{other.name} declares {shared} too: forms are unique"
    for kind in (type("Stranger", (), {}), object):
        assert provider.claims(kind) is None, f"claims {kind.__name__}, which it cannot know"


def _check_mismatch(stored: Stored, make: Callable[[], object]) -> None:
    """If a tensor is stored with another shape, nobody offers memory of the wrong size for it."""
    for path in stored.data:
        objects = [
            replace(o, spec=replace(o.spec, shape=(*o.spec.shape, 3)))
            if o.path == path and o.kind is Kind.TENSOR
            else o
            for o in stored.tree.objects
        ]
        if objects == stored.tree.objects:
            continue
        changed = replace(stored, tree=replace(stored.tree, objects=objects))
        for target in changed.plan({"part": make()}).targets:
            assert target.sink.nbytes == target.spec.nbytes, f"{target.path}: size and spec differ"


def _changed(value: Any, change: Callable[[Any], object]) -> Any:
    new = change(value)
    return value if new is None else new


def _check_description(stored: Stored) -> None:
    seen: set[ObjectPath] = set()
    assert stored.description.entries, "nothing is described"
    for entry in stored.description.entries:
        assert entry.path[:1] == ("part",), f"{entry.path} is outside of its part"
        if entry.form not in _CONTAINERS:
            stored.providers.for_form(entry.form)  # raises PluginError if nobody can rebuild it
        if isinstance(entry, Node):
            assert not any(p[: len(entry.path)] == entry.path for p in seen), (
                f"the node {entry.path} comes after what is below it"
            )
        else:
            assert entry.source.nbytes == entry.spec.nbytes, f"{entry.path}: size and spec differ"
            check_source(entry.source, entry.spec.itemsize)
        seen.add(entry.path)


def _check_repeats(stored: Stored, state: object, providers: Providers) -> None:
    again = store(state, providers=providers)
    assert again.tree.objects == stored.tree.objects, "a second description differs"
    assert again.tree.nodes == stored.tree.nodes, "a second description has other nodes"
    assert again.data == stored.data, "describing changes the state"
