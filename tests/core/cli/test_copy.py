"""`penstock copy`: which steps, how, and its output."""

import shutil
from contextlib import closing

import numpy as np
import pytest
import torch
from tests.core.cli.command import tree_of
from tests.core.stored_ranks import store_ranks

import penstock
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.format.commit_record import seal
from penstock.core.types import Region

STATE = {
    "model": {"w": torch.arange(6000.0), "b": torch.ones(7)},
    "opt": torch.zeros(9),
    "epoch": 4,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved") / "run"
    with penstock.Checkpointer(f"posix://{root}") as ckpt:
        for step in (1, 2, 30):
            ckpt.save({**STATE, "epoch": step}, step=step, mode="blocking", metadata={"loss": step})
    return root


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture
def target(tmp_path):
    return tmp_path / "target"


def open_run(root):
    return penstock.Checkpointer(f"posix://{root}")


def records(root):
    return {path.name: path.read_bytes() for path in (root / "commits").iterdir()}


def codecs(root, step=30):
    with open_run(root) as ckpt:
        return set(ckpt.info(step).codecs)


def test_latest_step_is_copied_by_default(call, run, target):
    before = tree_of(run)
    done = call("copy", run, target)
    assert done.code == 0
    assert done.out.startswith("step 30, the latest, is copied: 4 objects, ")
    assert done.err == ""
    assert tree_of(run) == before
    assert records(target) == {k: v for k, v in records(run).items() if "30" in k}
    with open_run(target) as ckpt:
        assert ckpt.steps() == [30]
        assert ckpt.verify().ok


def test_one_step_or_all_are_copied(call, run, target):
    assert call("copy", run, target, "--step", "2").code == 0
    done = call("copy", run, target, "--step", "all")
    assert done.code == 0
    assert done.out.splitlines()[1] == "step 2 is already there"
    assert done.out.splitlines()[-1] == "2 checkpoints copied, 1 already there, 0 failed"
    assert records(target) == records(run)


@pytest.mark.parametrize(
    ("options", "used"),
    [
        (["--codec", "zstd"], {"zstd"}),
        (["--codec", "lz4", "--codec", "zstd"], {"lz4", "zstd"}),
        (["--raw"], set()),
        (["--include", "**"], {"zstd"}),
    ],
)
def test_copy_is_encoded_as_requested(call, run, tmp_path, options, used):
    target = tmp_path / "target"
    call("copy", run, tmp_path / "encoded", "--codec", "zstd")
    done = call("copy", tmp_path / "encoded", target, *options)
    assert done.code == 0
    assert "is encoded again: 4 objects" in done.out
    assert codecs(target) == used
    with open_run(target) as ckpt, open_run(run) as original:
        assert torch.equal(ckpt.load()["model"]["w"], STATE["model"]["w"])
        assert ckpt.info().metadata == original.info().metadata


@pytest.mark.parametrize("trust", [False, True])
def test_interrupted_copy_is_verified_again_unless_trusted(call, run, target, trust):
    call("copy", run, target)
    (record,) = (target / "commits").iterdir()
    record.unlink()  # as if it had stopped before the last step
    with open_run(run) as ckpt:
        uid = ckpt.info().uid
    blobs = [f"data/{uid}/blobs/{path.name}" for path in target.rglob("*.raw")]
    lease = {"token": "", "host": "", "pid": 0, "process": "", "sealed": blobs}
    (target / "data" / uid / "copy.json").write_bytes(seal(lease))
    data = bytearray((target / blobs[0]).read_bytes())
    data[len(data) // 2] ^= 1
    (target / blobs[0]).write_bytes(data)
    done = call("copy", run, target, "--json", *(["--trust"] if trust else []))
    assert done.json["copies"][0]["bytes_kept"] == (len(data) if trust else 0)
    assert call("verify", target).code == int(trust)


def test_other_checkpoint_stays_unless_replace_is_given(call, run, target):
    with open_run(target) as ckpt:
        ckpt.save({"other": 1}, step=30, mode="blocking")
    before = tree_of(target)
    for options in ([], ["--raw"]):
        done = call("copy", run, target, *options)
        assert done.code == 1
        assert "--overwrite" in done.err
        assert tree_of(target) == before
    assert call("copy", run, target, "--overwrite").code == 0
    assert list(records(target)) == ["00000030-2.json"]
    with open_run(target) as ckpt, open_run(run) as original:
        assert ckpt.info().uid == original.info().uid
        assert ckpt.verify().ok
    assert call("copy", run, target, "--overwrite").out.endswith("is already there\n")
    assert call("copy", run, target, "--overwrite", "--raw").code == 0
    assert list(records(target)) == ["00000030-4.json"]


@pytest.mark.parametrize(
    "options",
    [
        ["--step", "newest"],
        ["--codec", "zstd", "--raw"],
        ["--rate", "fast"],
        ["--rate", "0"],
        ["--rate", "1MiB", "--raw"],
        ["--trust", "--codec", "zstd"],
    ],
)
def test_contradictory_options_are_refused(call, run, target, options):
    done = call("copy", run, target, *options)
    assert done.code == 2
    assert options[0] in done.err
    assert not target.exists()


def test_checkpoint_whose_parts_lack_elements_is_not_copied(call, tmp_path, target):
    array = np.ones((4, 4), np.float32)
    with closing(PosixBackend(PosixConfig(path=str(tmp_path / "run")))) as store:
        store_ranks(store, [[(("w",), array, [Region((0, 0), (1, 4))])], []])
    done = call("copy", tmp_path / "run", target)
    assert done.code == 1
    assert "1 object(s) are not whole: w: no shard has elements [1:4, 0:4]" in done.err
    assert not target.exists() or not any(path.is_file() for path in target.rglob("*"))


def test_second_copy_does_nothing(call, run, target):
    call("copy", run, target)
    before, listed = tree_of(target), records(target)
    done = call("copy", run, target)
    assert (done.code, done.out) == (0, "step 30, the latest, is already there\n")
    commit = target / "commits" / "00000030-0.json"  # confirmed: the same bytes once more
    assert tree_of(target).keys() == before.keys()
    assert {k: v for k, v in tree_of(target).items() if k != commit} == {
        k: v for k, v in before.items() if k != commit
    }
    assert records(target) == listed


def test_rules_of_a_file_are_used(call, run, target, tmp_path):
    rules = tmp_path / "penstock.toml"
    rules.write_text('backend = "x"\n[[rules]]\nmatch = "model"\ncodecs = ["lz4"]\n')
    assert call("copy", run, target, "--rules", rules).code == 0
    assert codecs(target) == {"lz4"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("x = 1", "has no [[rules]]"), ("[[", "rules.toml is not valid: "), (None, "cannot be read")],
)
def test_unusable_rules_are_refused(call, run, tmp_path, text, complaint):
    target = tmp_path / "target"
    rules = tmp_path / "rules.toml"
    if text is not None:
        rules.write_text(text)
    done = call("copy", run, target, "--rules", rules)
    assert done.code == 1
    assert complaint in done.err
    assert not target.exists()


def test_only_the_selection_is_copied(call, run, target):
    assert call("copy", run, target, "--include", "model", "--exclude", "model/b").code == 0
    with open_run(target) as ckpt:
        assert ckpt.open().keys() == ["model/w"]
        assert ckpt.info().bytes_raw == 24000


def test_pattern_that_matches_nothing_is_an_error(call, run, target):
    done = call("copy", run, target, "--include", "modle")
    assert done.code == 1
    assert "nearest: model" in done.err
    assert not target.exists()


def test_damaged_step_among_all_fails_alone(call, run, target):
    with open_run(run) as ckpt:
        (blob,) = run.glob(f"data/{ckpt.info(2).uid}/blobs/*.raw")
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    done = call("copy", run, target, "--step", "all", "--json")
    assert done.code == 1
    assert not done.json["ok"]
    assert [copy["state"] for copy in done.json["copies"]] == ["copied", "failed", "copied"]
    assert "is damaged" in done.json["copies"][1]["error"]
    with open_run(target) as ckpt:
        assert ckpt.steps() == [1, 30]
    done = call("copy", run, target, "--step", "2")
    assert done.code == 1
    assert done.err.startswith("penstock: step 2 on ")
    assert "model/w" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("options", [["--step", "7"], ["--codec", "nonsense"]])
def test_missing_source_is_an_error(call, run, target, options):
    done = call("copy", run, target, *options)
    assert done.code == 1
    assert options[1] in done.err
    assert not target.exists()


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("zsdt", "--codec zsdt: no codec called 'zsdt' is installed; did you mean zstd?"),
        ("zstd", ""),
    ],
)
def test_a_misspelled_codec_is_reported_with_its_option(call, run, target, codec, words):
    done = call("copy", run, target, "--codec", codec)
    assert done.code == (1 if words else 0)
    assert words in done.err
    assert "configuration" not in done.err
    assert target.exists() == (not words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("match = '**'\ncodecs = ['zsdt']", "rules[0].codecs[0]: no codec called 'zsdt'"),
        ("match = 5\ncodecs = []", "1 problem\n  rules[0].match: Input should be a list"),
        (
            "match = 'x'\ncodecs = [{type = 'zstd', level = 900}]",
            "rules[0].codecs[0]: options of codec 'zstd': 1 problem\n  level: Input should be",
        ),
    ],
)
def test_errors_in_a_rules_file_name_the_file(call, run, target, text, words):
    file = target.with_name("rules.toml")
    file.write_text(f"[[rules]]\n{text}\n")
    done = call("copy", run, target, "--rules", file)
    assert done.code == 1
    assert done.err.startswith(f"penstock: {file}: ")
    assert words in done.err
