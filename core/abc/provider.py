"""The contract of state providers, and the records that cross it.

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
        kind: Tensor, or a value frozen to bytes (then `spec` is `uint8` of its length).
        spec: Dtype and global shape.
        regions: The rectangles of the object that this rank holds: the source has the bytes of
            each, row-major, one rectangle after the other. One rectangle for the whole object;
            empty if this rank holds nothing.
        role: Purpose of the object in training.
        form: Name of a leaf form that a provider can rebuild (`"tensor"`, `"ndarray"`, `"json"`).
        source: The bytes of the object.
        same_as: Set by core when an earlier object has the same memory (tied weights). A provider
            sets it for a piece without elements, which has no memory, if other ranks tie it.
        replica: The place of this rank among those that hold these bytes. None: every rank that has
            the object holds all of it, with equal bytes.
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
        path: Its place in the tree; the root has `()`.
        form: `"dict"`, `"list"`, `"tuple"`, or a form that a provider declared.
        meta: JSON-able details (key types, class names).
    """

    path: ObjectPath
    form: str
    meta: dict[str, Any] = field(default_factory=dict)


def ranks_node(path: ObjectPath, count: int, /) -> Node:
    """Return the node for objects of each of `count` ranks, each rank's below its number."""
    return Node(path, "dict", {"ranks": count})


def ranks_of(node: Node | None, /) -> int | None:
    """Return how many ranks have stored their own objects there; None for other nodes."""
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
        regions: The rectangles of the whole tensor that the memory holds: the sink takes the bytes
            of each, row-major, one rectangle after the other. Empty where this rank holds none.
        sink: The memory.
    """

    path: ObjectPath
    spec: TensorSpec
    regions: tuple[Region, ...]
    sink: ByteSink


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between checkpoint and template at one path; nothing at or below it is placed.

    Attributes:
        path: Where the difference is.
        stored: What the checkpoint has, in a few words (`"shape [3]"`).
        here: What the template has, in a few words.
        sentences: The difference as whole sentences for an error, each naming its path.
        skippable: Whether `strict=False` may leave the live object unchanged.
        advice: What else to do about the difference, as the end of a sentence; may be empty.
    """

    path: ObjectPath
    stored: str
    here: str
    sentences: tuple[str, ...]
    skippable: bool = True
    advice: str = ""


@dataclass(slots=True)
class Placement:
    """A provider's plan of a restore. Before `finish` only the memory of targets changes.

    Attributes:
        targets: Memory to fill; an object has one target or several. Core compares each with the
            stored object: without one it is missing; another kind, dtype or shape is a mismatch.
        values: Paths of value objects that were used (for the report and for `missing`).
        missing: Further paths that the template has and the checkpoint lacks.
        problems: Whole sentences on any other difference, each naming its path.
        differences: The problems that `strict=False` may skip, in detail; added by `differ`.
        finish: Called once after every target of the *whole* restore is filled and verified;
            assigns values, and returns the object that belongs in the tree at this place.
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
    """Optimizers that load all of their state by the numbers of parameters.

    No part of that state can be left out, so none is restored if `strict=False` skips a parameter.
    """
    passed_over: list[ObjectPath] = field(default_factory=list)
    """Paths at and below which objects belong to other ranks, and are not restored.

    These objects are not reported as unexpected.
    """
    tied: dict[ObjectPath, ObjectPath] = field(default_factory=dict)
    """Missing paths whose memory is still filled, from the other path; set by core."""
    replaces: bool = False
    """Whether `finish` returns another object than the live one (a read-only array's copy).

    A tuple cannot take another object; core detects that before it writes anything. Not set for
    values.
    """
    settle: list[Callable[[], object]] = field(default_factory=list)
    """Called after all `finish` of the whole restore: sets random state, so nothing draws later."""

    def differ(self, difference: Difference) -> None:
        """Add a difference; its sentences are problems unless `strict=False` skips it."""
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
            # The report has one fact for all optimizers: users must know if one was matched by
            # order.
            weaker = {"matched_by": "order"}.items() & self.notes.items()
            self.notes |= other.notes | dict(weaker)
        self.settle += other.settle


class DescribeContext(ABC):
    """The calls that a provider may make while it describes.

    Attributes:
        allow_pickle: Whether values may be pickled.
        rank: The number of this rank among those that save together.
        world_size: The number of these ranks.
        role: The role of all objects of a `describe_all` call, if the caller gives one. An object
            that has it need not be created again.
    """

    allow_pickle: bool
    rank: int = 0
    world_size: int = 1
    role: Role | None = None

    @abstractmethod
    def describe(
        self, value: object, path: ObjectPath, /, *, role: Role | None = None
    ) -> Iterator[StateObject | Node]:
        """Describe a child by the provider that claims it; `role` overrides the leaves' roles.

        Raises:
            UnsupportedStateError: No provider can store it; the message names the full path.
        """

    def describe_each(
        self, values: Sequence[object], paths: Sequence[ObjectPath], roles: Sequence[Role | None], /
    ) -> Sequence[Sequence[StateObject | Node]]:
        """Describe several children as `describe` does; return the entries of each, in order.

        For thousands of tensors this takes a fraction of the time.

        Raises:
            UnsupportedStateError: As for `describe`.
        """
        children = zip(values, paths, roles, strict=True)
        return [tuple(self.describe(value, path, role=role)) for value, path, role in children]

    @abstractmethod
    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        """Return the names that modules of the tree give to this tensor object, best first."""

    def of_this_rank(self, path: ObjectPath, /) -> None:
        """Declare that at and below `path` each rank has its own objects, which others may lack.

        Ranks that differ only there still count as equal, and share the writing of the rest.
        The objects there need a `replica`: without one they would count as equal on all ranks.
        """
        del path

    def recall(self, place: Hashable, basis: object, make: Callable[[], T], /) -> T:
        """Return the last save's result of `make` if its basis was equal; else call `make`.

        For paths, nodes and the like, which are the same in each save of a job. Core keeps basis
        and result until the next save: neither may change, or hold state.

        Args:
            place: Identifies the result, and its part of the tree.
            basis: All that determines the result, besides `place`: names, shapes, numbers.
            make: Makes the result.
        """
        del place, basis
        return make()


class PlaceContext(ABC):
    """The calls that a provider may make while it plans a restore. Paths are the template's.

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
        """Return whether core fills memory of `spec` with a tensor of the spec `stored`.

        It does if they are equal, or if `restore(cast=True)` lets it convert floats. A target keeps
        the dtype of its memory.
        """

    @abstractmethod
    def place(self, value: object, path: ObjectPath, /) -> Placement:
        """Plan the restore of a child into `value`, by the provider that claims it."""

    @abstractmethod
    def rebuild(self, path: ObjectPath, /, *, device: str | None = None) -> Placement:
        """Plan building a new object from what is stored at `path`; `finish()` returns it.

        Tensors go to `device`; None means the CPU.
        """

    @abstractmethod
    def stored(self, path: ObjectPath, /) -> StoredObject | None:
        """Return the *selected* stored object at `path`, tied ones resolved; None without one."""

    @abstractmethod
    def node(self, path: ObjectPath, /) -> Node | None:
        """Return the stored container or composite at `path`, selected or not."""

    @abstractmethod
    def nodes(self, path: ObjectPath, /) -> Sequence[Node]:
        """Return the stored nodes directly below `path`, selected or not, in stored order."""

    @abstractmethod
    def provider_version(self, name: str, /) -> int | None:
        """Return the version of provider `name` that wrote the checkpoint; None if none did.

        Never above the version of the installed provider: core refuses such a checkpoint earlier.
        """

    @abstractmethod
    def children(self, path: ObjectPath, /) -> Sequence[str]:
        """Return the next segments of all *selected* paths below `path`, in stored order.

        These lead to stored objects and to empty containers.
        """

    @abstractmethod
    def value(self, path: ObjectPath, /) -> object:
        """Return the decoded value of a selected stored value object, a new one at each call.

        Raises:
            KeyError: There is no such object.
        """

    @abstractmethod
    def value_bytes(self, path: ObjectPath, /) -> bytes:
        """Return the stored bytes of a selected value object, for providers that decode a form.

        Raises:
            KeyError: There is no such object.
        """

    @abstractmethod
    def selected(self, path: ObjectPath, /) -> bool:
        """Return whether `include` and `exclude` select an object at this path of the template."""

    @abstractmethod
    def whole(self, path: ObjectPath, /) -> PlaceContext:
        """Return a context in which everything stored at and below `path` is selected.

        For a provider that must know what the selection leaves out. Plans of this context are not
        part of the restore; plan objects with the context that `place` got.
        """

    @abstractmethod
    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        """Return the names that modules of the template give to this tensor object, best first."""

    def tied_names(self, tensor: object, /) -> Sequence[str]:
        """Return the names that the checkpoint has tied to this tensor object.

        The template may hold them separately: each stage of a pipeline has a copy of tied weights.
        """
        del tensor
        return ()


class StateProvider(ABC):
    """Turns live values of certain types into objects, and places restored bytes back.

    Attributes:
        name: Entry-point name.
        version: Version of what the provider stores. Recorded with each checkpoint; `place` and
            `rebuild` get it from `PlaceContext.provider_version`. An earlier version never gets
            state that a later one has stored.
        forms: Leaf and node forms that `rebuild` understands; unique among all providers.
        describes_last: Whether its values are described after all other values in dicts, lists and
            tuples of the tree, because describing the others may change them (random state).
    """

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    version: ClassVar[int] = 1
    forms: ClassVar[tuple[str, ...]] = ()
    describes_last: ClassVar[bool] = False

    @abstractmethod
    def claims(self, kind: type, /) -> int | None:
        """Return the priority with which this provider claims values of `kind`; None for no claim.

        Providers of Penstock use 10 (anything with `state_dict`) to 50 (exact types). A tie is an
        error.
        """

    @abstractmethod
    def describe(
        self, value: Any, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterable[StateObject | Node]:
        """Describe `value` as objects and nodes at and below `path`, without copying tensors.

        A node comes before its children. This call freezes plain Python data to bytes. For a value
        that is one object, a tuple of that object is the fastest result.

        Raises:
            UnsupportedStateError: Something in it cannot be stored; names the path.
        """

    def describe_all(
        self, values: Sequence[Any], paths: Sequence[ObjectPath], /, *, context: DescribeContext
    ) -> Iterable[StateObject | Node]:
        """Describe values of one type, each at its path, in order, as `describe` does.

        Core calls it for the children of a container (there may be fifty thousand) if the class
        that has `describe`, or a subclass of it, overrides this, and none of `claimed_memory`,
        `unsteady_memory` and `left_out`. A list with one object for each value is the fastest
        result.

        Raises:
            UnsupportedStateError: Something in them cannot be stored; names the path.
        """
        for value, path in zip(values, paths, strict=True):
            yield from self.describe(value, path, context=context)

    @abstractmethod
    def place(self, value: Any, path: ObjectPath, /, *, context: PlaceContext) -> Placement:
        """Plan the in-place restore of `value` from the stored objects at and below `path`."""

    def place_all(
        self, values: Sequence[Any], paths: Sequence[ObjectPath], /, *, context: PlaceContext
    ) -> list[Target] | None:
        """Plan the restore of values of one type, each at its path, as `place` does.

        Only for values that are memory to fill in place: the result is the targets of the selected
        values, in order. Core calls it for the children of a container (there may be fifty
        thousand) if the class that has `place`, or a subclass of it, overrides this, and the values
        do not always differ between ranks.

        Returns:
            The targets; None: core calls `place` for each value.
        """
        del values, paths, context
        return None

    def place_dict(
        self, value: dict[Any, Any], node: Node, /, *, context: PlaceContext
    ) -> Placement | None:
        """Plan the restore of what `rebuild` would build from `node` into a dict of the template.

        The dict may have another layout than the stored objects, such as numbers as keys.

        Returns:
            The plan; its `finish` returns `value`. None: each item of the dict is restored from
            the object at its path.
        """
        del value, node, context
        return None

    @abstractmethod
    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        """Plan building a value of one of `forms` with no template; `finish()` returns it."""

    def on_other_ranks(self, kind: type, /) -> Literal["error", "keep"] | None:
        """Return whether values of a claimed type always differ between ranks.

        Core then stores the value of each rank, like a `penstock.PerRank`.

        Returns:
            None if they do not, and must be equal on all ranks. Otherwise the action of a restore
            on another number of ranks: raise an error, or keep the live value with a warning.
        """
        del kind
        return None

    def parameters(self, value: Any, /) -> Iterable[tuple[str, object]]:
        """Return `(name, tensor)` for every parameter of `value`; optimizers use these names."""
        del value
        return ()

    def claimed_memory(self, value: Any, /) -> Iterable[MemoryKey]:
        """Return memory that only `value`'s own step changes (optimizers); core may defer it."""
        del value
        return ()

    def claimed_values(self, value: Any, /) -> Sequence[object] | None:
        """Return the values of the tree whose memory makes up all of `claimed_memory`.

        Core has just described them and knows their memory, so this takes a fraction of the time.

        Returns:
            The same objects that `describe` gave to `describe_each`. None: core calls
            `claimed_memory`, as it also does if one of them was not given to `describe_each`.
        """
        del value
        return None

    def unsteady_memory(self, value: Any, /) -> Iterable[tuple[str, int]]:
        """Return `(device, storage)` of memory that may change in forward; never deferred."""
        del value
        return ()

    def left_out(self, value: Any, /) -> Iterable[tuple[str, object]]:
        """Return `(name, object)` of objects that belong to `value` and are not stored with it.

        Examples: the parameters of an optimizer; the optimizer of an engine that is stored as a
        module. Core warns of objects that are not in the tree either, and of tensors whose memory
        no object of the tree has.
        """
        del value
        return ()


def describes_together(kind: type[StateProvider], /) -> bool:
    """Return whether providers of this class describe several values faster by `describe_all`."""
    return _has_faster(kind, "describe_all", than="describe")


def places_together(kind: type[StateProvider], /) -> bool:
    """Return whether providers of this class place several values faster by `place_all`."""
    return _has_faster(kind, "place_all", than="place")


def claims_by_values(kind: type[StateProvider], /) -> bool:
    """Return whether providers of this class claim memory faster by `claimed_values`."""
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
    """Return how a result of `claims(kind)` is wrong, as a clause; None if it is not."""
    # `isinstance` would accept True, which means "yes", as the priority 1.
    if claim is None or type(claim) is int:
        return None
    return (
        f"returned {claim!r} of type {type(claim).__name__} from claims({kind.__qualname__}): it "
        "must return an int, the priority, or None"
    )
