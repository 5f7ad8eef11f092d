"""A checkpoint in memory: what core does with providers, without files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.abc import Node, StateObject, StoredObject
from penstock.core.describe import Description, describe_tree
from penstock.core.place import StoredTree, place_tree, rebuild_tree
from penstock.core.select import Rename, Selection
from penstock.core.testing.lending import Lender
from penstock.core.types import Kind, show_path

if TYPE_CHECKING:
    from penstock.core.abc import ByteSource, Placement, Target
    from penstock.core.select import Patterns, RenameSpec
    from penstock.core.tree import Providers
    from penstock.core.types import ObjectPath

PIECE_BYTES = 48  # small, so that every sink is filled in several pieces


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
        assert not placement.missing, f"missing: {placement.missing}"
        assert not placement.problems, f"problems: {placement.problems}"
        self.complete(placement, piece_bytes=piece_bytes)
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
        assert not placement.problems, f"problems: {placement.problems}"
        return self.complete(placement)

    def complete(self, placement: Placement, *, piece_bytes: int = 1 << 20) -> Any:
        """Fill all targets, and finish; what `finish` gave."""
        self.fill(placement, piece_bytes=piece_bytes)
        assert placement.finish is not None, "the plan of a whole tree has a finish"
        return placement.finish()

    def fill(self, placement: Placement, *, piece_bytes: int = 1 << 20) -> None:
        """Fill every target once, last pieces first: any order has to do."""
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
    return read_piece(source, 0, source.nbytes)


def read_piece(source: ByteSource, start: int, length: int) -> bytes:
    """Bytes `[start, start + length)` of a source, by `copy_out` into a buffer that is lent.

    Raises:
        AssertionError: It keeps the buffer.
    """

    def use(out: memoryview) -> bytes:
        pending = source.copy_out(start, out)
        if pending is not None:
            pending.wait()
        return bytes(out)

    return Lender().lend(bytes(length), f"`copy_out` of {type(source).__name__}", use)
