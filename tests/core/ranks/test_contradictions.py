"""Ranks of different structures have compatible objects at one path, or are refused."""

import itertools

import pytest

from penstock.core.abc import Node, ranks_node
from penstock.core.errors import SaveError
from penstock.core.ranks.contradictions import Contradictions
from penstock.core.types import Kind

HERE, BELOW = ("x",), ("x", "a")
TENSOR, VALUE = {HERE: Kind.TENSOR}, {HERE: Kind.VALUE}
DICT = {BELOW: Kind.TENSOR}

WHAT = {
    "a tensor": (TENSOR, []),
    "a value": (VALUE, []),
    "a dict of objects": (DICT, []),
    "a list of objects": (DICT, [Node(HERE, "list", {"length": 1})]),
    "a tuple of objects": (DICT, [Node(HERE, "tuple", {"length": 1})]),
    "a module": (DICT, [Node(HERE, "module")]),
    "an optimizer": ({}, [Node(HERE, "optimizer")]),
    "a penstock.PerRank": ({("x", "1"): Kind.VALUE}, [ranks_node(HERE, 3)]),
}
TOGETHER = {frozenset({"a dict of objects", "a module"})}
OBJECTS = {"a tensor", "a value"}  # of two objects at one path the traits are compared


def found(*whats, nothing=()):
    contradictions = Contradictions(nothing)
    for rank, what in enumerate(whats):
        objects, nodes = WHAT[what]
        contradictions.add([rank, rank + 4], {("w",): Kind.TENSOR, **objects}, nodes)
    return contradictions.absent


def test_one_path_has_one_kind_on_all_ranks():
    for one, other in itertools.product(WHAT, WHAT):
        if one == other or {one, other} <= OBJECTS or frozenset({one, other}) in TOGETHER:
            assert found(one, other) == set(), (one, other)
            continue
        words = rf"^x is {one} on ranks 0, 4, and {other} on ranks 1, 5: a path must be of one "
        with pytest.raises(SaveError, match=words):
            found(one, other)


def test_an_empty_value_is_absent_beside_another_ranks_container():
    for container in WHAT.keys() - OBJECTS:
        assert found("a value", container, nothing={"x"}) == {HERE}, container
        assert found(container, "a value", nothing={"x"}) == {HERE}, container


def test_contradiction_above_the_container_is_found():
    contradictions = Contradictions()
    contradictions.add([0], {("x", "a", "b", "c"): Kind.TENSOR}, [])
    with pytest.raises(SaveError, match=r"^x/a is a dict of objects on rank 0, and a value on"):
        contradictions.add([1], {BELOW: Kind.VALUE}, [])


def test_third_rank_is_compared_with_the_merged_kinds():
    with pytest.raises(SaveError, match=r"^x is a dict .* on ranks 0, 4, and a list .* ranks 2, 6"):
        found("a dict of objects", "a module", "a list of objects")


def test_none_inside_a_provider_s_object_is_no_absence():
    """Its provider would build the same from both."""
    contradictions = Contradictions({"x/a"})
    contradictions.add([0], {("x", "a", "b"): Kind.TENSOR}, [Node(HERE, "stateful")])
    with pytest.raises(SaveError, match=r"^x/a is a dict of objects on rank 0, and a value on"):
        contradictions.add([1], {BELOW: Kind.VALUE}, [Node(HERE, "stateful")])
