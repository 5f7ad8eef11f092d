"""Golden files: a difference is an error that says where, and how to accept it."""

import pytest

from penstock.testing.golden import REWRITE_VARIABLE, check_golden, read_golden

GOLDEN = bytes(range(64))


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv(REWRITE_VARIABLE, raising=False)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "golden" / "part.bin"
    path.parent.mkdir()
    path.write_bytes(GOLDEN)
    return path


def test_equal_bytes_pass(path):
    check_golden(path, GOLDEN)
    assert read_golden(path) == GOLDEN


def test_the_start_of_a_difference_is_shown(path):
    for data, where in [
        (GOLDEN[:40] + b"\xff" + GOLDEN[41:], r"from byte 40 on they are ff 29 .*, not 28 29 "),
        (GOLDEN[:50], r"50 bytes are not the 64 .* from byte 50 on they are the end, not 32 33 "),
        (GOLDEN + b"\x07", r"65 bytes are not the 64 .* from byte 64 on they are 07, not the end"),
        (b"", r"0 bytes are not the 64 .* from byte 0 on they are the end, not 00 01 "),
    ]:
        with pytest.raises(AssertionError, match=where):
            check_golden(path, data)
        assert path.read_bytes() == GOLDEN


def test_a_missing_file_is_an_error_that_says_how_to_write_it(tmp_path):
    for use in [lambda path: check_golden(path, b"x"), read_golden]:
        with pytest.raises(
            AssertionError, match=rf"no golden file .*new\.bin.*{REWRITE_VARIABLE}=1"
        ):
            use(tmp_path / "new.bin")
        assert not list(tmp_path.iterdir())


def test_the_variable_rewrites_files(path, tmp_path, monkeypatch):
    monkeypatch.setenv(REWRITE_VARIABLE, "1")
    check_golden(path, b"changed")
    check_golden(tmp_path / "a" / "b" / "new.bin", b"fresh")
    monkeypatch.setenv(REWRITE_VARIABLE, "0")
    check_golden(path, b"changed")
    assert read_golden(tmp_path / "a" / "b" / "new.bin") == b"fresh"
