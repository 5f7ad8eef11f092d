"""The contract of state providers, and the records that they exchange with core.

Tested in `tests/integration/faults/test_broken_contracts.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from penstock.core.abc.plugin import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from penstock.core.abc.byte_sources import ByteSink, ByteSource, MemoryKey
    from penstock.core.types import Kind, ObjectPath, Region, Replica, Role, TensorSpec

T = TypeVar("T")


class StateObject(NamedTuple):  # a frozen dataclass takes three times as long, once for each object
    """One object as a provider describes it.

    Attributes:
        path: The place of the object in the tree.
        kind: Tensor, or a value serialized to bytes (then `spec` is `uint8` of its length).
        spec: Dtype and global shape.
        regions: The rectangles of the object that this rank holds, in the order of their row-major
            bytes in `source`. A whole object is one rectangle; the tuple is empty if this rank
            holds nothing.
        role: Purpose of the object in training.
        form: Name of a leaf form that a provider can rebuild (`"tensor"`, `"ndarray"`, `"json"`).
        source: The bytes of the object.
        same_as: Path of an earlier object with the same memory (tied weights). Core sets it, except
            for an empty shard: that has no memory, so the provider sets it if other ranks tie the
            object.
        replica: This rank's position among the ranks that hold these bytes. None if every rank
            that has the object holds all of it, with equal bytes.
    """

    path: ObjectPath
    kind: Kind
    spec: TensorSpec
    regions: tuple[Region, ...]
    role: Role
    form: str
    source: ByteSource
    same_as: ObjectPath | None = None
    replica: Replica | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A container or composite in the tree, with all that `load` needs to rebuild it.

    Attributes:
        path: The node's place in the tree; the root has `()`.
        form: `"dict"`, `"list"`, `"tuple"`, or a form that a provider declared.
        meta: JSON-able details (key types, class names).
    """

    path: ObjectPath
    form: str
    meta: dict[str, Any] = field(default_factory=dict)


def ranks_node(path: ObjectPath, count: int, /) -> Node:
    """Return the node above the per-rank objects of `count` ranks; child N has those of rank N."""
    return Node(path, "dict", {"ranks": count})


def ranks_of(node: Node | None, /) -> int | None:
    """Return how many ranks stored objects below `node`; None if its objects are not per rank."""
    count = None if node is None or node.form != "dict" else node.meta.get("ranks")
    return count if type(count) is int and count > 0 else None


class StoredObject(NamedTuple):  # as `StateObject`
    """One object of a checkpoint, under its path in the template."""

    path: ObjectPath
    kind: Kind
    spec: TensorSpec
    role: Role
    form: str


class Target(NamedTuple):  # as `StateObject`
    """Memory to be filled with a stored tensor, or with the part of it that this rank holds.

    Attributes:
        path: The object's path in the template.
        spec: Dtype and global shape.
        regions: The rectangles of the whole tensor that the memory holds, in the order in which the
            sink takes their row-major bytes. Empty if this rank holds none.
        sink: The memory.
    """

    path: ObjectPath
    spec: TensorSpec
    regions: tuple[Region, ...]
    sink: ByteSink


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between checkpoint and template, which prevents placement at and below a path.

    Attributes:
        path: Where the difference is.
        stored: A short phrase for what the checkpoint has (`"shape [3]"`).
        here: A short phrase for what the template has.
        sentences: Complete sentences for the error text, each with its path.
        skippable: Whether `strict=False` may leave the live object unchanged.
        advice: A remedy other than `strict=False`, as a clause such as "exclude='opt/**' keeps the
            options of the template"; may be empty.
    """

    path: ObjectPath
    stored: str
    here: str
    sentences: tuple[str, ...]
    skippable: bool = True
    advice: str = ""


@dataclass(slots=True)
class Placement:
    """A provider's plan for a restore. Before `finish` only the memory of targets changes.

    Attributes:
        targets: Memory to fill; an object has one or more targets. Core reports a target as missing
            if no stored object has its path, and as a mismatch if kind, dtype or shape differ.
        values: Paths of value objects that the plan uses (for the report and for `missing`).
        missing: Further paths that the template has and the checkpoint lacks.
        problems: Complete sentences about all other differences, each with its path.
        differences: Details of problems that `strict=False` may skip; added by `differ`.
        finish: Called once after every target of the *whole* restore is filled and verified.
            Assigns values and returns the object to put at this path of the tree.
    """

    targets: list[Target] = field(default_factory=list)
    values: list[ObjectPath] = field(default_factory=list)
    missing: list[ObjectPath] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    finish: Callable[[], object] | None = None
    notes: dict[str, str] = field(default_factory=dict)
    """Facts for the report, e.g. `{"matched_by": "order"}`."""
    numbered: list[ObjectPath] = field(default_factory=list)
    """Paths of optimizers that load all of their state by parameter number.

    Such a load is all or nothing: if `strict=False` skips a parameter, none of it is restored.
    """
    passed_over: list[ObjectPath] = field(default_factory=list)
    """Paths at and below which objects belong to other ranks.

    These objects are neither restored nor reported as unexpected.
    """
    tied: dict[ObjectPath, ObjectPath] = field(default_factory=dict)
    """Missing paths whose memory is filled from the path of a tied object; set by core."""
    replaces: bool = False
    """Whether `finish` returns a different object from the live one (a read-only array's copy).

    A tuple of the template cannot take the new object, so core refuses such a restore before it
    writes any memory. Not set for values.
    """
    settle: list[Callable[[], object]] = field(default_factory=list)
    """Called after every `finish` of the whole restore.

    They set random state, which a `finish` may change by drawing numbers.
    """

    def differ(self, difference: Difference) -> None:
        """Add a difference, and its sentences as problems; `strict=False` may skip both."""
        self.differences.append(difference)
        self.problems += difference.sentences

    def absorb(self, other: Placement) -> None:
        """Add everything of `other` except `finish`, `tied` and `replaces`."""
        self.targets += other.targets
        self.values += other.values
        self.missing += other.missing
        self.problems += other.problems
        self.differences += other.differences
        self.numbered += other.numbered
        self.passed_over += other.passed_over
        if other.notes:
            # The report has one entry for all optimizers: users must know if any was matched by
            # order.
            weaker = {"matched_by": "order"}.items() & self.notes.items()
            self.notes |= other.notes | dict(weaker)
        self.settle += other.settle


class DescribeContext(ABC):
    """The functions that a provider may call while it describes values.

    Attributes:
        allow_pickle: Whether values may be pickled.
        rank: The number of this rank among those that save together.
        world_size: The number of these ranks.
        role: The role of all objects of a `describe_all` call, if the caller sets one. A provider
            may ignore it: core replaces the objects that have another role, which takes time.
    """

    allow_pickle: bool
    rank: int = 0
    world_size: int = 1
    role: Role | None = None

    @abstractmethod
    def describe(
        self, value: object, path: ObjectPath, /, *, role: Role | None = None
    ) -> Iterator[StateObject | Node]:
        """Describe a child with the provider that claims it; `role` overrides the leaves' roles.

        Raises:
            UnsupportedStateError: No provider can store it; the message names the full path.
        """

    def describe_each(
        self, values: Sequence[object], paths: Sequence[ObjectPath], roles: Sequence[Role | None], /
    ) -> Sequence[Sequence[StateObject | Node]]:
        """Describe several children like `describe`; return each child's entries, in order.

        For thousands of tensors this is much faster than `describe`.

        Raises:
            UnsupportedStateError: As for `describe`.
        """
        children = zip(values, paths, roles, strict=True)
        return [tuple(self.describe(value, path, role=role)) for value, path, role in children]

    @abstractmethod
    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        """Return the names that modules of the tree give this tensor, preferred name first."""

    def of_this_rank(self, path: ObjectPath, /) -> None:
        """Declare that each rank has its own objects at and below `path`.

        Ranks that differ only there still count as equal, and share the writing of other objects.
        The objects there need a `replica`: without one they would count as equal on all ranks.
        """
        del path

    def recall(self, place: Hashable, basis: object, make: Callable[[], T], /) -> T:
        """Return the cached result of `make` from the last save, or call `make` if `basis` changed.

        Use this for paths, nodes and other results that stay the same in each save of a job. Core
        keeps `basis` and the result until the next save, so neither may be changed later, or refer
        to state.

        Args:
            place: Identifies the result and its part of the tree.
            basis: All other inputs that determine the result: names, shapes, numbers.
            make: Computes the result.
        """
        del place, basis
        return make()


class PlaceContext(ABC):
    """The functions that a provider may call while it plans a restore. Paths are the template's.

    Attributes:
        allow_pickle: Whether stored pickles may be loaded.
        named_optimizers: Whether `rebuild` names the parameters of an optimizer, instead of
            numbering them.
        rank: The number of this rank among those that restore together.
        world_size: The number of these ranks.
    """

    allow_pickle: bool
    named_optimizers: bool = False
    rank: int = 0
    world_size: int = 1

    @abstractmethod
    def takes(self, spec: TensorSpec, stored: TensorSpec, /) -> bool:
        """Return whether core can fill memory of `spec` from a tensor of the spec `stored`.

        True if the specs are equal, or if `restore(cast=True)` allows the float conversion. A
        target keeps the dtype of its memory.
        """

    @abstractmethod
    def place(self, value: object, path: ObjectPath, /) -> Placement:
        """Plan the restore of a child into `value` with the provider that claims it."""

    @abstractmethod
    def rebuild(self, path: ObjectPath, /, *, device: str | None = None) -> Placement:
        """Plan how to build a new object from the state at `path`; `finish()` returns the object.

        Tensors go to `device`; None means the CPU.
        """

    @abstractmethod
    def stored(self, path: ObjectPath, /) -> StoredObject | None:
        """Return the *selected* stored object at `path` or None; resolves tied objects."""

    @abstractmethod
    def node(self, path: ObjectPath, /) -> Node | None:
        """Return the stored container or composite at `path` or None; ignores the selection."""

    @abstractmethod
    def nodes(self, path: ObjectPath, /) -> Sequence[Node]:
        """Return the stored nodes directly below `path`, in stored order; ignores the selection."""

    @abstractmethod
    def provider_version(self, name: str, /) -> int | None:
        """Return the checkpoint's version of provider `name`; None if that provider wrote nothing.

        Core refuses a checkpoint with a later version than that of the installed provider.
        """

    @abstractmethod
    def children(self, path: ObjectPath, /) -> Sequence[str]:
        """Return the next segments of all *selected* paths below `path`, in stored order.

        The paths are those of stored objects and of empty containers.
        """

    @abstractmethod
    def value(self, path: ObjectPath, /) -> object:
        """Return the decoded value of a selected value object; each call decodes a new value.

        Raises:
            KeyError: There is no such object.
        """

    @abstractmethod
    def value_bytes(self, path: ObjectPath, /) -> bytes:
        """Return the stored bytes of a selected value object, for a provider's own decoder.

        Raises:
            KeyError: There is no such object.
        """

    @abstractmethod
    def selected(self, path: ObjectPath, /) -> bool:
        """Return whether `include` and `exclude` select an object at this path of the template."""

    @abstractmethod
    def whole(self, path: ObjectPath, /) -> PlaceContext:
        """Return a context in which everything stored at and below `path` is selected.

        This lets a provider see objects that the selection leaves out. Plans from this context are
        not part of the restore; plan the restore with the context that `place` got.
        """

    @abstractmethod
    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        """Return the names that modules of the template give this tensor, preferred name first."""

    def tied_names(self, tensor: object, /) -> Sequence[str]:
        """Return the other names that this tensor has in the checkpoint, where they are tied.

        In the template these names may belong to copies, such as one in each pipeline stage.
        """
        del tensor
        return ()


class StateProvider(ABC):
    """Turns live values of certain types into objects, and places restored bytes back.

    Attributes:
        name: Entry-point name.
        version: Version of the provider's stored state. Each checkpoint records it; `place` and
            `rebuild` read it from `PlaceContext.provider_version`. Core refuses to give state of a
            later version to an earlier version of the provider.
        forms: Leaf and node forms that `rebuild` understands; unique among all providers.
        describes_last: Whether core describes its values after all other values in the dicts, lists
            and tuples of the tree, because describing the others may change them (random state).
    """

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    version: ClassVar[int] = 1
    forms: ClassVar[tuple[str, ...]] = ()
    describes_last: ClassVar[bool] = False

    @abstractmethod
    def claims(self, kind: type, /) -> int | None:
        """Return this provider's priority for values of `kind`; None if it does not claim them.

        Penstock's providers use 10 (anything with `state_dict`) to 50 (exact types). If several
        providers return the highest priority, Penstock's own wins, with a warning; if none of
        them is Penstock's, this is an error.
        """

    @abstractmethod
    def describe(
        self, value: Any, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterable[StateObject | Node]:
        """Describe `value` as objects and nodes at and below `path`, without copying tensors.

        A node comes before its children. This call serializes plain Python data. For a value that
        is one object, a one-element tuple is the fastest result.

        Raises:
            UnsupportedStateError: Part of the value cannot be stored; names the path.
        """

    def describe_all(
        self, values: Sequence[Any], paths: Sequence[ObjectPath], /, *, context: DescribeContext
    ) -> Iterable[StateObject | Node]:
        """Describe values of one type, in order, with the same result as `describe` for each.

        An override makes containers with up to fifty thousand children faster. Core calls it only
        if no subclass overrides `describe` alone, and if the provider overrides none of
        `claimed_memory`, `unsteady_memory` and `left_out`. A list with one object for each value is
        the fastest result.

        Raises:
            UnsupportedStateError: Part of a value cannot be stored; names the path.
        """
        for value, path in zip(values, paths, strict=True):
            yield from self.describe(value, path, context=context)

    @abstractmethod
    def place(self, value: Any, path: ObjectPath, /, *, context: PlaceContext) -> Placement:
        """Plan the in-place restore of `value` from the stored objects at and below `path`."""

    def place_all(
        self, values: Sequence[Any], paths: Sequence[ObjectPath], /, *, context: PlaceContext
    ) -> list[Target] | None:
        """Plan the restore of values of one type, with the same result as `place` for each.

        Override this only if every value is memory to fill in place. It makes containers with up to
        fifty thousand children faster. Core calls it only if no subclass overrides `place` alone,
        and if `on_other_ranks` returns None for the type.

        Returns:
            The targets of the selected values, in order; None if core must call `place` for each.
        """
        del values, paths, context
        return None

    def place_dict(
        self, value: dict[Any, Any], node: Node, /, *, context: PlaceContext
    ) -> Placement | None:
        """Plan the restore of a stored composite, `node`, into a plain dict of the template.

        The dict may have a different layout from the stored objects, such as numbers as keys.

        Returns:
            The plan; its `finish` returns `value`. None if core must restore each item from the
            object at its path.
        """
        del value, node, context
        return None

    @abstractmethod
    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        """Plan how to build a value of one of `forms` without a template; `finish()` returns it."""

    def on_other_ranks(self, kind: type, /) -> Literal["error", "keep"] | None:
        """Return how to restore a type whose values always differ between ranks.

        Core stores every rank's value of such a type, like a `penstock.PerRank`.

        Returns:
            None if values must be equal on all ranks. Otherwise the action of a restore on another
            number of ranks: raise an error, or keep the live value with a warning.
        """
        del kind
        return None

    def parameters(self, value: Any, /) -> Iterable[tuple[str, object]]:
        """Return `(name, tensor)` for every parameter of `value`; optimizers use these names."""
        del value
        return ()

    def claimed_memory(self, value: Any, /) -> Iterable[MemoryKey]:
        """Return memory that only `value.step` changes (optimizers); core may defer its capture."""
        del value
        return ()

    def claimed_values(self, value: Any, /) -> Sequence[object] | None:
        """Return the values of the tree whose memory makes up all of `claimed_memory`.

        This is faster than `claimed_memory`, since core already knows their memory.

        Returns:
            The same objects that `describe` passed to `describe_each`. If the result is None, or
            has an object that was not passed to `describe_each`, core calls `claimed_memory`.
        """
        del value
        return None

    def unsteady_memory(self, value: Any, /) -> Iterable[tuple[str, int]]:
        """Return `(device, storage)` of memory that the forward pass may change.

        Core never defers this memory.
        """
        del value
        return ()

    def left_out(self, value: Any, /) -> Iterable[tuple[str, object]]:
        """Return `(name, object)` for objects that belong to `value` but are not stored with it.

        Examples are the parameters of an optimizer, or the optimizer of an engine that is stored as
        a module. Core warns of such an object if the tree has neither the object nor its memory.
        """
        del value
        return ()


def describes_together(kind: type[StateProvider], /) -> bool:
    """Return whether `describe_all` is faster than `describe` for providers of this class."""
    return _has_faster(kind, "describe_all", than="describe")


def places_together(kind: type[StateProvider], /) -> bool:
    """Return whether `place_all` is faster than `place` for providers of this class."""
    return _has_faster(kind, "place_all", than="place")


def claims_by_values(kind: type[StateProvider], /) -> bool:
    """Return whether `claimed_values` is faster than `claimed_memory` for this class."""
    return _has_faster(kind, "claimed_values", than="claimed_memory")


def _has_faster(kind: type[StateProvider], method: str, *, than: str) -> bool:
    # False if a subclass overrides only the slower method: its override would not be called.
    for base in kind.__mro__:
        if method in vars(base):
            return base is not StateProvider
        if than in vars(base):
            return False
    return False


def breach_of_priority(claim: object, kind: type, /) -> str | None:
    """Return a clause that explains why `claims(kind)` may not return `claim`; None if it may."""
    # `isinstance` would accept True, which means "yes", as the priority 1.
    if claim is None or type(claim) is int:
        return None
    return (
        f"returned {claim!r} of type {type(claim).__name__} from claims({kind.__qualname__}): it "
        "must return an int, the priority, or None"
    )
