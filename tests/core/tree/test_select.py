import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import SelectionError
from penstock.core.format.strict_json import dump_json
from penstock.core.tree.paths import parse_path, show_path
from penstock.core.tree.select import Rename, Selection


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


def test_malformed_pattern_is_refused_with_its_text():
    for pattern in ["", "/model", "a//b", "a[b", "100%", "%41", "a\\", "x[z-a]", "%00*"]:
        with pytest.raises(SelectionError) as caught:
            Selection(pattern)
        assert repr(pattern) in str(caught.value)
        with pytest.raises(SelectionError, match="exclude"):
            Selection(exclude=pattern)


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
def test_pattern_matches_lie_in_the_selections_prefixes(include, exclude, path):
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
    """Whether the pattern matches the path, or a path above it."""
    return any(Selection(pattern).selects(path[:depth]) for depth in range(1, len(path) + 1))


def test_a_selection_narrows_if_some_path_is_outside_its_patterns():
    assert Selection("a").narrows
    assert Selection("a/**", "b").narrows
    assert not Selection().narrows
    assert not Selection(None, "a").narrows  # `exclude` alone selects all the rest
    assert not Selection("**/a").narrows


def test_rename_moves_prefixes_at_segments_and_dots():
    rename = Rename({"model/enc": "model/encoder", "old": "new/inner"})
    assert rename(("model", "enc.0.weight")) == ("model", "encoder.0.weight")
    assert rename(("model", "encode")) == ("model", "encode")
    assert rename(("old", "x")) == ("new", "inner", "x")
    assert rename(("other",)) == ("other",)


def test_rename_by_callable_gets_shown_paths():
    rename = Rename(lambda text: text.replace("%2F", "."))
    assert rename(("a/b",)) == ("a.b",)
    assert Rename()(("a/b",)) == ("a/b",)
    assert Rename().identity


def test_impossible_rename_is_refused():
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
