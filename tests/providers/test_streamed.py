"""`penstock.Streamed`: tensors whose bytes a function yields during the save."""

import threading

import pytest
import torch

import penstock


def streamed(tensor, calls=None):
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""

    def read(start, out):
        if calls is not None:
            calls.append((start, len(out)))
        out[:] = data[start : start + len(out)]

    return penstock.Streamed(str(tensor.dtype).removeprefix("torch."), tensor.shape, read)


STATE = {
    "large": torch.arange(3_000_000, dtype=torch.float32).reshape(3, -1),
    "small": torch.arange(7, dtype=torch.bfloat16),
    "number": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "flags": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
}


@pytest.mark.parametrize("rules", [[], [{"match": "**", "codecs": ["zstd"]}]], ids=["raw", "zstd"])
def test_streamed_tensors_are_stored_like_loaded_ones(tmp_path, rules):
    with penstock.Checkpointer(tmp_path, rules=rules, staging_bytes="32 MiB") as ckpt:
        ckpt.save({k: streamed(t) for k, t in STATE.items()}, 1, mode="blocking")
        ckpt.save(STATE, 2, mode="blocking")
        first, second = ckpt.open(1), ckpt.open(2)
        assert [(o.path, o.kind, o.form, o.spec) for o in first.objects()] == [
            (o.path, o.kind, o.form, o.spec) for o in second.objects()
        ]
        for name, tensor in ckpt.load(1).items():
            assert tensor.dtype == STATE[name].dtype
            assert torch.equal(tensor, STATE[name])
        live = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
        ckpt.restore(live, 1)
        assert all(torch.equal(live[name], STATE[name]) for name in STATE)


def test_a_function_error_fails_the_save_and_commits_nothing(tmp_path):
    def read(start, out):
        raise penstock.FormatError("cut short", ["t"])

    with penstock.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(penstock.FormatError, match="cut short"):
            ckpt.save({"t": penstock.Streamed("float32", (5,), read)}, 1, mode="blocking").result()
        assert ckpt.steps() == []


def test_it_can_be_saved_in_the_background(tmp_path):
    threads = set()
    tensor = torch.ones(100)

    def read(start, out):
        threads.add(threading.current_thread())
        out[:] = tensor.view(torch.uint8).numpy().data[start : start + len(out)]

    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save({"t": penstock.Streamed("float32", (100,), read)}, 1)
        tensor.zero_()  # captured: the function is no longer called
        ckpt.wait()
        assert torch.equal(ckpt.load()["t"], torch.ones(100))
    assert threads


@pytest.mark.parametrize("shape", [(-1,), ("a",), 3, (2.5,)])
def test_invalid_shape_is_refused(shape):
    with pytest.raises(penstock.UnsupportedStateError, match="must be an integer, at least 0"):
        penstock.Streamed("float32", shape, print)


@pytest.mark.parametrize("dtype", ["floaty", "nn", "Tensor", ""])
def test_invalid_dtype_is_refused_by_path(tmp_path, dtype):
    with (
        penstock.Checkpointer(tmp_path) as ckpt,
        pytest.raises(penstock.UnsupportedStateError, match="a/b is a Streamed of"),
    ):
        ckpt.save({"a": {"b": penstock.Streamed(dtype, (1,), print)}}, 1)


def test_restore_into_a_streamed_tensor_is_refused(tmp_path):
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save({"t": torch.ones(3)}, 1, mode="blocking")
        with pytest.raises(penstock.UnsupportedStateError, match="can only be saved"):
            ckpt.restore({"t": penstock.Streamed("float32", (3,), print)})
