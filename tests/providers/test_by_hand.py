"""The memory of several pieces as one source."""

import torch

from penstock.core.abc import PendingCopy
from penstock.providers.tensor.by_hand import PiecesSource
from penstock.providers.tensor.sources import TensorSource


def made():
    """Three pieces, flat and strided, and their concatenated elements."""
    own = torch.arange(60.0).view(6, 10)
    tensors = [own[1:3], own[:, 4:7], torch.tensor([[7.0]])]
    source = PiecesSource([TensorSource(tensor) for tensor in tensors])
    return tensors, source, torch.cat([tensor.reshape(-1) for tensor in tensors]).numpy().tobytes()


def test_any_range_is_copied_from_the_pieces_that_hold_it():
    _, source, expected = made()
    assert source.nbytes == len(expected)
    assert (source.view(), source.address, source.memory) == (None, None, None)
    for start in range(0, len(expected) + 1, 4):
        for stop in range(start, len(expected) + 1, 4):
            out = bytearray(stop - start)
            assert source.copy_out(start, memoryview(out)) is None
            assert out == expected[start:stop]


class LateCopy(PendingCopy):
    def __init__(self, copy):
        self.copy = copy
        self.ordered = False

    def wait(self):
        self.copy()

    def order(self):
        self.ordered = True


class LateSource(TensorSource):
    """As on a device: the bytes arrive when awaited."""

    def __init__(self, tensor, copies):
        super().__init__(tensor)
        self.copies = copies

    def copy_out(self, start, out, /):
        late = LateCopy(lambda: TensorSource.copy_out(self, start, out))
        self.copies.append(late)
        return late


def test_a_copy_completes_with_those_of_all_pieces():
    tensors, _, expected = made()
    copies = []
    source = PiecesSource([LateSource(tensor, copies) for tensor in tensors])
    out = bytearray(source.nbytes)
    copy = source.copy_out(0, memoryview(out))
    assert len(copies) == 3
    copy.order()
    assert all(late.ordered for late in copies)
    copy.wait()
    assert out == expected


def test_a_change_of_any_piece_counts_as_one():
    tensors, source, _ = made()
    before = source.version()
    tensors[2].add_(1)
    assert source.version() > before
    assert source.steady()
    with torch.inference_mode():
        fixed = torch.ones(2)
    unknown = PiecesSource([TensorSource(tensors[0]), TensorSource(fixed)])
    assert unknown.version() is None
    assert not unknown.steady()


def test_pieces_are_held_in_place():
    tensors, source, expected = made()
    for tensor in tensors:
        tensor.share_memory_()
    assert any(piece.address not in (None, piece.locate()) for piece in source.pieces())
    let_go = PiecesSource.hold([source])
    try:
        assert all(piece.address in (None, piece.locate()) for piece in source.pieces())
    finally:
        let_go()
    out = bytearray(source.nbytes)
    PiecesSource.still([source], lambda: source.copy_out(0, memoryview(out)))
    assert out == expected
