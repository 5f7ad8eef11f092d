"""A run with a model, and the checks of a failed import."""

import contextlib

import pytest
import torch

import penstock


def make_model():
    """State of a small model: several dtypes, tied weights, odd shapes."""
    torch.manual_seed(0)
    state = {f"layers.{n}.weight": torch.randn(60, 50) for n in range(6)}
    state |= {
        "norm.weight": torch.arange(7, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "scale": torch.tensor(3.5),
        "counts": torch.arange(5),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(8, 6).t(),
        "lm_head.weight": state["layers.0.weight"],
    }
    return state


def names_in(folder):
    """Names of all that is in a folder, in order."""
    return sorted(path.name for path in folder.iterdir())


def assert_same(found, wanted):
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="session")
def model():
    return make_model()


@pytest.fixture(scope="session")
def run(tmp_path_factory, model):
    root = tmp_path_factory.mktemp("run")
    state = {
        "model": model,
        "optimizer": {
            "state": {"layers.0.weight": {"step": torch.tensor(1001.0), "m": torch.randn(3, 4)}},
            "param_groups": [{"lr": 0.1, "params": ["layers.0.weight"]}],
        },
        "epoch": 4,
    }
    with penstock.Checkpointer(root, rules=[{"match": "**/layers.1*", "codecs": ["zstd"]}]) as ckpt:
        ckpt.save(state, 5, mode="blocking")
    return root


@pytest.fixture
def refused(tmp_path):
    """A context in which an import into the given run fails and leaves its checkpoint alone."""

    root = tmp_path / "target"
    with penstock.Checkpointer(root) as ckpt:
        ckpt.save({"w": torch.ones(3)}, 1, mode="blocking")

    @contextlib.contextmanager
    def context(error, match):
        with pytest.raises(error, match=match) as caught:
            yield root
        assert isinstance(caught.value, penstock.PenstockError)
        with penstock.Checkpointer(root) as ckpt:
            assert ckpt.steps() == [1]
            assert ckpt.verify().ok
            assert torch.equal(ckpt.load()["w"], torch.ones(3))

    return context
