"""`penstock diff`: the differences and its exit code."""

import shutil

import pytest
import torch

import penstock


def state(step):
    return {
        "model": {"w": torch.full((6000,), float(step)), "b": torch.ones(7)},
        "epoch": step,
        **({"late": torch.zeros(2, 3)} if step > 1 else {}),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved") / "run"
    with penstock.Checkpointer(f"posix://{root}") as ckpt:
        for step in (1, 2, 4):
            ckpt.save(state(step), step=step, mode="blocking", metadata={"loss": 1.0 / step})
    return root


@pytest.fixture
def other_run(run, tmp_path):
    return shutil.copytree(run, tmp_path / "other")


def lines(done):
    return [line.split() for line in done.out.splitlines()]


def test_two_newest_of_one_run_are_compared_by_default(call, run):
    done = call("diff", run)
    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines()[:2] == [
        f"A: step 2 of file://{run}",
        f"B: step 4 of file://{run}",
    ]
    assert ["model/w", "bytes", "float32", "6000", "float32", "6000"] in lines(done)
    assert ["epoch", "value", "2", "4"] in lines(done)
    assert ["loss", "metadata", "0.5", "0.25"] in lines(done)
    assert "2 of 4 objects in both differ, 0 are in only one of them" in done.out


def test_steps_are_chosen(call, run, other_run):
    done = call("diff", run, other_run, "--step-a", "1", "--step-b", "2")
    assert done.code == 1
    assert ["late", "only", "in", "B", "-", "float32", "2x3"] in lines(done)
    assert call("diff", run, "--step-b", "2").out.startswith("A: step 1 of ")
    assert call("diff", run, other_run, "--step-a", "2", "--step-b", "2").code == 0


def test_norms_are_those_of_the_difference(call, run):
    done = call("diff", run, "--norms", "--json")
    (change,) = [c for c in done.json["changes"] if c["path"] == "model/w"]
    assert change["norms"] == {
        "elements": 6000,
        "differing": 6000,
        "max_abs": 2.0,
        "l2": pytest.approx(2.0 * 6000**0.5),
        "relative_l2": pytest.approx(1.0),
        "nan": 0,
        "inf": 0,
    }
    table = call("diff", run, "--norms").out
    assert "REL L2" in table
    assert "154.9" in table


@pytest.mark.parametrize(
    "arguments",
    [
        ["RUN", "--step-b", "1"],
        ["RUN", "--step-a", "3"],
        ["RUN", "RUN/nothing"],
        ["RUN", "--include", "modle"],
        ["nonsense://x"],
        ["RUN", "--step-a", "-1"],
        [],
    ],
    ids=" ".join,
)
def test_trouble_and_difference_differ_in_exit_code(call, run, arguments):
    done = call("diff", *(a.replace("RUN", str(run)) for a in arguments))
    assert done.code == 2
    assert done.err
    assert "Traceback" not in done.err
    assert call("ls", run / "nothing").code == 1  # other commands keep theirs


def test_damage_in_bytes_that_must_be_read_is_trouble(call, run, other_run):
    for blob in other_run.rglob("*.raw"):
        data = bytearray(blob.read_bytes())
        data[len(data) // 2] ^= 1
        blob.write_bytes(data)
    done = call("diff", run, other_run, "--step-a", "2", "--norms")
    assert done.code == 2
    assert "is damaged" in done.err


def test_same_checkpoint_of_two_runs_does_not_differ(call, run, other_run):
    done = call("diff", run, other_run)
    assert done.code == 0
    assert done.out.splitlines()[2] == "nothing differs in 4 objects, 0 B read"
    assert call("diff", run, "--step-a", "2", "--step-b", "2").code == 0


def test_only_the_selection_is_compared(call, run):
    assert call("diff", run, "--include", "model/b").code == 0
    assert call("diff", run, "--exclude", "model/w", "--exclude", "epoch").code == 0
    assert call("diff", run, "--include", "model").code == 1


def test_an_object_of_one_side_only_has_no_norms(call, run):
    done = call("diff", run, "--step-a", "1", "--step-b", "2", "--norms")
    assert (done.code, done.err) == (1, "")
    assert ["late", "only", "in", "B", "-", "float32", "2x3"] in lines(done)


def test_a_configuration_file_names_its_backend(call, run, other_run, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(f'backend = "posix://{run}"\n')
    assert call("diff", config, other_run).code == 0
    assert call("diff", other_run, config).code == 0
    assert call("copy", config, tmp_path / "copied").code == 0
    assert call("diff", tmp_path / "copied", config).code == 0


@pytest.mark.parametrize("command", ["diff", "ls"])
def test_a_missing_configuration_file_is_reported(call, command):
    done = call(command, "missing.toml")
    assert "configuration missing.toml cannot be read" in done.err
    assert done.code == (2 if command == "diff" else 1)
