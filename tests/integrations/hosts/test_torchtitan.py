"""torchtitan's manager, optimizers and schedulers, with a model that trains on a CPU."""

import pytest
import torch
from tests.integrations.hosts.harness import check_exact_resume, program_of

import penstock

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-hosts")

from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
)
from torchtitan.components.optimizer.optimizer import ParamGroupConfig

from penstock.integrations.torchtitan import PenstockManager

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.process
@pytest.mark.multirank
def test_the_program_of_the_page_resumes_exactly(tmp_path):
    check_exact_resume(program_of("trainers/torchtitan.md"), tmp_path, ranks=2)


class Trained:
    """A trainer's state: some parts of a model, their optimizers, and its step."""

    def __init__(self, folder, seed=0, *, manager=PenstockManager, parts=1, **config):
        torch.manual_seed(seed)
        self.step = 0
        layers = {str(n): torch.nn.Linear(4, 4) for n in range(2)}
        cuts = [list(layers)] if parts == 1 else [[name] for name in layers]
        self.parts = []
        for names in cuts:
            part = torch.nn.Module()
            part.layers = torch.nn.ModuleDict({name: layers[name] for name in names})
            part.register_buffer(f"seen{names[0]}", torch.zeros(()))
            self.parts.append(part)
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})
        self.optimizers = OptimizersContainer.Config(
            param_groups=[group], implementation="for-loop"
        ).build(model_parts=self.parts)
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=5).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.manager = manager.Config(enable=True, interval=2, **config).build(
            dataloader=None, model_parts=self.parts, optimizers=self.optimizers,
            lr_schedulers=self.schedulers, states={"train_state": self}, sd_adapter=None,
            base_folder=str(folder),
        )  # fmt: skip

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def train(self, until, last=None):
        saved = []
        while self.step < until:
            self.step += 1
            value = torch.randn(2, 4)
            for part in self.parts:
                for layer in part.layers.values():
                    value = layer(value)
            value.sum().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()
            if self.manager.save(self.step, last_step=self.step == last):
                saved.append(self.step)
        return saved

    @property
    def weights(self):
        return {n: p.tolist() for part in self.parts for n, p in part.named_parameters()}

    @property
    def moments(self):
        state = self.optimizers.state_dict()
        return {n: v.tolist() if torch.is_tensor(v) else v for n, v in state.items()}

    def close(self):
        self.manager.close()
        return self


def test_a_pipeline_of_two_parts_is_stored_under_the_names_of_the_model(tmp_path):
    one = Trained(tmp_path, parts=2, enable_first_step_checkpoint=True, keep_latest_k=2)
    assert one.train(7) == [1, 2, 4, 6]
    one.manager.maybe_wait_for_saving()
    one.close()
    with penstock.Checkpointer(tmp_path / "checkpoint") as ckpt:
        assert ckpt.steps() == [4, 6]
        assert {*ckpt.load(include="model")["model"]} == {
            "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias",
            "seen0", "seen1",
        }  # fmt: skip
    other = Trained(tmp_path, 1, parts=2)
    assert other.manager.load()
    assert other.train(7) == []
    assert (other.weights, other.moments) == (one.weights, one.moments)
    other.close()
    whole = Trained(tmp_path, 2, exclude_from_loading=["optimizer"])
    assert whole.manager.load(step=4)
    assert whole.step == 4
    whole.close()


def test_training_from_an_older_step_replaces_the_later_ones(tmp_path):
    one = Trained(tmp_path)
    assert one.train(6) == [2, 4, 6]
    one.close()
    other = Trained(tmp_path, last_save_model_only=False)
    assert other.manager.load(step=2)
    torch.manual_seed(7)
    assert other.train(5, last=5) == [4, 5]
    other.close()
    with penstock.Checkpointer(tmp_path / "checkpoint") as ckpt:
        assert ckpt.steps() == [2, 4, 5, 6]
        stored = ckpt.load(5)["model"]
        assert all(stored[name].tolist() == value for name, value in other.weights.items())


def test_the_last_save_and_a_seed_are_model_only(tmp_path):
    one = Trained(tmp_path, export_dtype="bfloat16")
    assert one.train(3, last=3) == [2, 3]
    one.close()
    with penstock.Checkpointer(tmp_path / "checkpoint") as ckpt:
        found = ckpt.load(3)
        assert {*found} == {"model"}
        assert {str(tensor.dtype) for tensor in found["model"].values()} == {"torch.bfloat16"}

    seed = Trained(tmp_path / "seed", 5, create_seed_checkpoint=True)
    seed.manager.save(0, last_step=True)
    other = Trained(tmp_path / "seed", 6)
    assert other.manager.load()
    assert other.weights == seed.weights
    assert other.step == 0
    other.close()
    seed.close()


def test_initial_checkpoints_may_be_penstock_or_torchtitan(tmp_path):
    old = Trained(tmp_path / "old", manager=CheckpointManager, keep_latest_k=0)
    old.train(2)
    # All in the folder of torchtitan's manager; ours saves the later steps.
    taken = Trained(tmp_path / "old", 1)
    assert taken.manager.load()
    assert (taken.step, taken.weights, taken.moments) == (2, old.weights, old.moments)
    assert taken.train(4) == [4]
    taken.close()
    again = Trained(tmp_path / "old", 2)
    assert again.manager.load()
    assert (again.step, again.weights) == (4, taken.weights)
    again.close()

    for name, place, whole in (
        ("a", tmp_path / "old" / "checkpoint" / "step-2", old),  # a folder of DCP
        ("b", tmp_path / "old" / "checkpoint" / "step-4", taken),  # in a run of Penstock
        ("c", tmp_path / "old" / "checkpoint", taken),
    ):
        model_only = name != "c"
        new = Trained(
            tmp_path / name, 3, initial_load_path=str(place), initial_load_model_only=model_only
        )
        assert new.manager.load()
        assert new.weights == whole.weights, name
        assert new.step == (0 if model_only else 4)
        new.close()


def test_a_loading_or_disabled_manager_saves_nothing(tmp_path):
    fresh = Trained(tmp_path, load_only=True)
    assert not fresh.manager.load()
    assert fresh.train(4, last=4) == []
    fresh.close()
    with pytest.raises(FileNotFoundError, match="step=3"):
        Trained(tmp_path).manager.load(step=3)
    with pytest.raises(ValueError, match="optimiser"):
        Trained(tmp_path, exclude_from_loading=["optimiser"])
