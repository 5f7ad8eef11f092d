"""The exit of a job's processes, without work of ours in flight that could abort them."""

import subprocess
import threading

import pytest
import torch.distributed as dist
from tests.integration.ranks.slow_link import SlowLink
from tests.integration.ranks.test_processes import JOIN, end
from tests.integration.support import start_python

from penstock.core.errors import CoordinationError
from penstock.core.ranks.torch_job import TorchCoordination

SAVE = """
def ours():
    return [t.name for t in threading.enumerate() if t.name.startswith("penstock-ranks")]

ckpt = penstock.Checkpointer(root)
half = penstock.Shard(torch.full((9, 4), float(rank)), (9 * count, 4), (9 * rank, 0))
ckpt.save({"w": half, "epoch": 1}, 1, mode="blocking")
print("saves", flush=True)
sys.stdin.readline()
handle = ckpt.save({"w": half, "epoch": 2}, 2)
"""
CLOSES = """
ckpt.close()
print(ours(), flush=True)
dist.destroy_process_group()
"""
RETURNS = """
handle.committed.add_done_callback(lambda future: print(future.exception(), flush=True))
"""


def of_ranks():
    return [t for t in threading.enumerate() if t.name.startswith("penstock-ranks")]


@pytest.fixture
def link():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link = SlowLink(store.port)
    link.store = store
    yield link
    link.close()


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("how", "output"),
    [
        pytest.param(CLOSES, "[]\n", id="by close", marks=pytest.mark.slow),
        pytest.param(RETURNS, "None\n", id="without close"),
    ],
)
def test_a_job_may_end_right_after_its_last_save(link, tmp_path, how, output):
    """A thread that waits for the store while the interpreter exits would abort the process."""
    # New interpreters: forked ones exit too soon.
    processes = [
        start_python(
            "-c", JOIN + SAVE + how, rank, 2, link.port, tmp_path / "run",
            wrap=["env"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert [process.stdout.readline() for process in processes] == ["saves\n"] * 2
        link.delay_s = 0.1  # of a distant or busy store
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        assert [process.communicate(timeout=300)[0] for process in processes] == [output] * 2
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        end(processes)


def test_a_closing_store_first_ends_the_call_in_flight(link):
    coordination = TorchCoordination(
        dist.TCPStore("127.0.0.1", link.port, is_master=False), prefix="job"
    )
    link.delay_s = 0.3
    others = of_ranks()
    call = threading.Thread(target=coordination.post, args=("key", b"value"))
    call.start()
    while not (found := [t for t in of_ranks() if t not in others]):
        call.join(0.01)
    coordination.close()
    assert not any(thread.is_alive() for thread in found)
    call.join()


def test_a_broken_connection_is_not_retried_forever(link, capfd):
    """Each call on it prints dozens of lines of the C++ library."""
    with TorchCoordination(
        dist.TCPStore("127.0.0.1", link.port, is_master=False), prefix="job"
    ) as coordination:
        assert coordination.read(["key"]) == [None]
        link.close()
        with pytest.raises(CoordinationError):
            coordination.read(["key"])
        capfd.readouterr()
        for _ in range(20):
            with pytest.raises(
                CoordinationError, match="rank 0 probably died: the store of the job"
            ):
                coordination.read(["key"])
        assert capfd.readouterr().err == ""
