"""Trainers of transformers and trl that save and resume with Penstock."""

import logging
import signal
from pathlib import Path

import pytest
import torch
from tests.integrations.hosts.harness import check_exact_resume, program_of, run

import penstock

transformers = pytest.importorskip("transformers", reason="needs transformers: make test-hosts")

from penstock.integrations.transformers import PenstockTrainerMixin, patch  # noqa: E402

PAGE = "trainers/transformers.md"
pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of the trainer itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.timeout(1800)  # importing trainers takes half a minute on a busy machine
@pytest.mark.multirank
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_resumes_exactly(tmp_path, ranks):
    check_exact_resume(program_of(PAGE), tmp_path, ranks=ranks)
    assert sorted(path.name for path in (tmp_path / "killed" / "out").iterdir()) == ["penstock"]


@pytest.mark.timeout(1800)
def test_an_sft_trainer_with_adapters_resumes_exactly(tmp_path):
    pytest.importorskip("trl", reason="needs trl: make test-hosts")
    check_exact_resume(program_of(PAGE, 2), tmp_path)
    with penstock.Checkpointer(tmp_path / "killed" / "out" / "penstock") as ckpt:
        names = ckpt.load(include="model")["model"].keys()
    assert all("lora_" in name for name in names)


# accelerate shards models only on accelerators, so CPU processes pose as some.
SHARDED = """
import accelerate.state as states

begin = states.AcceleratorState.__init__


def with_accelerators(self, *words, **options):
    if not states.AcceleratorState._shared_state:
        states.PartialState(cpu=True)
        kind = states.DistributedType.MULTI_GPU
        states.PartialState._shared_state["distributed_type"] = kind
    begin(self, *words, **options)


states.AcceleratorState.__init__ = with_accelerators
"""
FSDP = """fsdp=True, fsdp_config={
    "version": 2, "reshard_after_forward": True, "transformer_layer_cls_to_wrap": ["GPT2Block"],
}, use_cpu=True,"""
PRINT_KIND = """
print(type(next(trainer.model.parameters())).__name__)
"""


@pytest.mark.timeout(1800)
@pytest.mark.multirank
def test_a_sharded_trainer_resumes_exactly(tmp_path):
    program = SHARDED + program_of(PAGE).replace("use_cpu=True,", FSDP) + PRINT_KIND
    killed = run(program, tmp_path, ranks=2, kill_at=20)
    resumed = run(program, tmp_path, ranks=2)
    assert "DTensor" in resumed.text
    assert resumed.returncode == 0, resumed.text
    again = killed.losses.keys() & resumed.losses.keys()
    assert again, "it was killed before it went on from the checkpoint"
    assert [resumed.losses[step] for step in again] == [killed.losses[step] for step in again]
    assert max(resumed.losses) == 18


def test_the_loop_with_peft_resumes_exactly(tmp_path):
    pytest.importorskip("peft", reason="needs peft: make test-hosts")
    program = program_of(PAGE, 3)
    whole = run(program.replace("step + 4", "step + 7"), tmp_path / "whole")
    halves = [run(program, tmp_path / "halves") for _ in range(2)]
    assert len(whole.losses) == 6, whole.text
    assert halves[0].losses | halves[1].losses == whole.losses


# -- the rest in this process -------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}


class Trainer(PenstockTrainerMixin, transformers.Trainer):
    pass


class ScriptedTrainer(Trainer):
    """Evaluates to given losses, one for each step."""

    losses = ()

    def evaluate(self, *words, **options):
        metrics = {"eval_loss": self.losses[self.state.global_step - 1]}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def rows(count=8):
    features = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum(0, keepdim=True)} for row in features]


def trainer_of(kind, folder, **options):
    args = {
        "max_steps": 4,
        "save_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.1,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    arguments = transformers.TrainingArguments(str(folder), **args)
    return kind(Model(), arguments, train_dataset=rows(), eval_dataset=rows(2))


def steps_of(folder):
    with penstock.Checkpointer(folder / "penstock") as ckpt:
        return ckpt.steps()


def stored_weight(folder, step):
    with penstock.Checkpointer(folder / "penstock") as ckpt:
        return ckpt.load(step, include="model")["model"]["layer.weight"]


BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}


def test_the_best_model_is_kept_and_loaded_at_the_end(tmp_path):
    trainer = trainer_of(ScriptedTrainer, tmp_path, save_total_limit=1, **BEST)
    trainer.losses = (3.0, 1.0, 1.0, 2.0)
    trainer.train()
    assert steps_of(tmp_path) == [2, 4]
    assert torch.equal(trainer.model.layer.weight, stored_weight(tmp_path, 2))
    assert not torch.equal(trainer.model.layer.weight, stored_weight(tmp_path, 4))
    with penstock.Checkpointer(tmp_path / "penstock") as ckpt:
        assert ckpt.info(4).metadata["eval_loss"] == 2.0


def test_the_best_model_is_known_after_a_resume(tmp_path):
    trainer = trainer_of(ScriptedTrainer, tmp_path, max_steps=3, save_total_limit=2, **BEST)
    trainer.losses = (3.0, 1.0, 2.0)
    trainer.train()
    resumed = trainer_of(ScriptedTrainer, tmp_path, max_steps=5, save_total_limit=2, **BEST)
    resumed.losses = (None, None, None, 2.0, 2.0)
    resumed.train(resume_from_checkpoint=True)
    assert steps_of(tmp_path) == [2, 3, 4, 5]  # the best, the restored one, the last two
    assert resumed.state.best_global_step == 2
    assert torch.equal(resumed.model.layer.weight, stored_weight(tmp_path, 2))


def test_a_resume_from_a_step_deletes_later_ones(tmp_path):
    trainer_of(Trainer, tmp_path).train()
    later = stored_weight(tmp_path, 3)
    resumed = trainer_of(Trainer, tmp_path, max_steps=3)
    resumed.train(resume_from_checkpoint=2)
    assert steps_of(tmp_path) == [1, 2, 3]
    assert resumed.state.global_step == 3
    assert torch.equal(stored_weight(tmp_path, 3), later)


@pytest.mark.parametrize("part", ["model/layer.weight", "optimizer/state", "rng/torch"])
def test_a_resume_takes_the_newest_whole_checkpoint(tmp_path, caplog, part):
    trainer_of(Trainer, tmp_path).train()
    last = stored_weight(tmp_path, 4)
    with penstock.Checkpointer(tmp_path / "penstock") as ckpt:
        stored = ckpt.load(3, include=part)
        ckpt.rewind(3)
    damage(tmp_path / "penstock", stored)
    resumed = trainer_of(Trainer, tmp_path)
    with pytest.raises(penstock.DamagedError, match=part.partition("/")[0]):
        resumed.train(resume_from_checkpoint=3)
    resumed.train(resume_from_checkpoint=True)
    assert "step 3 is damaged, so an older one is tried" in caplog.text
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert torch.equal(stored_weight(tmp_path, 4), last)
    assert torch.equal(resumed.model.layer.weight, last)


def damage(run, stored):
    """Change a byte of the largest tensor in `stored`, in the newest file that has it."""
    leaves = torch.utils._pytree.tree_leaves(stored)
    tensor = max(filter(torch.is_tensor, leaves), key=torch.numel)
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    holders = [path for path in run.rglob("*") if path.is_file() and data in path.read_bytes()]
    newest = max(holders, key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes().replace(data, bytes([data[0] ^ 1]) + data[1:]))


def test_a_new_training_refuses_the_checkpoints_of_another(tmp_path):
    trainer_of(Trainer, tmp_path, max_steps=1).train(resume_from_checkpoint=True)
    with pytest.raises(penstock.StepExistsError, match="up to step 1"):
        trainer_of(Trainer, tmp_path).train()
    with pytest.raises(penstock.CheckpointNotFoundError):
        trainer_of(Trainer, tmp_path).train(resume_from_checkpoint=7)


def test_checkpoints_of_the_trainer_are_continued(tmp_path):
    trainer_of(transformers.Trainer, tmp_path, max_steps=2).train()
    trainer_of(Trainer, tmp_path).train(resume_from_checkpoint=True)
    assert steps_of(tmp_path) == [3, 4]
    trainer = trainer_of(Trainer, tmp_path / "new")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert steps_of(tmp_path / "new") == [3, 4]


def test_path_without_checkpoint_of_transformers_is_refused(tmp_path):
    trainer_of(Trainer, tmp_path / "old", max_steps=2).train()
    trainer = trainer_of(Trainer, tmp_path / "new")
    for path in (str(tmp_path / "old" / "penstock"), tmp_path / "old", "2"):
        with pytest.raises(penstock.ConfigError, match=r"penstock copy OTHER .*new"):
            trainer.train(resume_from_checkpoint=path)


def test_read_only_run_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    trainer = trainer_of(Trainer, tmp_path / "out")
    trainer.penstock_url = tmp_path / "file" / "run"
    with pytest.raises(penstock.StorageError, match="file"):
        trainer.train()
    assert trainer.state.global_step == 0


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


class Terminate(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            signal.raise_signal(signal.SIGTERM)


def test_trainer_saves_and_leaves_at_a_signal(tmp_path):
    trainer = trainer_of(Trainer, tmp_path, save_steps=100)
    trainer.add_callback(Terminate())
    names = {"trainer": trainer, "TrainerCallback": transformers.TrainerCallback}
    exec(program_of(PAGE, 4), names)
    assert steps_of(tmp_path) == [2]


def test_saves_in_the_middle_of_a_step_warn(tmp_path, caplog):
    trainer_of(Trainer, tmp_path, max_steps=1, enable_jit_checkpoint=True).train()
    assert [text for text in warnings_of(caplog) if "penstock.Preemption" in text]


def test_a_model_only_save_warns_and_resumes(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "penstock")
    trainer_of(Trainer, tmp_path, max_steps=3, save_only_model=True).train()
    warned = [r.getMessage() for r in caplog.records if "not be exact" in r.getMessage()]
    assert len(warned) == 1
    assert "save_only_model leaves out the optimizer" in warned[0]
    with penstock.Checkpointer(tmp_path / "penstock") as ckpt:
        assert set(ckpt.load()) == {"model", "files"}
    assert not [text for text in warnings_of(caplog) if "defers nothing" in text]
    resumed = trainer_of(Trainer, tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert [text for text in warnings_of(caplog) if "step 3 was saved with save_only_model" in text]


class WithFile(transformers.Trainer):
    """As in subclasses of `Trainer`: an extra file beside those of a checkpoint."""

    loaded = None

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        (folder / "own.txt").write_text(f"step {self.state.global_step}")

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.loaded = Path(checkpoint, "own.txt").read_text()


class SaveAgain(transformers.TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_save = True


def test_files_of_a_derived_class_and_a_second_save_of_a_step_are_kept(tmp_path):
    class Derived(PenstockTrainerMixin, WithFile):
        pass

    trainer = trainer_of(Derived, tmp_path, max_steps=4)
    trainer.add_callback(SaveAgain())  # of step 4, saved by then
    trainer.train()
    resumed = trainer_of(Derived, tmp_path, max_steps=5)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.loaded == "step 4"
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


class ScheduleFree(torch.optim.SGD):
    """Changes parameters between steps, like the optimizers of schedulefree."""

    factor = 1.0

    def eval(self):
        self.scale(0.5)

    def train(self):
        self.scale(1.0)

    @torch.no_grad()
    def scale(self, factor):
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(factor / self.factor)
        self.factor = factor


def test_an_optimizer_changing_parameters_between_steps_tears_no_save(tmp_path):
    trainer = trainer_of(Trainer, tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.optimizer = ScheduleFree(trainer.model.parameters(), lr=0.01)
    trainer.train()
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_unsavable_state_is_refused_before_training(tmp_path):
    trainer = trainer_of(Trainer, tmp_path)
    trainer.args.push_to_hub = True
    with pytest.raises(penstock.ConfigError, match="penstock_url"):
        trainer.train()
    trainer.is_deepspeed_enabled = True
    with pytest.raises(penstock.ConfigError, match="DeepSpeed"):
        trainer.train()
    with pytest.raises(penstock.ConfigError, match="not a Linear"):
        patch(torch.nn.Linear(1, 1))


class Counter(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
    def __init__(self, seen=0):
        self.seen = seen

    def on_step_end(self, args, state, control, **kwargs):
        self.seen += 1

    def state(self):
        return {"args": {}, "attributes": {"seen": self.seen}}


def test_a_ready_trainer_is_patched(tmp_path):
    run_folder = tmp_path / "elsewhere"
    seen = []
    for steps in (2, 4):
        trainer = trainer_of(
            transformers.Trainer,
            tmp_path / "out",
            max_steps=steps,
            restore_callback_states_from_checkpoint=True,
        )
        trainer.add_callback(Counter())
        assert patch(trainer, run_folder, mode="blocking") is trainer
        assert isinstance(trainer, PenstockTrainerMixin)
        trainer.train(resume_from_checkpoint=True)
        seen += [c.seen for c in trainer.callback_handler.callbacks if isinstance(c, Counter)]
    assert seen == [2, 4]
    with penstock.Checkpointer(run_folder) as ckpt:
        assert ckpt.steps() == [1, 2, 3, 4]
    assert list(Path(tmp_path / "out").iterdir()) == []
    trainer.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").is_file()
