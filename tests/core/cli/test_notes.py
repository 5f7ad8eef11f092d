"""`penstock annotate`, and how `ls`, `show`, `diff` and `copy` treat annotations."""

import json

import pytest
import torch

import penstock


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "run"
    with penstock.Checkpointer(f"posix://{root}") as ckpt:
        for step in (1, 2):
            state = {"w": torch.full((500,), float(step))}
            ckpt.save(state, step=step, mode="blocking", metadata={"loss": 2.5})
    return root


def metadata_of(root, step):
    with penstock.Checkpointer(f"posix://{root}") as ckpt:
        return ckpt.info(step).metadata


def test_values_are_json_or_else_text(call, run):
    done = call(
        "annotate", run, 2, "loss=2.25", "by=ada", 'of={"a": [1]}', "eq=a=b", "no=", "t=true"
    )
    assert done.code == 0
    expected = {"loss": 2.25, "by": "ada", "of": {"a": [1]}, "eq": "a=b", "no": "", "t": True}
    assert metadata_of(run, 2) == expected
    assert done.out == 'step 2: loss=2.25 by=ada of={"a": [1]} eq=a=b no= t=true\n'
    done = call("annotate", run, 2, "by=bob", "--json")
    assert done.json["metadata"] == expected | {"by": "bob"}
    assert (done.json["step"], done.json["url"]) == (2, f"file://{run}")


@pytest.mark.parametrize("words", [["2"], ["2", "loss"], ["2", "=1"], ["x", "a=1"]])
def test_wrong_calls_exit_with_2_and_change_nothing(call, run, words):
    assert call("annotate", run, *words).code == 2
    assert not (run / "notes").exists()


def cells(listing):
    """The last cells of each row, starting at the state."""
    return [
        line.split()[line.split().index(state) :]
        for line in listing.out.splitlines()
        for state in ("STATE", "ok")
        if state in line.split()
    ]


def test_ls_and_show_print_annotations(call, run):
    call("annotate", run, 1, "loss=0.5", "note=good")
    assert cells(call("ls", run)) == [
        ["STATE", "loss", "METADATA"],
        ["ok", "0.5", "note=good"],
        ["ok", "2.5"],
    ]
    assert "note: good" in call("ls", run, "--metadata").out
    both = {one["step"]: one for one in call("ls", run, "--json").json["checkpoints"]}
    assert both[1]["metadata"] == {"loss": 0.5, "note": "good"}
    assert both[2]["metadata"] == {"loss": 2.5}
    assert both[1]["damaged_notes"] == []
    assert "loss=0.5 note=good" in call("show", run, "--step", 1).out
    shown = call("show", run, "--step", 1, "--json").json["checkpoint"]
    assert shown["metadata"] == {"loss": 0.5, "note": "good"}
    changes = call("diff", run, "--json").json["changes"]
    found = {(one["path"], one["a"]) for one in changes if one["what"] == "metadata"}
    assert found == {("loss", "0.5"), ("note", '"good"')}


def test_damaged_annotation_hides_nothing_and_is_reported(call, run, caplog):
    call("annotate", run, 1, "loss=0.5")
    (note,) = (run / "notes").rglob("*.json")
    note.write_bytes(b"torn")
    for words in (["ls", run], ["show", run, "--step", 1]):
        done = call(*words)
        assert done.code == 0
        assert note.name in caplog.text
        caplog.clear()
        assert "loss=2.5" in done.out
    done = call("ls", run, "--json")
    assert note.name in done.json["checkpoints"][0]["damaged_notes"][0]
    done = call("verify", run, "--step", 1, "--quick")
    assert done.code == 1
    assert note.name in done.out


# -- pins ------------------------------------------------------------------------------------------


def steps(root):
    with penstock.Checkpointer(f"posix://{root}") as ckpt:
        return ckpt.steps()


def test_pins_are_shown_and_removed(call, run):
    assert "TAGS" not in call("ls", run).out
    assert call("pin", run, 1, "best").out == "step 1 is pinned: best\n"
    assert call("pin", run, 1, "v1", "--json").json["tags"] == ["best", "v1"]
    lines = call("ls", run).out.splitlines()
    assert "TAGS" in lines[0]
    assert "best v1" in lines[1]
    assert [one["tags"] for one in call("ls", run, "--json").json["checkpoints"]] == [
        ["best", "v1"],
        [],
    ]
    assert "pinned: best v1" in call("show", run, "--step", 1).out
    assert call("unpin", run, 1, "v1").out == "step 1 is pinned: best\n"
    assert call("unpin", run, 1, "best").out == "step 1 is not pinned\n"
    assert "TAGS" not in call("ls", run).out


def test_delete_of_a_pinned_step_needs_force(call, run):
    call("pin", run, 1, "best")
    for words in (["1"], ["1", "2"], ["1", "--dry-run"]):
        done = call("delete", run, *words, "--yes")
        assert done.code == 1
        assert "step 1 is pinned (best); pass --force" in done.err
    assert steps(run) == [1, 2]
    assert call("delete", run, "1", "--yes", "--force").code == 0
    assert steps(run) == [2]
    assert not [*(run / "notes").rglob("*.json")]


def test_delete_of_a_step_with_a_damaged_note_needs_force(call, run):
    call("pin", run, 1, "best")
    (note,) = (run / "notes").rglob("*.json")
    note.write_bytes(b"torn")
    done = call("delete", run, "1", "--yes")
    assert done.code == 1
    assert "step 1 may be pinned" in done.err
    assert steps(run) == [1, 2]
    assert call("delete", run, "1", "--yes", "--force").code == 0
    assert steps(run) == [2]


def test_missing_step_is_an_error(call, run):
    done = call("annotate", run, 7, "loss=1")
    assert done.code == 1
    assert "steps there: 1, 2" in done.err


@pytest.mark.parametrize("how", [[], ["--raw"], ["--codec", "zstd"]])
def test_copies_keep_annotations(call, run, tmp_path, how):
    call("annotate", run, 1, "loss=0.5")
    assert call("copy", run, tmp_path / "to", "--step", 1, *how).code == 0
    assert metadata_of(tmp_path / "to", 1) == {"loss": 0.5}
    (name,) = {path.name for path in (run / "notes").rglob("*.json")}
    (copied,) = (tmp_path / "to" / "notes").rglob("*.json")
    assert copied.name == name
    assert json.loads(copied.read_text().partition("\n")[2])["uid"] == copied.parent.name


def test_invalid_tag_is_an_error(call, run):
    done = call("pin", run, 1, "a b")
    assert done.code == 1
    assert "is not a tag" in done.err
    assert not (run / "notes").exists()


def annotate_both(call, root, **metadata):
    for step in (1, 2):
        pairs = [f"{key}={json.dumps(value[step - 1])}" for key, value in metadata.items()]
        assert call("annotate", root, step, *pairs).code == 0


def test_ls_has_columns_for_numbers_of_most_checkpoints(call, run):
    annotate_both(
        call, run, seed=[7, 7], loss=[0.5, 0.123456789], lr=[1, 2], done=[True, False],
        acc=[0.1, 0.2], a_key_that_is_too_long=[1, 2],
    )  # fmt: skip
    call("annotate", run, 2, "late=1")
    header, first, second = cells(call("ls", run))
    assert header == ["STATE", "loss", "lr", "acc", "METADATA"]  # the seed never changes
    assert first[:4] == ["ok", "0.5", "1", "0.1"]
    assert second[:4] == ["ok", "0.123457", "2", "0.2"]
    assert second[4:] == ["seed=7", "done=false", "a_key_that_is_too_long=2", "late=1"]


def test_metrics_are_chosen_by_name_and_may_be_nested(call, run):
    annotate_both(call, run, eval=[{"mmlu": 0.61}, {"mmlu": 0.72, "x.y": 1}], loss=[1, 2])
    listing = call("ls", run, "--metrics", "eval.mmlu,loss,eval.x.y")
    assert cells(listing) == [
        ["STATE", "eval.mmlu", "loss", "eval.x.y"],
        ["ok", "0.61", "1", "-"],
        ["ok", "0.72", "2", "1"],
    ]
    done = call("ls", run, "--metrics", "lsos")
    assert done.code == 1
    assert "has 'lsos' in its metadata; did you mean loss?" in done.err


def test_last_lists_only_the_newest_steps(call, run):
    assert [one["step"] for one in call("ls", run, "--last", 1, "--json").json["checkpoints"]] == [
        2
    ]
    assert len(call("ls", run, "--last", 1).out.splitlines()) == 2
    assert len(call("ls", run, "--last", 5).out.splitlines()) == 3
    assert call("ls", run, "--last", 0).code == 2
