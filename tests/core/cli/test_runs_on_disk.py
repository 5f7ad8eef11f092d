"""`runs_on_disk`: runs near a folder that holds none, as hints in messages."""

from penstock.core.cli.output.runs_on_disk import run_around, runs_below


def test_runs_are_found_three_levels_down_but_not_in_runs(tmp_path):
    for run in ("a", "b/c", "b/d/e", "b/d/f/too-deep", "a/inside"):
        (tmp_path / run / "commits").mkdir(parents=True)
    (tmp_path / "file").touch()
    assert runs_below(tmp_path) == [tmp_path / run for run in ("a", "b/c", "b/d/e")]
    assert runs_below(tmp_path / "a") == [tmp_path / "a/inside"]
    assert runs_below(tmp_path / "absent") == []


def test_a_path_in_a_run_names_the_run(tmp_path):
    (tmp_path / "run" / "commits").mkdir(parents=True)
    assert run_around(tmp_path / "run" / "commits") == tmp_path / "run"
    assert run_around(tmp_path / "run" / "data" / "uid" / "blobs") == tmp_path / "run"
    assert run_around(tmp_path / "run" / "notes") is None
    assert run_around(tmp_path / "run") is None
