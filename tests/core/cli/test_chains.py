"""What the commands say of chains of deltas."""

import re

import pytest
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
        rf"`penstock compact {chained} --dry-run` says what the run would take without that",
        kept,
    )


def test_delete_names_who_needs_the_data_that_stays(call, tmp_path):
    root = tmp_path / "run"
    run_of(f"posix://{root}", range(4), deltas={"every": 3})
    for more in ("--dry-run", "--yes"):
        *_, last = call("delete", root, 0, 1, more).out.splitlines()
        assert last.startswith("step 2 needs the data that stays; ")
    *_, last = call("delete", root, 2, "--yes").out.splitlines()
    assert last.endswith("freed; 1 checkpoint is left")


def test_show_lists_the_links_and_what_restoring_reads_of_each(call, chained):
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


def test_verify_lists_a_damaged_link_once_and_who_needs_it(call, tmp_path):
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
    above = "the damage lies in its chain, in the blobs of step 1; it is listed above"
    assert lines.count(above) == 2
    assert lines[-2] == "step 1 is damaged: steps 2, 3 need it"
    assert lines[-1] == "4 checkpoints verified, 3 damaged"
    reports = call("verify", root, "--all", "--json").json["reports"]
    one = call("verify", root, "--step", 3).out.splitlines()
    assert one[-1] == "the damage lies in its chain, in the blobs of step 1"
    link = {"uid": uid, "step": 1, "state": "ok"}
    assert [report["links"] for report in reports] == [[], [], [link], [link]]
