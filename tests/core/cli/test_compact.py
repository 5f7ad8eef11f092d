"""`penstock compact`, and copies without a base."""

import shutil

import pytest
from tests.core.cli.command import tree_of
from tests.integration.deltas.test_chains import damage, run_of

import penstock
from penstock.core.units import size_text


@pytest.fixture(scope="module")
def chained_once(tmp_path_factory):
    root = tmp_path_factory.mktemp("chained") / "run"
    run_of(f"posix://{root}", range(4), deltas={"every": 9})
    with penstock.Checkpointer(f"posix://{root}") as ckpt:
        ckpt.delete(0)
    return root


@pytest.fixture
def chained(chained_once, tmp_path):
    """Steps 0 to 3 in a chain; 0 is deleted."""
    return shutil.copytree(chained_once, tmp_path / "run")


def borrowing(call, root):
    listed = call("ls", root, "--json").json
    return [one["step"] for one in listed["checkpoints"] if one["references"]]


def test_compact_makes_the_borrowers_of_deleted_checkpoints_whole(call, chained):
    done = call("compact", chained)
    assert (done.code, done.err) == (0, "")
    *steps, total = done.out.splitlines()
    assert [line.split(":")[0] for line in steps] == [f"step {n} stands alone" for n in (1, 2, 3)]
    assert total.startswith("the run takes ")
    assert not borrowing(call, chained)
    assert call("ls", chained, "--json").json["kept"] == []
    assert call("compact", chained).out.startswith("nothing to compact under ")


def test_a_dry_run_of_compact_changes_nothing(call, chained):
    before = tree_of(chained)
    done = call("compact", chained, "--dry-run")
    assert done.code == 0
    assert "step 3 would stand alone: " in done.out
    assert "the run would take about " in done.out
    assert tree_of(chained) == before


def test_a_step_that_cannot_be_compacted_is_reported_and_skipped(call, chained):
    damage(chained, 3)
    done = call("compact", chained)
    assert (done.code, done.err) == (1, "")  # printed once: no log repeats it
    assert "step 3 is not compacted: " in done.out
    assert "`penstock verify --all` shows which are whole" in done.out
    assert borrowing(call, chained) == [3]
    assert list(call("compact", chained, "--json").json["failed"]) == ["3"]


def test_a_flat_copy_has_no_base(call, chained, tmp_path):
    done = call("copy", chained, tmp_path / "flat", "--flatten")
    assert done.code == 0
    assert "step 3, the latest, is encoded again" in done.out
    assert borrowing(call, tmp_path / "flat") == []
    assert call("diff", chained, tmp_path / "flat").code == 0
    assert call("verify", tmp_path / "flat").code == 0


DELTAS = ("--codec", "delta", "--codec", "floatsplit")


def bases(call, root):
    listed = call("ls", root, "--json").json["checkpoints"]
    return {one["step"]: one["base"] and one["base"]["step"] for one in listed}


def test_copies_encoded_as_deltas_are_a_separate_chain(call, chained, tmp_path):
    """Step 3 is not encoded against step 2 before that exists: a single copy has no base."""
    copied = tmp_path / "copied"
    assert call("copy", chained, copied, "--step", 3, *DELTAS).code == 0
    assert bases(call, copied) == {3: None}
    done = call("copy", chained, copied, "--step", "all", "--overwrite", *DELTAS, "--json").json
    assert bases(call, copied) == {1: None, 2: 1, 3: 2}
    one, two, three = done["copies"]
    assert one["bytes_kept"] == 0
    assert two["bytes_kept"] == one["bytes_stored"] > 2 * two["bytes_stored"]
    assert three["bytes_kept"] == one["bytes_stored"] + two["bytes_stored"]
    for step in (1, 2, 3):
        assert call("diff", chained, copied, "--step-a", step, "--step-b", step).code == 0
    assert call("verify", copied, "--all").code == 0


def test_a_run_re_encoded_in_place_refers_to_no_replaced_generation(call, chained):
    assert call("compact", chained).code == 0
    assert call("copy", chained, chained, "--step", "all", "--overwrite", *DELTAS).code == 0
    assert bases(call, chained) == {1: None, 2: 1, 3: 2}
    assert call("ls", chained, "--json").json["kept"] == []
    assert call("verify", chained, "--all").code == 0


def test_compact_of_one_step_leaves_the_others_as_they_are(call, chained):
    assert call("compact", chained, 2).code == 0
    assert borrowing(call, chained) == [1, 3]


def test_compact_of_a_missing_step_changes_nothing(call, chained):
    before = tree_of(chained)
    done = call("compact", chained, 1, 77)
    assert done.code == 1
    assert "no checkpoint of step 77" in done.err
    assert tree_of(chained) == before
    assert call("compact", chained, 1, "--all").code == 2


def test_a_copy_whose_deltas_no_codec_shrinks_is_refused(call, chained, tmp_path):
    done = call("copy", chained, tmp_path / "copied", "--codec", "delta")
    assert (done.code, done.out) == (1, "")
    assert "--codec delta --codec floatsplit" in done.err
    assert not (tmp_path / "copied").exists()


def test_copies_by_the_rules_of_a_file_have_its_deltas(call, chained, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[deltas]\nevery = 2\n[[rules]]\nmatch = "**"\ncodecs = ["delta", "floatsplit"]\n'
    )
    target = tmp_path / "copied"
    assert call("copy", chained, target, "--step", "all", "--rules", rules).code == 0
    assert bases(call, target) == {1: None, 2: 1, 3: None}


def test_a_copy_of_a_chain_reports_its_borrowed_blobs(call, chained, tmp_path):
    alone = tmp_path / "alone"
    first, second, third = call("ls", chained, "--json").json["checkpoints"]
    (one,) = call("copy", chained, alone, "--step", 1, "--json").json["copies"]
    assert one["bytes_stored"] == first["bytes_stored"]
    assert (one["bytes_copied"], one["bytes_kept"]) == (
        first["bytes_stored"] + first["bytes_borrowed"],
        0,
    )
    (two,) = call("copy", chained, alone, "--step", 2, "--json").json["copies"]
    assert (two["bytes_copied"], two["bytes_kept"]) == (
        second["bytes_stored"],
        second["bytes_borrowed"],
    )
    done = call("copy", chained, alone, "--step", 3)
    kept = third["bytes_borrowed"]
    needed = size_text(third["bytes_stored"] + kept)
    assert f"objects, {needed} ({size_text(kept)} were there)" in done.out


def test_a_copy_names_the_objects_and_the_link_of_a_damaged_chain(call, chained, tmp_path):
    damage(chained, 1)
    done = call("copy", chained, tmp_path / "copy", "--step", 3)
    assert done.code == 1
    assert "(borrowed from step 1) do not match their checksum" in done.err
    assert "; they belong to model/" in done.err
