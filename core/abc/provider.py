"""The contract of state providers, and the records that cross it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.core.abc.plugin import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.core.abc.memory import ByteSink, ByteSource, MemoryKey
    from penstock.core.types import Kind, ObjectPath, Region, Role, TensorSpec


@dataclass(frozen=True, slots=True)
class StateObject:
    """One object as a provider describes it.

    Attributes:
        path: Where it stands.
        kind: Tensor, or a value frozen to bytes (then `spec` is `uint8` of its length).
        spec: Dtype and global shape.
        region: What of it this rank holds.
        role: Its purpose.
        form: Name of the leaf form a provider can rebuild (`"tensor"`, `"ndarray"`, `"json"`).
        source: Its bytes.
        same_as: Set by core when an earlier object has the same memory (tied weights).
    """

    path: ObjectPath
    kind: Kind
    spec: TensorSpec
    region: Region
    role: Role
    form: str
    source: ByteSource
    same_as: ObjectPath | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A container or composite in the tree: what `load` needs to build it again.

    Attributes:
        path: Where it stands; the root has `()`.
        form: `"dict"`, `"list"`, `"tuple"`, or a form that a provider declared.
        meta: JSON-able details (key types, class names).
    """

    path: ObjectPath
    form: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a checkpoint, as far as placing it needs to know (after renaming)."""

    path: ObjectPath
    kind: Kind
    spec: TensorSpec
    role: Role
    form: str


@dataclass(frozen=True, slots=True)
class Target:
    """Memory to be filled with a stored tensor. `path` is the object's path in the template."""

    path: ObjectPath
    spec: TensorSpec
    region: Region
    sink: ByteSink


@dataclass(slots=True)
class Placement:
    """What a provider wants restored. Nothing live changes before `finish`, but targets' memory.

    Attributes:
        targets: Memory to fill. Core compares each with the stored object: absent is missing,
            another kind, dtype or shape is a mismatch.
        values: Paths of value objects that were used (for the report and for `missing`).
        missing: Further paths that the template has and the checkpoint lacks.
        problems: Whole sentences on any other difference, each naming its path.
        finish: Called once after every target of the *whole* restore is filled and verified;
            assigns values, and returns the object that belongs in the tree at this place.
    """

    targets: list[Target] = field(default_factory=list)
    values: list[ObjectPath] = field(default_factory=list)
    missing: list[ObjectPath] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    finish: Callable[[], object] | None = None
    notes: dict[str, str] = field(default_factory=dict)
    """Facts for the report, e.g. `{"matched_by": "order"}`."""
    settle: list[Callable[[], object]] = field(default_factory=list)
    """Run after every `finish` of the whole restore (random state, so that nothing draws later)."""

    def absorb(self, other: Placement) -> None:
        """Take over everything of `other` but its `finish`."""
        self.targets += other.targets
        self.values += other.values
        self.missing += other.missing
        self.problems += other.problems
        self.notes.update(other.notes)
        self.settle += other.settle


class DescribeContext(ABC):
    """What core offers a provider while it describes."""

    allow_pickle: bool

    @abstractmethod
    def describe(
        self, value: object, path: ObjectPath, /, *, role: Role | None = None
    ) -> Iterator[StateObject | Node]:
        """Describe a child by whichever provider claims it; `role` overrides the leaves' roles.

        Raises:
            UnsupportedStateError: Nobody can store it; the message names the full path.
        """

    @abstractmethod
    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        """Names that modules of the tree give to this very tensor, best first; maybe none."""


class PlaceContext(ABC):
    """What core offers a provider while it plans a restore. Paths are the template's."""

    allow_pickle: bool

    @abstractmethod
    def place(self, value: object, path: ObjectPath, /) -> Placement:
        """Plan the restore of a child into `value`, by whichever provider claims it."""

    @abstractmethod
    def rebuild(self, path: ObjectPath, /, *, device: str | None = None) -> Placement:
        """Plan building what the checkpoint holds at `path` anew; `finish()` returns it.

        Tensors go to `device`, None: the CPU.
        """

    @abstractmethod
    def stored(self, path: ObjectPath, /) -> StoredObject | None:
        """The *selected* stored object at `path`, tied ones resolved; None if there is none."""

    @abstractmethod
    def node(self, path: ObjectPath, /) -> Node | None:
        """The stored container or composite at `path`, selected or not."""

    @abstractmethod
    def children(self, path: ObjectPath, /) -> Sequence[str]:
        """Next segments of what is *selected* below `path`, in stored order.

        That is: stored objects and empty containers.
        """

    @abstractmethod
    def value(self, path: ObjectPath, /) -> object:
        """The decoded value of a selected stored value object (a fresh one at each call).

        Raises:
            KeyError: There is none.
        """

    @abstractmethod
    def value_bytes(self, path: ObjectPath, /) -> bytes:
        """The stored bytes of a selected value object; for providers that decode a form.

        Raises:
            KeyError: There is none.
        """

    @abstractmethod
    def selected(self, path: ObjectPath, /) -> bool:
        """Whether an object at this template path is selected by include and exclude."""

    @abstractmethod
    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        """As `DescribeContext.parameter_names`, for the template."""


class StateProvider(ABC):
    """Turns live values of certain types into objects, and places restored bytes back.

    Attributes:
        name: Entry-point name.
        forms: Leaf and node forms that `rebuild` understands; unique among all providers.
    """

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    version: ClassVar[int] = 1
    forms: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def claims(self, kind: type, /) -> int | None:
        """Priority with which this provider claims values of that type; None: not at all.

        Ours use 10 (anything with `state_dict`) to 50 (exact types); a tie is an error.
        """

    @abstractmethod
    def describe(
        self, value: Any, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        """Describe `value` as objects and nodes at and below `path`, without copying tensors.

        A node comes before its children. Plain Python data is frozen to bytes here and now.

        Raises:
            UnsupportedStateError: Something in it cannot be stored; names the path.
        """

    @abstractmethod
    def place(self, value: Any, path: ObjectPath, /, *, context: PlaceContext) -> Placement:
        """Plan the in-place restore of `value` from the stored objects at and below `path`."""

    @abstractmethod
    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        """Plan building a value of one of `forms` with no template; `finish()` returns it."""

    def parameters(self, value: Any, /) -> Iterable[tuple[str, object]]:
        """`(name, tensor)` for every parameter of `value`, so that optimizers can name theirs."""
        del value
        return ()

    def claimed_memory(self, value: Any, /) -> Iterable[MemoryKey]:
        """Memory that only `value`'s own step changes (optimizers); core may defer just that."""
        del value
        return ()

    def unsteady_memory(self, value: Any, /) -> Iterable[tuple[str, int]]:
        """`(device, storage)` of memory that may change in forward; core never defers it."""
        del value
        return ()
