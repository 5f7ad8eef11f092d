"""Processes that save, overwrite, delete and prune one run while others read it."""

import subprocess

import pytest
import torch
from tests import interpreters
from tests.integration.support import checkpointer

from penstock import CheckpointGoneError, CheckpointNotFoundError

SCRIPT = """
import sys
import torch
from penstock import Checkpointer

what, url = sys.argv[1:]
with Checkpointer(url, chunk_bytes=16384, block_bytes=4096, workers=1) as ckpt:
    for number in range(2, 8):
        if what == "prune":
            assert ckpt.prune().refused == ()
            continue
        state = {"large": torch.full((20_000,), number), "small": torch.full((3,), number)}
        overwrite = what == "overwrite"
        step = 1 if overwrite else number
        ckpt.save(state | {"number": number}, step, mode="blocking", overwrite=overwrite)
        if what == "delete":
            ckpt.delete(number - 1)
"""


@pytest.fixture
def url(kind, tmp_path):
    return f"{kind}://{tmp_path}/root"


def start(what, url):
    return interpreters.start("-c", SCRIPT, what, url, stderr=subprocess.PIPE)


def numbers(tree):
    return {tree["number"], *tree["large"].tolist(), *tree["small"].tolist()}


@pytest.mark.parametrize("what", ["overwrite", "delete"])
def test_readers_see_whole_checkpoints_while_others_save_delete_and_prune(what, url):
    first = {"large": torch.full((20_000,), 1), "small": torch.full((3,), 1), "number": 1}
    with checkpointer(url) as ckpt:
        ckpt.save(first, 1, mode="blocking")
        others = [start(what, url), start("prune", url)]
        seen = []
        while any(other.poll() is None for other in others):
            try:
                (number,) = numbers(ckpt.load())
            except (CheckpointGoneError, CheckpointNotFoundError):
                continue
            seen.append(number)
        errors = [other.communicate()[1] for other in others]
        assert [other.returncode for other in others] == [0, 0], errors
        assert seen == sorted(seen)
        assert seen
        assert ckpt.steps() == [1 if what == "overwrite" else 7]
        assert numbers(ckpt.load()) == {7}
        assert ckpt.verify().ok
        uids = {info.name.split("/")[1] for info in ckpt._backend.list("data/")}
        assert uids == {ckpt.info(ckpt.latest()).uid}
