"""What the commands print on delta chains."""

import re
import shlex

import pytest
import torch
from tests.integration.deltas.test_chains import run_of

import penstock
from penstock.core.restore.sweep import sweep


@pytest.fixture(scope="module")
def chained(tmp_path_factory):
    """Step 0 is whole, 1 to 3 are a chain on it; 2 is deleted; 4 is whole."""
    root = tmp_path_factory.mktemp("chained") / "run"
    run_of(f"posix://{root}", range(5), deltas={"every": 4})
    with penstock.Checkpointer(f"posix://{root}") as ckpt:
        ckpt.delete(2)
    return root


def columns(line):
    return re.split(r" {2,}", line.strip())


def test_ls_shows_the_base_of_each_checkpoint_and_what_it_needs(call, chained):
    done = call("ls", chained)
    assert done.code == 0
    title, *rows, kept = done.out.splitlines()
    assert columns(title)[2] == "BASE"
    assert columns(title)[7] == "NEEDS"
    assert [columns(row)[2] for row in rows] == ["none", "0", "deleted 2", "none"]
    assert columns(rows[0])[6] == columns(rows[0])[7]
    assert re.fullmatch(
        r"[\d.]+ KiB of 1 deleted or replaced checkpoint is kept, since step 3 needs it; "
        rf"`penstock compact {chained} --dry-run` shows the run's size after compacting",
        kept,
    )


def test_delete_names_the_users_of_kept_data(call, tmp_path):
    root = tmp_path / "run"
    run_of(f"posix://{root}", range(4), deltas={"every": 3})
    for more in ("--dry-run", "--yes"):
        *_, last = call("delete", root, 0, 1, more).out.splitlines()
        assert last.startswith("step 2 needs the data that stays; ")
    *_, last = call("delete", root, 2, "--yes").out.splitlines()
    assert last.endswith("freed; 1 checkpoint is left")


def test_show_lists_each_link_with_the_bytes_a_restore_reads(call, chained):
    found = call("show", chained, "--step", 3, "--json").json
    chain = found["chain"]
    assert [(link["step"], link["state"]) for link in chain] == [
        (3, "ok"),
        (2, "deleted"),
        (1, "ok"),
        (0, "ok"),
    ]
    with penstock.Checkpointer(f"posix://{chained}") as ckpt:
        report = ckpt.verify(3)
        contents = ckpt.open(3).contents
        sweep(contents, lambda *_: None)
    manifest_bytes = contents.manifest.bytes_read
    assert sum(link["bytes_read"] for link in chain) == report.bytes_read - manifest_bytes
    assert {one["path"]: one["links"] for one in found["objects"]}["model/odd"] == 3


def test_verify_lists_a_damaged_link_once_with_its_users(call, tmp_path):
    root = tmp_path / "run"
    run_of(f"posix://{root}", range(4), deltas={"every": 9})
    with penstock.Checkpointer(f"posix://{root}") as ckpt:
        uid = ckpt.info(1).uid
    (blob,) = (root / "data" / uid / "blobs").iterdir()
    blob.unlink()
    done = call("verify", root, "--all")
    assert done.code == 1
    assert done.out.count(f"cannot read data/{uid}/blobs/{blob.name}") == 1
    lines = done.out.splitlines()
    above = "the damage is in its chain, in the blobs of step 1; it is listed above"
    assert lines.count(above) == 2
    assert lines[-2] == "step 1 is damaged: steps 2, 3 need it"
    assert lines[-1] == "4 checkpoints verified, 3 damaged"
    reports = call("verify", root, "--all", "--json").json["reports"]
    one = call("verify", root, "--step", 3).out.splitlines()
    assert one[-1] == "the damage is in its chain, in the blobs of step 1"
    link = {"uid": uid, "step": 1, "state": "ok"}
    assert [report["links"] for report in reports] == [[], [], [link], [link]]


def test_advice_to_compact_names_the_run_as_given(call, tmp_path):
    """The URL in a backend's name is not an argument: `tiered(posix:///a, posix:///b)`."""
    url = f"tiered://?fast=posix://{tmp_path}/fast&durable=posix://{tmp_path}/durable"
    run_of(url, range(3), deltas={"every": 9})
    deleted = call("delete", url, 0, "--yes").out.splitlines()[-1]
    assert deleted.startswith("steps 1, 2 need the data that stays; `penstock compact ")
    for line in (deleted, call("ls", url).out.splitlines()[-1]):
        command, *arguments = shlex.split(line.split("`")[1])
        assert command == "penstock"
        assert call(*arguments).out.startswith("step 1 would stand alone: ")


def test_ls_json_has_base_and_kept_data(call, chained):
    found = call("ls", chained, "--json").json
    zero, one, three, four = found["checkpoints"]
    assert zero["base"] is four["base"] is None
    assert one["base"] == {"uid": zero["uid"], "step": 0, "age": 1}
    assert (three["base"]["step"], three["base"]["age"]) == (2, 3)
    (kept,) = found["kept"]
    assert (kept["uid"], kept["step"]) == (three["base"]["uid"], 2)
    assert (kept["state"], kept["borrowers"]) == ("deleted", [3])
    blobs = chained / "data" / kept["uid"] / "blobs"
    assert kept["bytes"] == sum(blob.stat().st_size for blob in blobs.iterdir())
    assert three["bytes_borrowed"] == kept["bytes"] + zero["bytes_stored"] + one["bytes_stored"]


def test_show_prints_the_chain_above_the_objects(call, chained):
    done = call("show", chained, "--step", 3, "--tree", "--depth", 1)
    _, kind, _, title, *links = done.out.splitlines()
    assert kind.startswith("3 saves after one without a base; a restore reads ")
    assert columns(title) == ["CHAIN", "READ", "FRAMES", "UID"]
    names = [columns(line)[0] for line in links[:4]]
    assert names == ["step 3", "step 2 (deleted)", "step 1", "step 0"]
    assert any(columns(line)[-1] == "LINKS" for line in links)


def test_shared_data_is_borrowed_not_stored(call, tmp_path):
    root, still = tmp_path / "run", torch.randn(300_000)
    with penstock.Checkpointer(f"posix://{root}", share=True) as ckpt:
        for step in (1, 2):
            state = {"still": {"a": still}, "moves": torch.randn(300_000)}
            ckpt.save(state, step=step, mode="blocking")
    found = call("show", root, "--step", 2, "--json").json
    sizes = {o["path"]: (o["bytes_stored"], o["bytes_borrowed"]) for o in found["objects"]}
    assert sizes == {"still/a": (0, 1_200_000), "moves": (1_200_000, 0)}
    done = call("show", root, "--step", 2, "--tree")
    title, folder, *_ = done.out.splitlines()[-6:]
    assert columns(title)[-1] == "BORROWED"
    assert columns(folder)[-1] == "1.1 MiB"
    assert "1.1 MiB stored (2.00x), 1.1 MiB borrowed" in done.out.splitlines()[-1]
    assert "BORROWED" not in call("show", root, "--step", 1).out
