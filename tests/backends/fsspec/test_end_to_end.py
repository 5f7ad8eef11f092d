"""Checkpoints in S3, from save to delete, by the library and by the command."""

import subprocess
import sys

import pytest
import torch
from tests.integration.log.tiny import Tiny, bits_of, logged_with

import penstock
from penstock.core.errors import LostRaceError

pytestmark = pytest.mark.s3

PART = 5 << 20


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.Linear(900, 700))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    big = torch.randn(4 << 20, generator=generator)  # 16 MiB
    return {"model": model, "big": big, "epoch": seed}


def assert_equal(one, other):
    assert torch.equal(one["big"], other["big"])
    for a, b in zip(one["model"].parameters(), other["model"].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def config(folder, proxy):
    return {
        "backend": {
            "type": "fsspec",
            "url": f"s3://{folder}",
            "options": {"endpoint_url": proxy.url},
            "part_bytes": PART,
        }
    }


@pytest.mark.parametrize(("mode", "codecs"), [("blocking", []), ("async", ["zstd"])])
def test_round_trip(config, mode, codecs):
    saved = state(1)
    rules = [{"match": "**", "codecs": codecs}] if codecs else []
    with penstock.Checkpointer.from_config({**config, "rules": rules}) as checkpointer:
        report = checkpointer.save(saved, step=5, mode=mode).result()
        assert report.exclusive
        target = state(2)
        restored = checkpointer.restore(target)
        assert restored.step == 5
        assert_equal(target, saved)
        assert restored.values["epoch"] == 1
        assert checkpointer.verify(5, deep=True).ok


def test_several_steps_retention_delete_and_prune(config, plain_client, folder):
    with penstock.Checkpointer.from_config(
        {**config, "retention": {"keep_last": 2}}
    ) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save({"x": torch.full((10,), step)}, step=step, mode="blocking").result()
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3]
        checkpointer.delete(2)
        assert checkpointer.steps() == [3]
        checkpointer.prune()
        assert checkpointer.load()["x"].tolist() == [3] * 10
        checkpointer.delete(3)
    bucket, _, prefix = folder.partition("/")
    left = plain_client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    assert [e["Key"] for e in left if "/blobs/" in e["Key"] or "/commits/" in e["Key"]] == []


def test_lost_reply_to_the_commit_is_a_checkpoint(config, proxy):
    fault = proxy.fail("lost", method="PUT", part="/commits/")
    with penstock.Checkpointer.from_config(config) as checkpointer:
        report = checkpointer.save({"x": torch.arange(9)}, step=1, mode="blocking").result()
        assert report.step == 1
        assert checkpointer.steps() == [1]
    assert fault.seen == 1


def test_one_of_two_savers_of_a_step_wins(config, proxy):
    with (
        penstock.Checkpointer.from_config(config) as one,
        penstock.Checkpointer.from_config(config) as two,
    ):
        taken = proxy.take
        turn = []

        def take(method, path):
            if method == "PUT" and "/commits/" in path and not turn:
                turn.append(path)
                two.save({"x": torch.zeros(3)}, step=1, mode="blocking").result()
            return taken(method, path)

        proxy.take = take
        with pytest.raises(LostRaceError):
            one.save({"x": torch.ones(3)}, step=1, mode="blocking").result()
        assert one.load()["x"].tolist() == [0, 0, 0]


def test_store_without_conditional_puts_is_reported(config):
    config["backend"]["conditional_put"] = "no"
    with penstock.Checkpointer.from_config(config) as checkpointer:
        report = checkpointer.save({"x": torch.arange(9)}, step=1, mode="blocking").result()
        assert not report.exclusive
        assert checkpointer.steps() == [1]


def test_inspecting_s3_imports_no_fsspec_or_torch(config, folder, s3_url):
    with penstock.Checkpointer.from_config(config) as checkpointer:
        checkpointer.save({"x": torch.arange(9)}, step=1, mode="blocking").result()
    code = (
        "import sys\n"
        "from penstock.core.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print([n for n in ('torch', 'fsspec', 'moto') if n in sys.modules])\n"
    )
    url = f"s3://{folder}?endpoint_url={s3_url}"
    done = subprocess.run(
        [sys.executable, "-c", code, "ls", url], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("sync", "objects"), [(1, 9), (None, 2)])
def test_log_has_one_object_for_log_sync_steps(config, proxy, sync, objects):
    with penstock.Checkpointer.from_config({**config, "log_sync": sync}) as checkpointer:
        logged_with(checkpointer, 9)
    assert len(proxy.requests("PUT", ".log")) == objects
    found = Tiny(seed=9)
    with penstock.Checkpointer.from_config(config) as checkpointer:
        assert checkpointer.latest() == 9
        assert checkpointer.restore(found.state).replayed_steps == 9
    assert found.bits() == bits_of(9)
