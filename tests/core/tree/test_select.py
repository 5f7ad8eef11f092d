from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import SelectionError
from penstock.core.format.strict_json import dump_json
from penstock.core.tree.paths import parse_path, show_path
from penstock.core.tree.select import Rename, Selection

MODEL = ("model", "encoder.0.weight")


def test_pattern():
    for pattern, path, expected in [
        # bare prefixes
        ("model", "model", True),
        ("model", "model/encoder.0.weight", True),
        ("model/", "model/encoder.0.weight", True),
        ("model/encoder", "model/encoder.0.weight", True),
        ("model/encoder.0", "model/encoder.0.weight", True),
        ("model/enc", "model/encoder.0.weight", False),
        ("mod", "model/encoder.0.weight", False),
        ("optimizer/state/encoder", "optimizer/state/encoder.0.weight/exp_avg", True),
        ("model.x", "model", False),
        ("model/encoder.0.weight/more", "model/encoder.0.weight", False),
        # wildcards match whole paths
        ("model/*", "model/encoder.0.weight", True),
        ("model/*", "model", False),
        ("*", "model/encoder.0.weight", False),
        ("model/*.weight", "model/encoder.0.weight", True),
        ("model/*.bias", "model/encoder.0.weight", False),
        ("model/**", "model/encoder.0.weight", True),
        ("model/**", "model", True),
        ("**", "model/encoder.0.weight", True),
        ("**/exp_avg", "optimizer/state/w/exp_avg", True),
        ("**/exp_avg", "exp_avg", True),
        ("**/exp_avg", "optimizer/state/w/exp_avg_sq", False),
        ("optimizer/**/exp_avg/**", "optimizer/state/w/exp_avg", True),
        ("a/**/b/**/c", "a/x/b/y/z/c", True),
        ("a/**/b/**/c", "a/x/y/z/c", False),
        ("layers.?", "layers.7", True),
        ("layers.?", "layers.17", False),
        ("layers.[0-3]", "layers.2", True),
        ("layers.[0-3]", "layers.4", False),
        ("layers.[!0-3]", "layers.4", True),
        ("layers.[!0-3]", "layers.3", False),
        ("x[]]", "x]", True),
        ("x[^a]", "x^", True),
        ("x[^a]", "xb", False),
        # escapes
        (r"a\*", "a*", True),
        (r"a\*", "ab", False),
        (r"a\**", "a*b", True),
        (r"\[x", "[x", True),
        ("a%2Fb", "a%2Fb", True),
        ("a%2Fb", "a/b", False),
        ("a%2F*", "a%2Fb", True),
        (r"a\/b", "a%2Fb", True),
        ("x/%00", "x/%00", True),
        ("x/%00", "x/a", False),
        ("x/*", "x/%00", True),
        ("100%25", "100%25", True),
    ]:
        assert Selection(pattern).selects(parse_path(path)) is expected


def test_none_takes_everything_and_exclude_takes_away():
    assert Selection().selects(MODEL)
    assert Selection().everything
    selection = Selection(["model", "epoch"], "model/**/*.bias")
    assert selection.selects(MODEL)
    assert not selection.selects(("model", "encoder.0.bias"))
    assert not selection.selects(("optimizer", "x"))
    assert not Selection([]).selects(MODEL)


def test_malformed_pattern_is_refused_with_its_text():
    for pattern in ["", "/model", "a//b", "a[b", "100%", "%41", "a\\", "x[z-a]", "%00*"]:
        with pytest.raises(SelectionError) as caught:
            Selection(pattern)
        assert repr(pattern) in str(caught.value)
        with pytest.raises(SelectionError, match="exclude"):
            Selection(exclude=pattern)


def test_pattern_that_is_no_string_is_refused():
    with pytest.raises(SelectionError, match="strings"):
        Selection([3])


def test_unused_pattern_is_an_error_with_the_nearest_names():
    paths = [("optimizer", "state", "w", "exp_avg"), ("model", "w")]
    Selection("optimizer", "model/*").check_used(paths)
    with pytest.raises(SelectionError, match="'optimiser' matches nothing; nearest: optimizer"):
        Selection(["model", "optimiser"]).check_used(paths)
    with pytest.raises(SelectionError, match="'model/b' matches nothing"):
        Selection(exclude="model/b").check_used(paths)
    with pytest.raises(SelectionError, match="nothing to select"):
        Selection("a").check_used([])


names = st.text("ab*?[]!.%/\\", min_size=1, max_size=4)


@given(st.lists(names, min_size=1, max_size=3).map(tuple))
def test_every_shown_path_with_wildcards_escaped_selects_itself(path):
    shown = show_path(path)
    escaped = "".join(f"\\{c}" if c in "*?[]\\" else c for c in shown)
    assert Selection(escaped).selects(path)


@given(st.text("ab*?", min_size=1, max_size=5), st.text("ab.", min_size=1, max_size=5))
def test_wildcards_within_a_segment_agree_with_fnmatch(pattern, name):
    if "*" in pattern.replace("**", "*") or "?" in pattern:
        selection = Selection(f"x/{pattern}")
        expected = pattern == "**" or fnmatch.fnmatchcase(name, pattern)
        assert selection.selects(("x", name)) is expected


patterns = st.lists(
    st.sampled_from(["**", "*", "a*", "[ab]", "a", "a.b", "b", "\u00e9", '"', "a%2Fb"]),
    min_size=1, max_size=3,
).map("/".join)  # fmt: skip
segments = st.sampled_from(["a", "b", "a.b", "a.b.c", "ab", "\u00e9", '"', "a/b", "\n", "\ud800"])


@given(
    st.lists(patterns, min_size=1, max_size=3),
    st.lists(patterns, max_size=2),
    st.lists(segments, min_size=1, max_size=4).map(tuple),
)
def test_what_a_pattern_takes_lies_where_a_selection_looks(include, exclude, path):
    selection = Selection(include, exclude or None)
    taken = [p for p in (*include, *exclude) if Selection(p).selects(path)]
    touched = any(selection_of(p, path) for p in (*include, *exclude))
    assert selection.touches(path) == touched
    assert touched or not taken
    if touched:
        assert selection.occurs_in(dump_json({"path": [path]}))
        for depth in range(len(path)):
            test = selection.below(path[:depth])
            assert test if isinstance(test, bool) else test(path[depth])


def selection_of(pattern, path):
    """Whether the pattern takes the path, or something above it."""
    return any(Selection(pattern).selects(path[:depth]) for depth in range(1, len(path) + 1))


@given(patterns, st.lists(segments, min_size=1, max_size=4).map(tuple))
def test_nothing_is_taken_where_a_selection_does_not_look(pattern, path):
    selection = Selection(pattern)
    hidden = [
        depth
        for depth in range(len(path))
        if not (t if isinstance(t := selection.below(path[:depth]), bool) else t(path[depth]))
    ]
    if hidden:
        assert not selection.selects(path)


def test_a_selection_narrows_where_something_lies_outside_of_its_patterns():
    assert Selection("a").narrows
    assert Selection("a/**", "b").narrows
    assert not Selection().narrows
    assert not Selection(None, "a").narrows  # `exclude` alone takes all the rest
    assert not Selection("**/a").narrows


def test_a_subtree_ends_at_its_path_not_at_a_dot():
    selection = Selection.subtree(("m", "a"))
    for path, inside in [(("m", "a"), True), (("m", "a", "x"), True), (("m", "a.b"), False)]:
        assert selection.selects(path) == selection.touches(path) == inside
    assert selection.narrows
    assert not Selection.subtree(()).narrows


def test_rename_moves_prefixes_at_segments_and_dots():
    rename = Rename({"model/enc": "model/encoder", "old": "new/inner"})
    assert rename(("model", "enc.0.weight")) == ("model", "encoder.0.weight")
    assert rename(("model", "encode")) == ("model", "encode")
    assert rename(("old", "x")) == ("new", "inner", "x")
    assert rename(("other",)) == ("other",)


def test_rename_with_open_ends_strips_and_adds_names():
    assert Rename({"m/module.": "m/"})(("m", "module.w")) == ("m", "w")
    assert Rename({"": "job/"})(("m", "w")) == ("job", "m", "w")
    assert Rename({"job/": ""})(("job", "m", "w")) == ("m", "w")


def test_rename_prefers_the_longest_prefix():
    rename = Rename({"a": "x", "a/b": "y"})
    assert rename(("a", "b", "c")) == ("y", "c")
    assert rename(("a", "c")) == ("x", "c")


def test_rename_by_callable_gets_shown_paths():
    rename = Rename(lambda text: text.replace("%2F", "."))
    assert rename(("a/b",)) == ("a.b",)
    assert Rename()(("a/b",)) == ("a/b",)
    assert Rename().identity


def test_rename_that_cannot_be_is_refused():
    for spec, reason in [
        ({"a": "b"}, "both 'a' and 'b' to 'b'|both 'b' and 'a' to 'b'"),
        ({"zzz": "y"}, "'zzz' matches nothing"),
        ({"a": "x//y"}, "not a path"),
        (lambda _: 3, "must return a string"),
        ({"a": 3}, "strings to strings"),
        (3, "mapping or a callable"),
    ]:
        with pytest.raises(SelectionError, match=reason):
            Rename(spec).apply([("a",), ("b",)])
