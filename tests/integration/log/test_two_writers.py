"""Two processes that log after one checkpoint, and a checkpoint that disappears under its log."""

import random
import signal
import subprocess

import pytest
import torch
from tests import interpreters
from tests.integration.log.tiny import Tiny, WithoutAppends, bits_of, restored
from tests.integration.support import memory
from torch import nn, optim

import penstock
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.catalog.prune import prune
from penstock.testing.faults import FaultyBackend

STORES = {
    "memory": lambda _: memory(),
    "files": lambda path: PosixBackend(PosixConfig(path=str(path))),
    "objects": lambda _: WithoutAppends(memory()),
}


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    return STORES[request.param](tmp_path)


def test_later_process_wins_and_no_steps_are_mixed(store):
    first, second = Tiny(), Tiny(seed=9, turn=1.0)
    with penstock.Checkpointer(store) as one, penstock.Checkpointer(store) as two:
        first.step(0)
        one.save(first.state, 0, mode="blocking")
        for number in (1, 2, 3):
            first.step(number)
            assert one.log(first.state, number)
        assert two.restore(second.state).step in {2, 3}  # the last entry may not be durable
        begun = two._log.recorder._last
        for number in (begun + 1, begun + 2):
            first.step(number + 3 - begun)
            assert one.log(first.state, number + 3 - begun)
            one._log.recorder.flush()  # so that the other process is the later one
            second.step(number)
            assert two.log(second.state, number)
        first.step(6)
        assert one.log(first.state, 6)
    assert restored(store, lambda step: second.bits() if step == begun + 2 else b"") == begun + 2


def test_two_first_logs_of_one_checkpoint_are_not_mixed(store):
    first, second = Tiny(), Tiny(turn=1.0)
    with penstock.Checkpointer(store) as one, penstock.Checkpointer(store) as two:
        first.step(0)
        one.save(first.state, 0, mode="blocking")
        two.restore(second.state)
        for number in (1, 2):
            second.step(number)
            assert two.log(second.state, number)
        two._log.recorder.flush()
        for number in (1, 2, 3):
            first.step(number)
            assert one.log(first.state, number)
            two.steps()
        second.step(3)
        assert two.log(second.state, 3)
    states = first.bits(), second.bits()
    found = Tiny(seed=9)
    with penstock.Checkpointer(store) as ckpt:
        assert ckpt.restore(found.state).step == 3
    assert found.bits() in states


APPEND = """
import sys, penstock
from tests.integration.log.tiny import Tiny

root, turn = sys.argv[1], float(sys.argv[2])
training = Tiny()
with penstock.Checkpointer(root) as ckpt:
    first = ckpt.resume(training.state)
    training.turn = turn
    print(first, flush=True)
    for step in range(first, 1 << 30):
        training.step(step)
        if not step:
            ckpt.save(training.state, step, mode="blocking")
        elif not ckpt.log(training.state, step):
            break
        print(step, flush=True)
"""


@pytest.mark.process
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_two_processes_that_log_at_once_and_are_killed_are_not_mixed(tmp_path, seed):
    choice = random.Random(seed)

    def start(turn):
        return interpreters.start("-c", APPEND, str(tmp_path), str(turn), stdout=subprocess.PIPE)

    def read(process, count):
        return [int(process.stdout.readline()) for _ in range(count)]

    processes = [start(0.0)]
    try:
        read(processes[0], choice.randrange(3, 9))
        processes.append(start(1.0))
        (begun,) = read(processes[1], 1)
        lines = [read(process, choice.randrange(3, 30)) for process in processes]
        for process in processes[:: choice.choice([-1, 1])]:
            process.send_signal(signal.SIGKILL)
        rest = [process.communicate()[0].split() for process in processes]
        steps = [[*of, *map(int, more)][-1] for of, more in zip(lines, rest, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = Tiny(seed=9)
    with penstock.Checkpointer(tmp_path) as ckpt:
        last = ckpt.restore(found.state).step
    of_second = Tiny()
    for number in range(last + 1):
        of_second.turn = float(number >= begun)
        of_second.step(number)
    # The last entry of each may not be whole, or not be printed.
    assert found.bits() in {bits_of(last), of_second.bits()}
    assert last in {step + more for step in steps for more in (-1, 0, 1)}


def delete(other):
    other.delete(5)


def overwrite(other):
    training = Tiny()
    for number in range(6):
        training.step(number)
    other.save(training.state, 5, overwrite=True, mode="blocking")


def rewind(other):
    other.rewind(0)


def rewind_to_the_base(other):
    other.rewind(5)


def delete_and_prune(other):
    other.delete(5)
    prune(other._backend, grace_s=-1.0)


@pytest.mark.parametrize(
    ("act", "left"),
    [
        pytest.param(delete, 4, marks=pytest.mark.slow),  # `delete_and_prune` has it
        (overwrite, 5),
        pytest.param(rewind, 0, marks=pytest.mark.slow),  # `test_tiers` rewinds a log
        (rewind_to_the_base, 5),
        (delete_and_prune, 4),
    ],
)
def test_checkpoint_that_disappears_takes_its_log_along(store, act, left):
    training = Tiny()
    with (
        penstock.Checkpointer(store) as ckpt,
        penstock.Checkpointer(store) as other,
    ):
        for number in range(10):
            training.step(number)
            if number in {0, 5}:
                ckpt.save(training.state, number, mode="blocking")
            else:
                ckpt.log(training.state, number)
            if number == 7:
                act(other)
        ckpt._log.recorder.flush()
        assert restored(store) == left
        training.step(10)
        ckpt.save(training.state, 10, mode="blocking")
        training.step(11)
        assert ckpt.log(training.state, 11)
    assert restored(store) == 11
    check_no_garbage(store)


def check_no_garbage(store):
    prune(store, grace_s=-1.0)
    with penstock.Checkpointer(store) as ckpt:
        uids = {ckpt.info(step).uid for step in ckpt.steps()}
    assert {info.name.split("/")[1] for info in store.list("data/")} == uids


def test_deleting_the_checkpoint_that_is_logged_ends_the_log(store, caplog):
    training = Tiny()
    with penstock.Checkpointer(store) as ckpt:
        for number in range(6):
            training.step(number)
            if number in {0, 3}:
                ckpt.save(training.state, number, mode="blocking")
            else:
                assert ckpt.log(training.state, number) == (number < 5)
            if number == 4:
                ckpt.delete(3)
        assert "ends after step 4: the checkpoint of step 3 was deleted or compacted" in caplog.text
    assert restored(store) == 2


def test_failed_save_that_was_logged_leaves_no_data(store):
    training = Tiny()
    faulty = FaultyBackend(store)
    with penstock.Checkpointer(faulty) as ckpt:
        for number in range(6):
            training.step(number)
            if number == 3:
                faulty.fail("publish", match="/index")
                faulty.slow("publish", 0.05, match="/index")
            if number in {0, 3}:
                handle = ckpt.save(training.state, number)
            else:
                assert ckpt.log(training.state, number)
            if number == 0:
                ckpt.wait()
        assert isinstance(handle.committed.exception(), penstock.StorageError)
    assert training.bits() == bits_of(5)
    assert restored(store) == 5
    check_no_garbage(store)


def test_compaction_loses_no_logged_step(tmp_path, caplog):
    generator = torch.Generator().manual_seed(5)
    weight = nn.Parameter(torch.randn(90, 70, generator=generator))
    optimizer = optim.SGD([weight], 1e-6)
    state = {"weight": weight, "optimizer": optimizer}
    rules = [{"match": "**", "codecs": ["delta", "floatsplit"]}]
    with penstock.Checkpointer(tmp_path, rules=rules) as ckpt:
        for number in range(6):
            weight.grad = torch.randn(90, 70, generator=generator)
            optimizer.step()
            if number in {0, 1, 4}:
                ckpt.save(state, number, mode="blocking")
            else:
                assert ckpt.log(state, number) == (number < 5)
            if number == 3:
                ckpt._log.recorder.flush()
                with penstock.Checkpointer(tmp_path) as other:
                    assert other.compact([1]).steps == other.compact(everything=True).steps == ()
                    assert "step 1 is not compacted: steps are logged after it" in caplog.text
                    ckpt._log.recorder.flush()
                    assert other.latest() == 3
            if number == 4:  # nothing is logged after it yet
                assert [step.step for step in ckpt.compact(everything=True).steps] == [1, 4]
    assert "the checkpoint of step 4 was deleted or compacted" in caplog.text
