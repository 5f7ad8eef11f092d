import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import SelectionError
from penstock.core.tree.paths import parse_path, path_hash, path_hashes, show_path, show_paths

segments = st.one_of(
    st.sampled_from(["", "a/b", "a%2Fb", "%", "%00", "%25", "..", ".", "\x00", "0", "\ud800", "/"]),
    st.text(max_size=8),
)
paths = st.lists(segments, max_size=4).map(tuple)


@given(paths)
def test_every_path_round_trips_as_text(path):
    assert parse_path(show_path(path)) == path


@given(paths, paths)
def test_no_two_paths_look_alike(one, other):
    assert (show_path(one) == show_path(other)) == (one == other)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ((), ""),
        (("model", "layers.0.weight"), "model/layers.0.weight"),
        (("a/b", ""), "a%2Fb/%00"),
        (("a%2Fb",), "a%252Fb"),
        (("\x00",), "\x00"),
    ],
)
def test_shown_form_is_as_documented(path, shown):
    assert show_path(path) == shown


def test_malformed_path_text_is_refused():
    for text in ["a//b", "/a", "a/", "100%", "a%2fb", "a%00", "%41"]:
        with pytest.raises(SelectionError):
            parse_path(text)


def test_hash_covers_the_shown_utf8_text():
    assert path_hash(("é", "a/b")) == xxhash.xxh3_64_intdigest("é/a%2Fb".encode())
    assert path_hash(("\ud800",)) == xxhash.xxh3_64_intdigest(b"\xed\xa0\x80")


@given(st.lists(paths, max_size=4))
def test_batched_paths_are_shown_and_hashed_like_single_ones(many):
    assert show_paths(many) == [*map(show_path, many)]
    assert path_hashes(many) == [*map(path_hash, many)]
