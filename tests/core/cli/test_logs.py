"""What the commands do with the logs of checkpoints."""

import shutil
from pathlib import Path

import pytest
import torch
from tests.integration.log.test_ranks import LAST, flip, restore, save_and_log

import penstock
from penstock.core.log.segments import SegmentWriter, StoredLog
from penstock.core.storage.open import open_backend

BASE, END = 3, 8


@pytest.fixture(scope="module")
def logged_once(tmp_path_factory):
    root = tmp_path_factory.mktemp("logged") / "run"
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    state = {"model": model, "optimizer": optimizer}
    with penstock.Checkpointer(root) as ckpt:
        for step in range(END + 1):
            optimizer.zero_grad()
            model(torch.randn(3, 6)).square().mean().backward()
            optimizer.step()
            if step in {0, BASE}:
                ckpt.save(state, step, mode="blocking")
            else:
                ckpt.log(state, step)
    return root


@pytest.fixture
def logged(logged_once, tmp_path):
    """Steps 0 and 3 are saved, all others to 8 are logged."""
    return shutil.copytree(logged_once, tmp_path / "run")


def uid_of(root, step=BASE):
    with penstock.Checkpointer(root) as ckpt:
        return ckpt.info(step).uid


def segments(root, step=BASE):
    return sorted((Path(root) / "data" / uid_of(root, step) / "log").iterdir())


def entries(root, step=BASE):
    backend = open_backend(root)
    found = StoredLog(backend, uid_of(root, step), 0).entries
    backend.close()
    return found


def restored(root, step="latest"):
    """Return the step that a restore reaches, and the weights."""
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with penstock.Checkpointer(root) as ckpt:
        report = ckpt.restore({"model": model, "optimizer": optimizer}, step)
    return report.step, model.weight.tolist()


def test_ls_shows_the_logged_steps_and_the_sizes_of_logs(call, logged):
    done = call("ls", logged)
    assert "step 8 is logged: a restore loads step 3 and replays 5 steps" in done.out
    assert "LOG" in done.out.splitlines()[0]
    listed = call("ls", logged, "--json").json
    sizes = [sum(path.stat().st_size for path in segments(logged, step)) for step in (0, BASE)]
    assert listed["logged"] == END
    assert [one["bytes_logged"] for one in listed["checkpoints"]] == sizes
    assert call("ls", logged, "--last", "1", "--json").json["logged"] == END


def test_ls_shows_the_step_that_all_ranks_have(call, tmp_path):
    save_and_log(tmp_path)
    (second,) = tmp_path.glob("data/*/log/00001-*.log")
    size = second.stat().st_size
    flip(second, size // 5 * 4 + 200)  # the last entry
    assert call("ls", tmp_path, "--json").json["logged"] == LAST - 1
    shown = call("show", tmp_path, "--json").json["log"]
    assert (shown["ranks"], shown["entries"], shown["last"]) == (2, 10, LAST - 1)
    assert shown["is_cut"]


def test_ls_and_show_ignore_a_foreign_log(call, logged):
    (path,) = segments(logged)
    shutil.copy(segments(logged, 0)[0], path)
    done = call("ls", logged)
    assert (done.code, "is logged" in done.out) == (0, False)
    assert call("show", logged).code == 0


def test_show_has_the_figures_of_the_log_and_what_decides_its_bits(call, logged):
    done = call("show", logged, "--step", BASE)
    (path,) = segments(logged)
    assert "logged: steps 4 to 8 in 5 entries, " in done.out
    assert "\n  optimizer: class torch.optim.adamw.AdamW, replayer torch 1, torch " in done.out
    assert "cut off" not in done.out
    shown = call("show", logged, "--json").json["log"]
    assert shown["bytes_stored"] == path.stat().st_size
    assert shown["optimizers"]["optimizer"]["class"] == "torch.optim.adamw.AdamW"
    path.write_bytes(path.read_bytes()[:-5000])
    done = call("show", logged)
    assert "logged: steps 4 to 7 in 4 entries, " in done.out
    assert "; its end is cut off" in done.out


def test_show_without_a_log_says_nothing_of_it(call, logged):
    shutil.rmtree(segments(logged)[0].parent)
    assert "logged" not in call("show", logged).out
    assert call("show", logged, "--json").json["log"] is None


def test_show_of_a_logged_step_says_what_to_do(call, logged):
    done = call("show", logged, "--step", 5)
    assert done.code == 1
    assert "  Step 5 is logged: restore(state, 5) replays it." in done.err
    assert "is logged" not in call("show", logged, "--step", 9).err


def test_verify_reads_every_entry(call, logged):
    done = call("verify", logged)
    assert (done.code, done.err) == (0, "")
    assert " objects and 5 entries of its log, " in done.out
    assert "torn" not in done.out
    with penstock.Checkpointer(logged) as ckpt:
        report = ckpt.verify()
        whole = sum(path.stat().st_size for path in segments(logged))
        assert (report.ok, report.logged_entries) == (True, 5)
        assert report.bytes_read > whole * 0.9
        assert ckpt.verify(deep=False).logged_entries == 5
        assert ckpt.verify(deep=False).bytes_read < 9000


def test_verify_reports_a_damaged_entry_with_step_segment_and_offset(call, logged):
    (path,) = segments(logged)
    entry = entries(logged)[2]
    flip(path, entry.offset + 2000)
    done = call("verify", logged)
    assert done.code == 1
    assert f"the entry of step 6 at byte {entry.offset} is damaged" in done.out
    assert "a restore ends before that step" in done.out
    (damage,) = call("verify", logged, "--json").json["reports"][0]["damaged"]
    assert damage["what"].endswith("/log/00000-00000000.log")
    assert restored(logged)[0] == 5
    with penstock.Checkpointer(logged) as ckpt:
        assert not ckpt.verify().ok
        assert ckpt.verify(0).ok


def test_verify_reports_a_damaged_header_in_the_middle(call, logged):
    (path,) = segments(logged)
    entry = entries(logged)[2]
    flip(path, entry.offset + 20)
    done = call("verify", logged, "--quick")
    assert done.code == 1
    assert f"the entry at byte {entry.offset} is damaged: a restore ends at step 5" in done.out
    assert restored(logged)[0] == 5


def test_verify_reports_a_missing_segment(call, logged):
    (path,) = segments(logged)
    data, entry = path.read_bytes(), entries(logged)[2]
    path.write_bytes(data[: entry.offset])
    rest = path.with_name("00000-00000001.log")
    rest.write_bytes(data[entry.offset :])
    assert call("verify", logged).code == 0
    rest.rename(path)
    done = call("verify", logged)
    assert done.code == 1
    assert "continues an entry that is missing" in done.out


@pytest.mark.parametrize("cut", ["payload", "header", "flip"])
def test_torn_end_is_no_damage(call, logged, cut):
    (path,) = segments(logged)
    last = entries(logged)[-1]
    if cut == "flip":
        flip(path, last.offset + 2000)
    else:
        path.write_bytes(path.read_bytes()[: last.offset + (5000 if cut == "payload" else 50)])
    done = call("verify", logged)
    assert done.code == 0
    assert "the log of step 3 ends in a torn write, which is no damage: data/" in done.out
    assert f"at byte {last.offset}; a restore leaves it out" in done.out
    assert restored(logged)[0] == 7


def test_entries_that_a_later_run_has_replaced_do_not_count(call, logged):
    (path,) = segments(logged)
    flip(path, entries(logged)[2].offset + 2000)
    assert restored(logged)[0] == 5
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    state = {"model": model, "optimizer": optimizer}
    with penstock.Checkpointer(logged) as ckpt:
        assert ckpt.resume(state) == 6
        model(torch.randn(3, 6)).square().mean().backward()
        optimizer.step()
        assert ckpt.log(state, 6)
    done = call("verify", logged)
    assert (done.code, " and 3 entries of its log" in done.out) == (0, True)


def test_verify_decodes_entries_whose_bytes_are_as_written(call, logged):
    backend = open_backend(logged)
    uid, last = uid_of(logged), entries(logged)[-1]
    writer = SegmentWriter(backend, uid, 0, 1, previous=last.header.digest)
    writer.append(9, {"commits/00000009-0.json": [b"nonsense"]}, sync_every=1)
    writer.append(10, {"commits/00000010-0.json": [b"nonsense"]}, sync_every=1)
    writer.close()
    done = call("verify", logged)
    assert done.code == 1
    assert "the entry of step 9 at byte 0 is damaged" in done.out
    assert call("verify", logged, "--quick").code == 0


def train(root, step):
    """Resume a copy, and log one more step than it has."""
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    state = {"model": model, "optimizer": optimizer}
    with penstock.Checkpointer(root) as ckpt:
        assert ckpt.resume(state) == step
        model(torch.randn(3, 6)).square().mean().backward()
        optimizer.step()
        assert ckpt.log(state, step)


@pytest.mark.parametrize(
    "how", [[], ["--codec", "zstd"], pytest.param(["--flatten"], marks=pytest.mark.slow)]
)
def test_copy_has_the_log_and_restores_to_the_same_bits(call, logged, tmp_path, how):
    target = tmp_path / "copy"
    done = call("copy", logged, target, *how)
    assert (done.code, done.err) == (0, "")
    assert "5 entries of its log copied" in done.out
    assert restored(target) == restored(logged)
    assert restored(target, 5) == restored(logged, 5)
    assert call("verify", target).code == 0
    assert (uid_of(target) == uid_of(logged)) == (not how)
    if not how:
        assert segments(target)[0].read_bytes() == segments(logged)[0].read_bytes()
    train(target, END + 1)
    assert restored(target)[0] == END + 1


def test_copies_of_all_steps_have_their_logs(call, logged, tmp_path):
    copies = call("copy", logged, tmp_path / "copy", "--step", "all", "--json").json["copies"]
    assert [one["entries_copied"] for one in copies] == [2, 5]
    assert restored(tmp_path / "copy", 2) == restored(logged, 2)


def test_same_copy_again_copies_only_later_entries(call, logged, tmp_path):
    target = tmp_path / "copy"
    call("copy", logged, target)
    before = [path.stat().st_mtime_ns for path in segments(target)]
    done = call("copy", logged, target)
    assert (done.code, "log" in done.out) == (0, False)
    assert [path.stat().st_mtime_ns for path in segments(target)] == before
    train(logged, END + 1)
    done = call("copy", logged, target)
    assert "already there\n1 entry of its log copied\n" in done.out
    assert restored(target) == restored(logged)
    assert restored(target)[0] == END + 1


def test_torn_end_is_not_copied(call, logged, tmp_path):
    (path,) = segments(logged)
    path.write_bytes(path.read_bytes()[:-5000])
    done = call("copy", logged, tmp_path / "copy")
    assert "4 entries of its log copied" in done.out
    (copy,) = segments(tmp_path / "copy")
    assert (
        copy.stat().st_size == entries(logged)[-1].offset + entries(logged)[0].header.stored_bytes
    )
    assert "torn" not in call("verify", tmp_path / "copy").out


@pytest.mark.parametrize("number", [0, 2])
def test_entries_before_damage_are_copied(call, logged, tmp_path, number):
    entry = entries(logged)[number]
    flip(segments(logged)[0], entry.offset + 2000)
    done = call("copy", logged, tmp_path / "copy")
    assert f"not all of its log is copied: the entry of step {4 + number} at byte" in done.out
    assert restored(tmp_path / "copy")[0] == BASE + number
    assert call("verify", tmp_path / "copy").code == 0


def test_copy_replaces_no_log_that_a_run_at_the_target_has_continued(call, logged, tmp_path):
    target = tmp_path / "copy"
    (path,) = segments(logged)
    whole = path.read_bytes()
    path.write_bytes(whole[: entries(logged)[-1].offset])
    call("copy", logged, target)
    train(target, END)
    kept = restored(target)
    path.write_bytes(whole)
    done = call("copy", logged, target)
    assert "has a different log from step 8 on (--overwrite replaces it)" in done.out
    assert restored(target) == kept


def test_copy_that_may_not_restore_to_the_same_bits_has_no_log(call, logged, tmp_path):
    done = call("copy", logged, tmp_path / "part", "--include", "model")
    assert "not all of its log is copied: only a part of the checkpoint was copied" in done.out
    model = torch.nn.Linear(100, 64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with penstock.Checkpointer(tmp_path / "large") as ckpt:
        ckpt.save({"model": model, "optimizer": optimizer}, 1, mode="blocking")
        model(torch.randn(3, 100)).square().mean().backward()
        optimizer.step()
        ckpt.log({"model": model, "optimizer": optimizer}, 2)
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rules]]\nmatch = "model/**"\ncodecs = ["cast"]\n')
    done = call("copy", tmp_path / "large", tmp_path / "rounded", "--rules", rules)
    assert not done.err
    assert "not all of its log is copied: codecs of the copy may round values" in done.out
    assert len([*tmp_path.glob("*/data/*/log/*")]) == 3  # of the two runs


def test_log_is_copied_to_and_from_a_run_in_tiers(call, logged, tmp_path):
    tiers = f"tiered://?fast={tmp_path}/fast&durable={tmp_path}/durable"
    assert "5 entries of its log copied" in call("copy", logged, tiers).out
    (path,) = tmp_path.glob("[fd]*/data/*/log/*")
    assert path.is_relative_to(tmp_path / "fast")
    assert restored(tiers) == restored(logged)
    train(tiers, END + 1)
    assert "6 entries of its log copied" in call("copy", tiers, tmp_path / "copy").out
    assert restored(tmp_path / "copy") == restored(tiers)
    assert restored(tiers)[0] == END + 1


def test_logs_of_all_ranks_are_copied(call, tmp_path):
    save_and_log(tmp_path / "run")
    assert "10 entries of its log copied" in call("copy", tmp_path / "run", tmp_path / "copy").out
    assert restore(tmp_path / "copy")[1].step == LAST


def test_commands_on_a_logged_step_say_what_to_do(call, logged, tmp_path):
    for words in (
        ["diff", logged, "--step-a", 3, "--step-b", 5],
        ["verify", logged, "--step", 5],
        ["copy", logged, tmp_path / "copy", "--step", 5],
        ["export", logged, tmp_path / "files", "--to", "safetensors", "--step", 5],
    ):
        done = call(*words)
        assert done.code > 0
        assert "Step 5 is logged: restore(state, 5) replays it." in done.err


def test_export_says_that_it_leaves_the_log_out(call, logged, tmp_path):
    done = call("export", logged, tmp_path / "files", "--to", "safetensors")
    assert "its log, up to step 8, is left out: only saved steps are exported" in done.out


def test_doctor_counts_the_bytes_of_logs(call, logged):
    checks = call("doctor", logged, "--probe-size", "1MiB", "--json").json["checks"]
    (found,) = [check for check in checks if check["name"] == "checkpoints"]
    size = sum(path.stat().st_size for step in (0, BASE) for path in segments(logged, step))
    assert found["values"]["logs_bytes"] == size
    assert "; logs of " in found["found"]
