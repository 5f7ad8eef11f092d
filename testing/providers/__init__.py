"""The conformance suite of state providers, as plain functions for any test.

`store` makes a `Stored`: a checkpoint in memory that uses providers as core does.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.core.tree.select import Selection
from penstock.core.tree.stored_tree import StoredTree
from penstock.core.types import Kind
from penstock.testing.expectations import finding
from penstock.testing.providers.promises import (
    check_source,
    claims_are_priorities,
    declarations_are_sane,
    describing_after_a_change_sees_it,
    describing_copies_no_tensor,
    description_is_whole,
    description_repeats,
    dtypes_that_numpy_lacks_come_back,
    each_object_is_restored_alone,
    each_object_that_is_not_there_is_missing,
    targets_together_are_as_each,
    values_together_are_as_each,
)
from penstock.testing.stored import PIECE_BYTES, Stored, read_source, store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.tree.containers import Providers
    from penstock.core.tree.select import Patterns

__all__ = ["PIECE_BYTES", "Stored", "check_provider", "check_source", "read_source", "store"]


def check_provider(
    make: Callable[[], object],
    change: Callable[[Any], object],
    equal: Callable[[Any, Any], bool],
    *,
    providers: Providers,
    loaded: Callable[[Any, Any], bool] | None = None,
    loads: type | None = None,
    copies: bool = False,
    optional: Patterns = (),
) -> None:
    """Check everything that core relies on, for one kind of value.

    Args:
        make: Returns a new value, always with the same state.
        change: Changes a value in place, like training, or returns a changed value of its type.
        equal: Returns whether two values have the same state, bit for bit.
        providers: All providers needed, including the one under test.
        loaded: Returns whether the result of a `load` without a template has the state of a given
            value; None accepts any result.
        loads: The exact type of the result of `load`; None accepts the type of the value, a base
            class of that type, or a dict.
        copies: Whether the value itself only gives out copies of its tensors, so that no provider
            can describe the live tensors.
        optional: Patterns of objects that a checkpoint may lack without an error, such as options
            that older versions did not store. The value's path is `part`, so a pattern is, for
            example, `"part/options"`.

    Raises:
        AssertionError: The provider breaks the contract; the message says how.
    """
    values = _Values(make, change, equal, providers)
    value = make()
    with _checking("the provider's declarations"):
        claims_are_priorities(value, providers)
        declarations_are_sane(value, providers)
    with _checking("its description"):
        stored = store({"part": value}, providers=providers)
        description_is_whole(stored)
        description_repeats(stored, {"part": value})
        # The comparison above misses a change that both descriptions already show.
        assert values.equal(value, make()), "describing changes the value"
        values_together_are_as_each(make, providers)
        if not copies:
            describing_copies_no_tensor(value, providers)
    with _checking("a restore into a changed value"):
        _restores(stored, values, value)
    with _checking("a restore into a fresh value"):
        fresh = {"part": make()}
        stored.restore(fresh)
        targets_together_are_as_each(make, providers)
        assert values.equal(fresh["part"], value), "restored into a fresh target, but not equal"
    with _checking("a load without a template"):
        _loads(stored, value, loaded, loads)
    with _checking("a load without a template, of a changed value"):
        # A field that `rebuild` forgets has the default of a new value: only a change shows it.
        changed = values.changed()
        _loads(store({"part": changed}, providers=providers), changed, loaded, loads)
    with _checking("a restore that does not fit, or lacks objects"):
        _mismatch_is_said(stored, make)
        empty = replace(stored, tree=StoredTree([]), data={})
        placement = empty.plan({"part": make()})
        assert placement.missing or placement.problems, "an empty checkpoint is not noticed"
    with _checking("descriptions before and after a change"):
        describing_after_a_change_sees_it(make, values.change, values.equal, providers)
    with _checking("a restore of single objects"):
        each_object_is_restored_alone(stored, values.changed)
    with _checking("a restore that lacks single objects"):
        each_object_that_is_not_there_is_missing(stored, make, Selection(optional, None))
    with _checking("tensors of other dtypes"):
        dtypes_that_numpy_lacks_come_back(make, providers)


@dataclass(frozen=True)
class _Values:
    """The functions that the provider's author passed; checks each of their results."""

    make: Callable[[], object]
    _change: Callable[[Any], object]
    _equal: Callable[[Any, Any], bool]
    providers: Providers

    def change(self, value: Any) -> object:
        """Call `change` as `check_provider` documents it; None means changed in place."""
        assert callable(self._change), (
            f"`change` is a {type(self._change).__name__}: pass a function of a value"
        )
        new = self._change(value)
        assert new is None or type(new) is type(value), (
            f"`change` returned a {type(new).__name__} for a {type(value).__name__}: return the "
            "changed value, or None if it was changed in place"
        )
        return new

    def changed(self) -> Any:
        value = self.make()
        new = self.change(value)
        return value if new is None else new

    def equal(self, one: Any, other: Any) -> bool:
        return _yes_or_no(self._equal, "equal", one, other)


def _yes_or_no(ask: Callable[[Any, Any], bool], name: str, one: Any, other: Any) -> bool:
    answer: Any = ask(one, other)
    # numpy and torch have their own bools. Any other result may be true by accident: an array of
    # comparisons, or a method that was not called.
    scalar = "bool" in str(getattr(answer, "dtype", "")) and not getattr(answer, "shape", None)
    assert isinstance(answer, bool) or scalar, (
        f"`{name}` returned a {type(answer).__name__}: return True or False"
    )
    return bool(answer)


@contextmanager
def _checking(what: str) -> Iterator[None]:
    try:
        with finding(what):
            yield
    except AssertionError as error:
        error.add_note(f"while checking {what}")
        raise


def _restores(stored: Stored, values: _Values, value: Any) -> None:
    providers = values.providers
    target = {"part": values.changed()}
    same = values.equal(target["part"], value)
    assert not same, "`change` changes nothing: the check would prove nothing"
    before = store(target, providers=providers).data
    assert not stored.plan(target, include="no-such-part").targets, (
        "place plans targets for unselected objects"
    )
    assert store(target, providers=providers).data == before, (
        "a plan without selected objects changed the target"
    )
    placement = stored.plan(target)
    assert not placement.missing, f"place reports {placement.missing} as missing"
    assert not placement.problems, f"place has problems: {placement.problems}"
    assert store(target, providers=providers).data == before, "planning changed the target"
    stored.complete(placement, piece_bytes=PIECE_BYTES)
    got = type(target["part"])
    assert got is type(value), f"`finish` put a {got.__name__} into the tree"
    assert values.equal(target["part"], value), "restored into a changed target, but not equal"


def _loads(
    stored: Stored, value: object, loaded: Callable[[Any, Any], bool] | None, loads: type | None
) -> None:
    tree = stored.load()
    assert "part" in tree, "load gives nothing"
    part = tree["part"]
    got, kind = type(part).__name__, type(value)
    if loads is not None:
        assert type(part) is loads, f"load gives a {got}, not a {loads.__name__}"
    else:
        # A value that only the user's code can make may come as a dict: the user passes the dict to
        # `load_state_dict`.
        fits = type(part) in (*kind.__mro__[:-1], dict)
        assert fits, (
            f"load gives a {got} for a {kind.__name__}: `rebuild` must return that type, a base "
            "class of it, or a dict; pass any other type as `loads`"
        )
    if loaded is not None:
        assert _yes_or_no(loaded, "loaded", part, value), (
            "load gives a state that was not stored: `rebuild` must put back all that `describe` "
            "yields (a field that it forgets keeps the default of a new value)"
        )


def _mismatch_is_said(stored: Stored, make: Callable[[], object]) -> None:
    """Check that a plan for an object stored in another shape has no sink of the wrong size."""
    for path in stored.data:
        objects = [
            o._replace(spec=replace(o.spec, shape=(*o.spec.shape, 3)))
            if o.path == path and o.kind is Kind.TENSOR
            else o
            for o in stored.tree.objects
        ]
        if objects == stored.tree.objects:
            continue
        changed = replace(stored, tree=replace(stored.tree, objects=objects))
        for target in changed.plan({"part": make()}).targets:
            nbytes = sum(region.numel for region in target.regions) * target.spec.itemsize
            assert target.sink.nbytes == nbytes, f"{target.path}: sink and spec sizes differ"
