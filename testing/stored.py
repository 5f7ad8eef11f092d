"""A checkpoint in memory, stored and restored by a fixed list of providers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.abc import Node, StateObject, StoredObject
from penstock.core.abc.provider import breach_of_priority
from penstock.core.errors import PluginError
from penstock.core.tree.describe import Description, describe_tree
from penstock.core.tree.place import Placing
from penstock.core.tree.select import Rename, Selection
from penstock.core.tree.stored_tree import StoredTree
from penstock.core.types import Kind, show_path
from penstock.testing.expectations import Lender

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import ByteSource, Placement, StateProvider, Target
    from penstock.core.tree.containers import Providers
    from penstock.core.tree.select import Patterns, RenameSpec
    from penstock.core.types import ObjectPath

PIECE_BYTES = 48  # small, so that every sink is filled in several pieces


@dataclass(frozen=True)
class Stored:
    """A described tree and its bytes.

    Attributes:
        providers: The providers that described the tree.
        description: The entries that the providers described.
        tree: The same entries as a restore sees them.
        data: The bytes of every object that is not tied to another object.
    """

    providers: Providers
    description: Description
    tree: StoredTree
    data: dict[ObjectPath, bytes]

    def renamed(self, spec: RenameSpec) -> Stored:
        """Return the same checkpoint with renamed paths."""
        rename = Rename(spec)
        moved = rename.apply([o.path for o in self.tree.objects])
        tree = replace(
            self.tree,
            objects=[o._replace(path=moved[o.path]) for o in self.tree.objects],
            nodes=[replace(n, path=rename(n.path)) for n in self.tree.nodes],
            values={moved[p]: v for p, v in self.tree.values.items()},
            aliases={moved[p]: moved[q] for p, q in self.tree.aliases.items()},
        )
        return replace(self, tree=tree, data={moved[p]: v for p, v in self.data.items()})

    def plan(
        self, state: object, include: Patterns = None, exclude: Patterns = None,
        *, allow_pickle: bool = False,
    ) -> Placement:  # fmt: skip
        """Plan a restore into `state`, without filling anything."""
        selected = Selection(include, exclude).selects
        tree = replace(self.tree, whole=lambda _: self.tree)
        placing = Placing(self.providers, tree, selected, allow_pickle=allow_pickle)
        return placing.place_tree(state)

    def restore(
        self, state: object, include: Patterns = None, exclude: Patterns = None,
        *, allow_pickle: bool = False, piece_bytes: int = PIECE_BYTES,
    ) -> Placement:  # fmt: skip
        """Restore into `state`, in small pieces.

        Raises:
            AssertionError: An object is missing or does not fit.
        """
        placement = self.plan(state, include, exclude, allow_pickle=allow_pickle)
        assert not placement.missing, f"missing: {placement.missing}"
        assert not placement.problems, f"problems: {placement.problems}"
        self.complete(placement, piece_bytes=piece_bytes)
        return placement

    def load(
        self, include: Patterns = None, exclude: Patterns = None, *, device: str | None = None,
        allow_pickle: bool = False,
    ) -> Any:  # fmt: skip
        """Load the tree without a template."""
        selected = Selection(include, exclude).selects
        placing = Placing(self.providers, self.tree, selected, allow_pickle=allow_pickle)
        placement = placing.rebuild_tree(device=device)
        assert not placement.problems, f"problems: {placement.problems}"
        return self.complete(placement)

    def complete(self, placement: Placement, *, piece_bytes: int = 1 << 20) -> Any:
        """Fill all targets, call `finish`, and return its result."""
        self.fill(placement, piece_bytes=piece_bytes)
        assert placement.finish is not None, "the plan of a whole tree must have a `finish`"
        return placement.finish()

    def fill(self, placement: Placement, *, piece_bytes: int = 1 << 20) -> None:
        """Fill every target once, last pieces first, as a sink must accept any order."""
        done: set[int] = set()
        for target in placement.targets:
            if id(target.sink) in done:
                continue
            done.add(id(target.sink))
            data = self.data[self.tree.aliases.get(target.path, target.path)]
            _fill(target, data, piece_bytes)


def _fill(target: Target, data: bytes, piece_bytes: int) -> None:
    shown, sink, unit = show_path(target.path), target.sink, target.spec.itemsize
    assert len(data) == sink.nbytes, f"{shown}: {len(data)} bytes are stored, not {sink.nbytes}"
    sink.opened()
    lender = Lender()
    step = max(piece_bytes // unit, 1) * unit if unit else 1
    for start in reversed(range(0, len(data), step)):
        piece = data[start : start + step]
        call = f"{shown}: `copy_in` of {type(sink).__name__}"
        lender.lend(piece, call, partial(sink.copy_in, start))
    sink.written()


def store(state: object, *, providers: Providers, allow_pickle: bool = False) -> Stored:
    """Describe `state`, and copy all its bytes at once."""
    description = describe_tree(state, providers=providers, allow_pickle=allow_pickle)
    objects = [e for e in description.entries if isinstance(e, StateObject)]
    nodes = [e for e in description.entries if isinstance(e, Node)]
    data = {o.path: read_source(o.source) for o in objects if o.same_as is None}
    tree = StoredTree(
        [StoredObject(o.path, o.kind, o.spec, o.role, o.form) for o in objects],
        nodes,
        {o.path: data[o.path] for o in objects if o.kind is Kind.VALUE},
        {o.path: o.same_as for o in objects if o.same_as is not None},
        dict(description.providers_used),
    )
    return Stored(providers, description, tree, data)


def read_source(source: ByteSource) -> bytes:
    """Return all bytes of a source, by `copy_out`."""
    return read_piece(source, 0, source.nbytes)


def read_piece(source: ByteSource, start: int, length: int) -> bytes:
    """Return bytes `[start, start + length)` of a source, by `copy_out` into a lent buffer.

    Raises:
        AssertionError: The source keeps the buffer.
    """

    def use(out: memoryview) -> bytes:
        pending = source.copy_out(start, out)
        if pending is not None:
            pending.wait()
        return bytes(out)

    return Lender().lend(bytes(length), f"`copy_out` of {type(source).__name__}", use)


class StaticProviders:
    """A fixed list of provider instances, for tests of a provider."""

    def __init__(self, providers: Sequence[StateProvider]) -> None:
        self._providers = tuple(providers)

    def for_type(self, kind: type, /) -> StateProvider | None:
        """See `Providers.for_type`."""
        claims = [(_claim(p, kind), p) for p in self._providers]
        ranked = sorted(((c, p) for c, p in claims if c is not None), key=lambda pair: -pair[0])
        if not ranked:
            return None
        if len(ranked) > 1 and ranked[0][0] == ranked[1][0]:
            msg = (
                f"providers {ranked[0][1].name!r} and {ranked[1][1].name!r} both claim "
                f"{kind.__name__} with priority {ranked[0][0]}"
            )
            raise PluginError(msg)
        return ranked[0][1]

    def for_form(self, form: str, /) -> StateProvider:
        """See `Providers.for_form`."""
        for provider in self._providers:
            if form in provider.forms:
                return provider
        msg = f"no provider knows the form {form!r}; is the package that saved it installed?"
        raise PluginError(msg)

    def all(self) -> Sequence[StateProvider]:
        """See `Providers.all`."""
        return self._providers


def _claim(provider: StateProvider, kind: type) -> int | None:
    claim = provider.claims(kind)
    problem = breach_of_priority(claim, kind)
    if problem is not None:
        msg = f"provider {provider.name!r} {problem}; fix the provider, or uninstall it"
        raise PluginError(msg)
    return claim
