"""Hosts keep checkpoints in memory with copies, on NVMe below it, and in a durable tier."""

import shutil

import pytest
from tests.integration.ranks.test_host_copies import handle
from tests.integration.ranks.test_hosts import Hosts, saved

from penstock import Checkpointer, ConfigError


class Levels(Hosts):
    """`root(host)` is in the host's memory. Memory is freed as soon as another tier may do."""

    def __init__(self, folder, drain_every):
        super().__init__(folder)
        self._every = drain_every

    def nvme(self, host):
        return self._folder / f"nvme-of-{host}"

    def store(self, host):
        memory = {"type": "hosts", "path": str(self.root(host)), "copies": 1}
        nvme = {"type": "hosts", "path": str(self.nvme(host))}
        return {
            "type": "tiered",
            "fast": {"type": "tiered", "fast": memory, "durable": nvme, "keep_fast": 0},
            "durable": str(self._folder / "durable"),
            "drain_every": self._every,
        }


@pytest.fixture
def levels(request, tmp_path):
    """The tiers with the checkpoints 1 and 2, which the durable tier has if it is marked with 1."""

    def work(ckpt, rank, count):
        for step in (1, 2):
            saved(ckpt, rank, count, step)
            handle(ckpt).replicated.result(300)
            handle(ckpt).durable.result(300)

    found = Levels(tmp_path, request.param)
    found.run("abc", work)
    return found


@pytest.mark.parametrize("lost", "abc")
@pytest.mark.parametrize("levels", [0, 1], indirect=True)
def test_job_survives_the_loss_of_any_host(levels, lost):
    levels.lose(lost)
    shutil.rmtree(levels.nvme(lost))
    left = "abcx".replace(lost, "")
    assert levels.restore(left) == 2
    assert levels.restore(left, 1) == 1


@pytest.mark.parametrize("levels", [0], indirect=True)
def test_job_survives_the_loss_of_all_memory(levels):
    for host in "abc":
        levels.lose(host)
    assert levels.restore("cab") == 2
    levels.save("cab", 3)
    assert levels.restore("abc", 1) == 1


@pytest.mark.parametrize("levels", [1], indirect=True)
def test_job_survives_the_loss_of_all_memory_and_a_host(levels):
    for host in "abc":
        levels.lose(host)
    shutil.rmtree(levels.nvme("a"))
    assert levels.restore("abc") == 2


def test_copies_in_a_slower_tier_are_refused(tmp_path):
    nvme = {"type": "hosts", "path": str(tmp_path / "nvme"), "copies": 1}
    tiers = {"type": "tiered", "fast": str(tmp_path / "fast"), "durable": nvme}
    with pytest.raises(ConfigError, match="copies are made in the fastest tier only"):
        Checkpointer(tiers)
