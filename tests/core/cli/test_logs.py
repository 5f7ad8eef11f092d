"""What the commands do with the logs of checkpoints."""

import shutil
from pathlib import Path

import pytest
import torch
from tests.integration.log.test_ranks import LAST, flip, save_and_log

import penstock
from penstock.core.log.segments import StoredLog
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
    assert "step 8 is logged: a restore replays 3 + 5 steps" in done.out
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


def test_ls_and_show_list_the_checkpoint_if_its_log_is_foreign(call, logged):
    (path,) = segments(logged)
    shutil.copy(segments(logged, 0)[0], path)
    done = call("ls", logged)
    assert (done.code, "the log of step 3 cannot be read" in done.out) == (0, True)
    done = call("show", logged)
    assert (done.code, "the log cannot be read: " in done.out) == (0, True)


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
