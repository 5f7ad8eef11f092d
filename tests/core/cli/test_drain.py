"""`penstock drain`, and what `ls` and `verify` print on tiers."""

import pytest
from tests.integration.support import checkpointer, make_state

from penstock import Checkpointer
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.tiers.whereabouts import mark


class Run:
    """A run in two folders, saved to the fast one as if the durable one were absent."""

    def __init__(self, root):
        self.fast, self.durable = root / "fast", root / "durable"
        self.url = f"tiered://?fast=posix://{self.fast}&durable=posix://{self.durable}"

    def save(self, *steps, marked=True):
        backend = PosixBackend(PosixConfig(path=str(self.fast)))
        with checkpointer(backend) as ckpt:
            for step in steps:
                ckpt.save(make_state(step), step, mode="blocking")
                if marked:
                    mark(backend, Catalog(backend).record(step).uid, step)
        backend.close()

    def blob(self, root):
        return next(path for path in sorted(root.rglob("*.raw")))


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_drain_copies_leftovers(call, run):
    run.save(1, 2)
    done = call("drain", run.url)
    assert done.code == 0
    assert "copied 2 checkpoints," in done.out
    assert call("ls", f"posix://{run.durable}", "--json").json["checkpoints"][1]["step"] == 2
    done = call("drain", run.url)
    assert (done.code, done.out.strip()) == (0, "nothing was left to copy")


def test_uncopyable_step_is_reported_once_with_exit_code_one(call, run, caplog):
    run.save(1, 2)
    data = bytearray(run.blob(run.fast).read_bytes())
    data[len(data) // 2] ^= 1
    run.blob(run.fast).write_bytes(data)
    done = call("drain", run.url)
    assert done.code == 1
    assert "cannot be copied to durable" in done.out
    assert "cannot be copied" not in caplog.text
    assert "still to be copied: steps" in done.out


def with_another_at_step_1(run):
    run.save(1, 2)
    with checkpointer(PosixBackend(PosixConfig(path=str(run.durable)))) as ckpt:
        ckpt.save(make_state(9), 1, mode="blocking")


@pytest.mark.parametrize(("tier", "left"), [("fast", 9), ("durable", 1)])
def test_deleting_in_one_tier_ends_an_endless_wait(call, run, tier, left):
    with_another_at_step_1(run)
    assert call("drain", run.url).code == 1
    refused = call("delete", run.url, "1", "--yes")
    assert refused.code == 1
    assert "step 1 is not the same checkpoint in tiers fast and durable" in refused.err
    assert call("delete", run.url, "1", "--yes", "--tier", tier).code == 0
    assert call("drain", run.url).code == 0
    found = call("ls", run.url, "--json").json["checkpoints"]
    assert [(c["step"], c["waiting"]) for c in found] == [(1, False), (2, False)]
    with Checkpointer(run.url) as ckpt:
        assert ckpt.load(1)["epoch"] == left
    assert call("prune", run.url, "--grace", "0s", "--yes", "--json").json["uids"] == []


def test_ls_shows_tiers_of_checkpoints(call, run):
    run.save(1)
    call("drain", run.url)
    run.save(2)
    run.save(3, marked=False)
    found = call("ls", run.url, "--json").json
    assert [(c["step"], c["tiers"], c["waiting"]) for c in found["checkpoints"]] == [
        (1, ["fast", "durable"], False),
        (2, ["fast"], True),
        (3, ["fast"], False),
    ]
    assert found["silent"] == {}
    shown = call("ls", run.url).out
    assert "TIERS" in shown
    assert "fast+durable" in shown
    assert "fast (to copy)" in shown


def test_ls_continues_without_an_unresponsive_tier(call, run):
    run.save(1)
    run.durable.symlink_to(run.durable)  # too many levels of links
    found = call("ls", run.url)
    assert found.err.startswith("penstock: tier durable does not answer: ")
    assert "ok     fast (to copy)" in found.out
    assert found.code == 0


@pytest.mark.parametrize("how", [(), ("--raw",)], ids=["verbatim", "encoded"])
def test_a_copy_to_tiers_targets_the_last_and_checks_the_others(call, run, tmp_path, how):
    one = tmp_path / "one"
    with checkpointer(PosixBackend(PosixConfig(path=str(one)))) as ckpt:
        ckpt.save(make_state(2), 2).result(60)
        ckpt.save(make_state(3), 3).result(60)
    run.save(2)
    assert call("copy", one, run.url, *how).code == 0
    assert Catalog(PosixBackend(PosixConfig(path=str(run.durable)))).steps() == [3]
    assert Catalog(PosixBackend(PosixConfig(path=str(run.fast)))).steps() == [2]
    found = call("ls", run.url, "--json").json["checkpoints"]
    assert {c["step"]: c["tiers"] for c in found} == {2: ["fast"], 3: ["durable"]}
    done = call("copy", one, run.url, "--step", "2", *how)
    assert done.code == 1
    assert "step 2" in done.err
    assert "--overwrite" in done.err
    assert call("copy", one, run.url, "--step", "2", "--overwrite", *how).code == 0
    with Checkpointer(run.url) as ckpt:
        assert ckpt.info(2).generation == 2
        assert ckpt.verify(2).ok
    assert call("drain", run.url).code == 0
    assert call("ls", run.url, "--json").json["checkpoints"][0]["generation"] == 2


def test_a_conflicting_checkpoint_is_reported_with_a_remedy(call, run):
    with_another_at_step_1(run)
    done = call("drain", run.url)
    assert done.code == 1
    printed = " ".join(done.out.split())
    text = "step 1 is a different checkpoint in tier durable: `penstock delete URL 1 --tier"
    assert text in printed
    assert "still to be copied: steps 1; remove the reported cause first" in printed
    assert "run the command again" not in printed


def test_deleting_in_one_tier_spares_the_others(call, run):
    run.save(1)
    assert call("drain", run.url).code == 0
    assert call("delete", run.url, "1", "--yes", "--tier", "fast").code == 0
    assert call("ls", run.url, "--json").json["checkpoints"][0]["tiers"] == ["durable"]
    refused = call("delete", run.url, "1", "--yes", "--tier", "durable")
    assert refused.code == 1
    assert "no whole checkpoint would be left" in refused.err
    done = call("delete", run.url, "1", "--yes", "--tier", "slow")
    assert done.code == 1
    assert "has no tier 'slow'; it has fast, durable" in done.err
    done = call("delete", f"posix://{run.durable}", "1", "--yes", "--tier", "fast")
    assert "has no tier 'fast'; it has no tiers" in done.err


def test_one_place_has_nothing_to_drain(call, run):
    run.save(1)
    done = call("drain", f"posix://{run.fast}")
    assert done.code == 1
    assert "tiered://?fast=" in done.err


def test_ls_fails_if_no_tier_answers(call, run):
    for root in (run.fast, run.durable):
        root.symlink_to(root)
    found = call("ls", run.url)
    assert (found.code, found.out) == (1, "")
    assert "no tier answers: fast: " in found.err
    assert "; durable: " in found.err


def test_verify_names_the_tier_of_the_damage(call, run):
    run.save(1)
    call("drain", run.url)
    data = bytearray(run.blob(run.fast).read_bytes())
    data[len(data) // 2] ^= 1
    run.blob(run.fast).write_bytes(data)
    done = call("verify", run.url, "--json")
    assert done.code == 1
    details = [d["detail"] for d in done.json["reports"][0]["damaged"]]
    assert details
    assert all("in tier fast" in detail for detail in details)
