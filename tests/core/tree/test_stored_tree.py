"""Paths as a tree: the entries below each, in memory linear in their text."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.tree.stored_tree import PathTree

paths = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map(tuple), max_size=12)


@given(paths, st.lists(st.sampled_from("abc"), max_size=6).map(tuple))
def test_entries_below_every_path_are_in_order(known, asked):
    tree = PathTree(known)
    for path in [asked, *known, *(p[:2] for p in known)]:
        depth = len(path)
        below = dict.fromkeys(p[depth] for p in known if p[:depth] == path and len(p) > depth)
        assert tree.children(path) == tuple(below)
        assert (path in tree) == bool(below)
        assert tree.has(path) == any(p[:depth] == path for p in known)


def test_deep_paths_take_no_quadratic_memory():
    alone = [(f"{number}", *["x"] * 1000) for number in range(50)]
    pairs = [(f"{number}", *["x"] * 1000, end) for number in range(5) for end in "ab"]
    tracemalloc.start()
    try:
        tree = PathTree(alone)
        taken_alone, _ = tracemalloc.get_traced_memory()
        tracemalloc.clear_traces()
        forked = PathTree(pairs)
        taken_forked, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tree.children(alone[0][:500]) == ("x",)
    assert forked.children(pairs[0][:-1]) == ("a", "b")
    assert taken_alone < 100_000
    assert taken_forked < 200 * sum(map(len, pairs))
