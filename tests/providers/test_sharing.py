"""Memory being read does not move, even for torch.multiprocessing."""

import os
import signal

import pytest
import torch
from tests.integration.training import held_at

from penstock.providers.tensor import holds
from penstock.providers.tensor.sources import TensorSource

WAITS = ("penstock.providers.tensor.holds", "__enter__")


def source_of(numel=300_000):
    tensor = torch.arange(numel)
    return tensor, TensorSource(tensor)


def test_torch_has_the_table_holds_need():
    assert torch.storage._share_memory_map is holds._moves
    assert torch.storage._share_memory_lock.acquire(blocking=False)
    torch.storage._share_memory_lock.release()


def test_moving_held_memory_waits_until_its_release():
    tensor, source = source_of()
    first, second = TensorSource.hold([source]), TensorSource.hold([source])
    with held_at(WAITS, tensor.share_memory_):
        first()
        assert not tensor.is_shared()
        assert source.address == tensor.data_ptr()
        second()
    assert tensor.is_shared()
    assert source.storage._cdata not in holds._moves


def test_a_hold_gives_the_current_address():
    tensor, source = source_of()
    described = source.address
    tensor.share_memory_()
    let_go = TensorSource.hold([source])
    assert described != source.address == tensor.data_ptr()
    let_go()
    assert torch.equal(torch.frombuffer(source.view(), dtype=torch.int64), tensor)


def test_a_look_up_waits_for_memory_in_motion():
    _, source = source_of()
    seen = []
    moving = holds._Hold(source.storage)
    entry = type("Move", (), {"__enter__": lambda _: moving._unread.acquire(), "__exit__": _end})()
    holds._moves[source.storage._cdata] = entry
    look = ("penstock.providers.tensor.holds", "still")
    with held_at(look, lambda: seen.append(TensorSource.still([source], lambda: 1))):
        assert not seen
        del holds._moves[source.storage._cdata]
        moving.release()
    assert seen == [1]


def _end(*_):
    pass


@pytest.mark.parametrize("left_bytes", [0, 4])
def test_freed_or_shrunk_memory_is_absent(left_bytes):
    """A copy from the old address would read foreign bytes, or crash the process."""
    tensor, source = source_of()
    assert source.locate() == tensor.data_ptr()
    tensor.untyped_storage().resize_(left_bytes)
    assert source.locate() == 0
    TensorSource.hold([source])()
    assert source.address == 0


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_share_held_memory():
    tensor, source = source_of()
    let_go = TensorSource.hold([source])
    with torch.storage._share_memory_lock:
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # rather than hang
            tensor.share_memory_()
            os._exit(40 + tensor.is_shared())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 41
    let_go()
