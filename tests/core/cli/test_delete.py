"""`penstock delete` and `penstock prune`: what goes, what stays, and when they ask."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from tests.core.cli.command import tree_of

import penstock
from penstock.backends.posix import PosixBackend
from penstock.core.format.commit_record import encode_commit
from penstock.core.format.records import (
    BlobRecord,
    CommitRecord,
    IndexEntry,
    PartEntry,
    commit_name,
    data_prefix,
    index_name,
    part_name,
)
from penstock.core.units import seconds_of


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    root = tmp_path_factory.mktemp("three") / "run"
    with penstock.Checkpointer(f"posix://{root}") as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"w": torch.full((5000,), float(step))}, step=step, mode="blocking")
    return root


@pytest.fixture
def run(three, tmp_path):
    return shutil.copytree(three, tmp_path / "run")


def steps(root):
    with penstock.Checkpointer(f"posix://{root}") as ckpt:
        return ckpt.steps()


def stored(root):
    return sum(path.stat().st_size for path in (root / "data").rglob("*") if path.is_file())


def age(folder, seconds):
    then = time.time() - seconds
    for path in Path(folder).rglob("*"):
        os.utime(path, (then, then))


def broken_save(root, uid, *, seconds):
    """The leftovers of a save killed before its commit."""
    blobs = root / "data" / uid / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "00000-0.raw").write_bytes(bytes(3000))
    age(root / "data" / uid, seconds)


def record(step, uid, *, generation=0, references=()):
    """A commit record whose data is one file of 1000 bytes."""
    return CommitRecord(
        uid=uid,
        step=step,
        generation=generation,
        created="2026-01-31T23:59:59Z",
        world_size=1,
        index=IndexEntry(index_name(uid), 10, 10, "0" * 64),
        parts=(PartEntry(part_name(uid, 0), 10, 5, "0" * 64),),
        objects=1,
        bytes_raw=1000,
        bytes_stored=1000,
        borrowed=tuple(BlobRecord(f"{data_prefix(u)}blobs/00000-0.raw", 1000) for u in references),
    )


def publish(root, *records):
    backend = PosixBackend(PosixBackend.Config(path=str(root)))
    for one in records:
        backend.publish(f"{data_prefix(one.uid)}blobs/00000-0.raw", bytes(1000))
        backend.publish(commit_name(one.step, one.generation), encode_commit(one))
    backend.close()


# -- delete -------------------------------------------------------------------------------------


def test_delete_removes_steps_and_reports_freed_bytes(call, run):
    done = call("delete", run, 3, 1, 1, "--yes")
    assert (done.code, done.err) == (0, "")
    assert "step 1 deleted: " in done.out
    assert done.out.endswith("freed; 1 checkpoint is left\n")
    assert steps(run) == [2]
    left = stored(run)
    report = call("delete", run, 2, "--yes", "--force", "--json").json
    assert report["deleted"][0]["step"] == 2
    assert report["remaining"] == []
    assert report["bytes_freed"] == report["deleted"][0]["size_bytes"] == left > 20_000
    assert stored(run) == 0


def test_delete_dry_run_prints_the_same_changes_nothing(call, run):
    before = tree_of(run)
    printed = call("delete", run, 1, 2, "--dry-run", "--json").json
    assert tree_of(run) == before
    assert printed["dry_run"] is True
    assert "would be freed; 1 checkpoint is left" in call("delete", run, 1, 2, "--dry-run").out
    did = call("delete", run, 1, 2, "--yes", "--json").json
    assert {**printed, "dry_run": False} == did
    assert did["bytes_freed"] > 40_000


def test_delete_without_a_terminal_needs_yes(call, run, monkeypatch):
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        done = call("delete", run, 1)
    assert done.code == 2
    assert "--yes" in done.err
    assert steps(run) == [1, 2, 3]


def test_delete_refuses_the_last_checkpoint_without_force(call, run):
    for arguments in (("--yes",), ("--dry-run",)):
        done = call("delete", run, 1, 2, 3, *arguments)
        assert (done.code, done.out) == (1, "")
        assert "--force" in done.err
    assert steps(run) == [1, 2, 3]
    assert call("delete", run, 1, 2, 3, "--yes", "--force").code == 0
    assert steps(run) == []


def test_damaged_checkpoint_does_not_count_as_remaining(call, run):
    (run / "commits" / "00000003-0.json").write_bytes(b"nonsense\n")
    assert call("delete", run, 1, 2, "--yes").code == 1
    assert steps(run) == [1, 2, 3]
    done = call("delete", run, 3, "--yes")
    assert done.code == 0
    assert "`penstock prune` deletes leftovers" in done.out
    assert steps(run) == [1, 2]


def test_delete_keeps_data_that_another_checkpoint_uses_and_does_not_count_it(call, tmp_path):
    base, later = "a" * 32, "b" * 32
    publish(tmp_path, record(1, base), record(2, later, references=(base,)))
    for arguments in (("--dry-run",), ("--yes",)):
        report = call("delete", tmp_path, 1, "--json", "--force", *arguments).json
        assert report["bytes_freed"] == 0
        assert report["deleted"][0]["size_bytes"] == 1000
    assert (tmp_path / "data" / base).exists()
    assert not (tmp_path / "commits" / "00000001-0.json").exists()


# -- prune --------------------------------------------------------------------------------------

OLD, YOUNG = "1" * 32, "2" * 32
DAY_S = 86400


def test_prune_deletes_old_leftovers_and_keeps_young(call, run):
    broken_save(run, OLD, seconds=DAY_S + 100)
    broken_save(run, YOUNG, seconds=DAY_S - 100)
    before = tree_of(run)
    printed = call("prune", run, "--dry-run")
    assert printed.code == 0
    assert f"  data/{OLD}\n" in printed.out
    assert "2.9 KiB would be freed: 1 attempt with 1 file" in printed.out
    assert "1 attempt younger than 24 h (2.9 KiB)" in printed.out
    assert {p: v for p, v in tree_of(run).items() if v} == {p: v for p, v in before.items() if v}
    report = call("prune", run, "--json").json
    assert (report["uids"], report["names"], report["size_bytes"]) == ([OLD], 1, 3000)
    assert (report["younger"], report["younger_bytes"]) == ([YOUNG], 3000)
    assert not (run / "data" / OLD).exists()
    assert (run / "data" / YOUNG).exists()
    assert steps(run) == [1, 2, 3]
    assert call("prune", run).out.startswith("nothing to prune: no leftovers older than 24 h\n")
    assert call("verify", run, "--all").code == 0


def test_prune_with_a_short_grace_needs_yes_to_delete_anything(call, run, monkeypatch):
    broken_save(run, YOUNG, seconds=3700)
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert call("prune", run, "--grace", "2h").code == 0  # deletes nothing, so asks nothing
        done = call("prune", run, "--grace", "1h")
    assert done.code == 2
    assert "--yes" in done.err
    assert (run / "data" / YOUNG).exists()
    assert call("prune", run, "--grace", "1h", "--yes").code == 0
    assert not (run / "data" / YOUNG).exists()


def test_prune_deletes_nothing_if_a_record_is_unreadable(call, run):
    broken_save(run, OLD, seconds=DAY_S * 2)
    (run / "commits" / "00000002-0.json").write_bytes(b"nonsense\n")
    done = call("prune", run)
    assert done.code == 1
    assert "commits/00000002-0.json" in done.out
    report = call("prune", run, "--json")
    assert report.code == 1
    assert len(report.json["refused"]) == 1
    assert (run / "data" / OLD).exists()


def test_a_run_copied_data_first_loses_nothing_to_prune(call, run, tmp_path):
    age(run, 3 * DAY_S)
    target = tmp_path / "copy"
    shutil.copytree(run / "data", target / "data")
    before = tree_of(target)
    done = call("prune", target, "--yes")
    assert (done.code, tree_of(target)) == (1, before)
    assert "data of 3 attempts to save, but no commit record" in done.out
    assert "--all" in done.out
    printed = call("ls", target).out
    assert "3 attempts to save (steps 1, 2, 3) lack only the commit record" in printed
    assert sorted(call("ls", target, "--json").json["unrecorded"].values()) == [1, 2, 3]
    doctor = call("doctor", target, "--no-probe").out
    assert "3 saves, but no commit record" in doctor
    assert "copy the files of its folder `commits`" in doctor
    assert "penstock prune" not in printed + doctor
    # The first record has arrived, the others are in flight.
    shutil.copytree(run / "commits", target / "commits", ignore=lambda *_: ["00000003-0.json"])
    printed = call("prune", target, "--yes")
    assert printed.code == 0
    assert (
        "may still arrive: 1 attempt; `prune` deletes this data after a later checkpoint, or "
        "with --all" in printed.out
    )
    shutil.copytree(run / "commits", target / "commits", dirs_exist_ok=True)
    assert call("verify", target, "--all").code == 0
    assert call("ls", target, "--json").json["unrecorded"] == {}


def test_prune_all_asks_and_deletes_possible_orphans(call, run, monkeypatch):
    age(run, 3 * DAY_S)
    shutil.rmtree(run / "commits")
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert call("prune", run, "--all").code == 2
    assert stored(run)
    assert len(call("prune", run, "--all", "--yes", "--json").json["uids"]) == 3
    assert not stored(run)


def test_delete_refuses_the_last_step_with_its_data(call, run):
    """The newer ones are listed, but have lost a blob."""
    with penstock.Checkpointer(f"posix://{run}") as ckpt:
        for step in (2, 3):
            next((run / "data" / ckpt.info(step).uid).glob("blobs/*")).unlink()
    done = call("delete", run, 1, "--yes")
    assert done.code == 1
    assert "no whole checkpoint would be left" in done.err
    assert steps(run) == [1, 2, 3]
    assert call("delete", run, 2, 3, "--yes").code == 0
    assert steps(run) == [1]


def test_invalid_grace_time_is_a_wrong_call(call, tmp_path):
    for text in ["", "h", "-1h", "1w", "1 h 30 min", "1e3", "nan"]:
        done = call("prune", tmp_path, f"--grace={text}")
        assert done.code == 2
        assert "--grace" in done.err


def test_delete_of_a_missing_step_deletes_none(call, run):
    done = call("delete", run, 1, 7, "--yes")
    assert done.code == 1
    assert "no checkpoint of step 7" in done.err
    assert "steps there: 1, 2, 3" in done.err
    assert steps(run) == [1, 2, 3]


def test_delete_frees_nothing_while_another_record_is_unreadable(call, run):
    (run / "commits" / "00000003-0.json").write_bytes(b"nonsense\n")
    for arguments in (("--dry-run",), ("--yes",)):
        assert call("delete", run, 1, "--json", *arguments).json["bytes_freed"] == 0
    assert steps(run) == [2, 3]


def test_delete_drops_every_generation_of_a_step(call, tmp_path):
    uids = ("a" * 32, "b" * 32, "c" * 32)
    publish(
        tmp_path,
        record(1, uids[0]),
        record(1, uids[1], generation=1),
        record(2, uids[2]),
    )
    report = call("delete", tmp_path, 1, "--yes", "--force", "--json").json
    assert report["deleted"] == [
        {"step": 1, "generations": 2, "uids": list(uids[:2]), "size_bytes": 2000}
    ]
    assert report["bytes_freed"] == 2000
    assert steps(tmp_path) == [2]


def test_prune_counts_bytes_of_overwritten_generations(call, tmp_path):
    root, before = tmp_path / "run", tmp_path / "before"
    with penstock.Checkpointer(f"posix://{root}") as ckpt:
        old = ckpt.save({"w": torch.zeros(500)}, 1, mode="blocking").result().uid
        shutil.copytree(root, before)
        ckpt.save({"w": torch.ones(500)}, 1, mode="blocking", overwrite=True)
    shutil.copytree(before, root, dirs_exist_ok=True)  # a crash came before the deletion
    size = sum(path.stat().st_size for path in (before / "data").rglob("*") if path.is_file())
    printed = call("prune", root, "--dry-run", "--json").json
    assert printed["superseded"] == ["commits/00000001-0.json"]
    assert (printed["superseded_bytes"], printed["younger"]) == (size, [])
    assert call("prune", root).out.endswith(" freed: 1 overwritten generation\n")
    assert not (root / "data" / old).exists()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("90s", 90), ("1.5min", 90), ("24h", 86400), (" 2 d ", 172800)],
)
def test_grace_is_a_number_with_a_unit(text, seconds):
    assert seconds_of(text) == seconds
