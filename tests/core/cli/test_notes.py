"""`penstock annotate`, and what `ls`, `show`, `diff` and `copy` make of annotations."""

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


def test_values_are_json_and_all_else_is_text(call, run):
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
    """The last cells of each row, from the state on."""
    return [
        line.split()[line.split().index(state) :]
        for line in listing.out.splitlines()
        for state in ("STATE", "ok")
        if state in line.split()
    ]


def test_ls_and_show_have_the_annotations(call, run):
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


def test_pins_are_shown_and_taken_off(call, run):
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
