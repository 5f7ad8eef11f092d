"""Lightning programs that are killed, finished and continued, or saved through the plugin."""

import pytest
from tests.integrations.hosts.harness import check_exact_resume, needs, program_of, run

pytestmark = [pytest.mark.process, pytest.mark.slow, needs("lightning", "torchdata")]

PROGRAM = program_of("trainers/lightning.md")
DDP = PROGRAM.replace('accelerator="cpu"', 'accelerator="cpu", devices=2, strategy="ddp"')

INEXACT = (
    PROGRAM.replace("StatefulDataLoader(data", "torch.utils.data.DataLoader(data")
    .replace('loss {loss.item()!r}")', 'loss {loss.item()!r}"); self.log("a", loss, on_epoch=True)')
    .replace("max_epochs=3", "max_epochs=1")
)

# A loader without a length, manual optimization, and a callback that resumes only between epochs.
ALSO_INEXACT = """
import lightning.pytorch as pl
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from penstock.integrations.lightning import PenstockCallback

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(8, 4))

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.layer(batch).square().mean())
        self.optimizers().step()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

average = pl.callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=1)
pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
    callbacks=[PenstockCallback("run", every_n_steps=3), average],
).fit(Model(), StatefulDataLoader(Stream()))
"""

SHOW = """
import penstock
ckpt = penstock.Checkpointer("run")
for step in ckpt.steps():
    print("kept", step, dict(ckpt.info(step).metadata))
"""

# Exits between two optimizer steps, as at a preemption, and is started again.
LEAVES = """
import lightning.pytorch as pl
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
import penstock
from penstock.integrations.lightning import PenstockCallback

class Model(pl.LightningModule):
    def __init__(self, last):
        super().__init__()
        first, last_layer = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.net = torch.nn.Sequential(first, torch.nn.Dropout(), last_layer)
        self.last, self.losses = last, {}
    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        number = self.trainer.fit_loop.total_batch_idx + 1
        self.losses[number] = loss.item()
        self.trainer.should_stop = number == self.last
        self.log("number", float(number))
        return loss
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "number"}}

def losses(url, last=None, **options):
    pl.seed_everything(0)
    loader = StatefulDataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), 4, shuffle=True)
    model = Model(last)
    accumulation = pl.callbacks.GradientAccumulationScheduler({0: 3})
    pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False,
        callbacks=[accumulation, PenstockCallback(url, every_n_steps=100)], **options,
    ).fit(model, loader)
    return model.losses

whole = losses("whole")
print("left after", max(losses("run", 7)))
rest = losses("run")
print("exact", len(rest), rest == {number: whole[number] for number in range(8, 25)})
print("again", losses("run"))
losses("tried", fast_dev_run=True)
print("tried", penstock.Checkpointer("tried").steps())
"""

# A slow store, and a name for each checkpoint: removed ones must be gone in the end.
PLUGIN = """
import os, sys, time
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO
import penstock
from penstock.integrations.lightning import PenstockIO

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

class Slow(PenstockIO):
    def _queue(self, task):
        super()._queue(lambda: (time.sleep(0.3), task()))

def trainer(epochs, plugins):
    keep = ModelCheckpoint("saved", monitor="loss", save_top_k=1, save_last=True)
    return pl.Trainer(max_epochs=epochs, limit_train_batches=3, limit_val_batches=0,
        plugins=plugins, accelerator="cpu", logger=False, enable_progress_bar=False,
        callbacks=[keep])

torch.manual_seed(0)
fit = trainer(4, [Slow()])
fit.fit(Model())
best = os.path.basename(fit.checkpoint_callback.best_model_path)
print("left", sorted(os.listdir("saved")), best)
more = trainer(5, [PenstockIO()])
model = Model()
more.fit(model, ckpt_path="saved/last.ckpt")
print("resumed to", more.global_step)
with penstock.Checkpointer("saved/last.ckpt") as ckpt:
    assert ckpt.steps() == [15], ckpt.steps()
    assert torch.equal(ckpt.load()["state_dict"]["layer.weight"], model.layer.weight)
    created = ckpt.info().created
# The leftovers of a kill between the save of a new training and the deletion of the old one's.
with penstock.Checkpointer("saved/last.ckpt") as ckpt:
    while created == time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()):
        time.sleep(0.1)
    ckpt.save({"global_step": 3}, 3, overwrite=True)
assert PenstockIO().load_checkpoint("saved/last.ckpt") == {"global_step": 3}
os.symlink("last.ckpt", "saved/link.ckpt")  # as `save_last="link"` leaves it
over = PenstockIO()
over.save_checkpoint({"global_step": 4}, "saved/link.ckpt")
over.teardown()
assert PenstockIO().load_checkpoint("saved/link.ckpt") == {"global_step": 4}
assert PenstockIO().load_checkpoint("saved/last.ckpt") == {"global_step": 3}

stock = trainer(1, [])
stock.fit(Model())
stock.save_checkpoint("file.ckpt")
read = PenstockIO().load_checkpoint("file.ckpt", weights_only=True)
assert torch.equal(read["state_dict"]["layer.bias"], stock.lightning_module.layer.bias)
try:
    PenstockIO().load_checkpoint("nothing.ckpt")
except FileNotFoundError:
    print("nothing there")
try:
    trainer(2, [AsyncCheckpointIO(PenstockIO())]).fit(Model())
except penstock.ConfigError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(("program", "ranks"), [(PROGRAM, 1), (DDP, 2)], ids=["1", "2"])
def test_job_killed_in_a_save_resumes_exactly(tmp_path, program, ranks):
    check_exact_resume(program, tmp_path, ranks=ranks)


def test_finished_job_is_not_trained_again_and_continues_with_more_epochs(tmp_path):
    unbroken = run(PROGRAM, tmp_path / "unbroken")
    place = tmp_path / "place"
    first = run(PROGRAM.replace("max_epochs=3", "max_epochs=2"), place)
    again = run(PROGRAM.replace("max_epochs=3", "max_epochs=2"), place)
    assert (again.returncode, again.losses) == (0, {}), again.text
    more = run(PROGRAM, place)
    assert min(more.losses) == 25, more.text
    assert first.losses | more.losses == unbroken.losses
    # Validation ran every 6 steps; only the saves at these steps have its metric.
    kept = [line.split(" ", 2) for line in run(SHOW, place).text.splitlines() if "kept" in line]
    assert len(kept) >= 2
    assert [("val_loss" in metadata) for _, _, metadata in kept] == [
        int(step) % 6 == 0 for _, step, _ in kept
    ]


def test_job_leaving_between_optimizer_steps_continues_exactly(tmp_path):
    ended = run(LEAVES, tmp_path)
    assert "left after 7" in ended.text, ended.text
    assert "exact 17 True" in ended.text
    assert "again {}" in ended.text
    assert "tried []" in ended.text  # `fast_dev_run` suppresses checkpoints


def test_trainers_of_pytorch_lightning_accept_it(tmp_path):
    program = PROGRAM.replace("lightning.pytorch as pl", "pytorch_lightning as pl")
    stops = program.replace(
        'self.log("val_loss"', 'self.trainer.global_step > 8 and 1 / 0; self.log("val_loss"'
    )
    killed = run(stops, tmp_path)
    assert max(killed.losses) == 12, killed.text
    resumed = run(program, tmp_path)
    assert (resumed.returncode, min(resumed.losses)) == (0, 11), resumed.text


def test_first_save_lists_unresumed_state(tmp_path):
    ended = run(INEXACT, tmp_path)
    assert ended.returncode == 0, ended.text
    assert ended.text.count("the training data loader does not report its position") == 1
    assert ended.text.count("Lightning stores no sums of self.log(on_epoch=True)") == 1
    also = run(ALSO_INEXACT, tmp_path / "also")
    assert also.returncode == 0, also.text
    assert also.text.count("gradients that manual optimization accumulates") == 1
    assert also.text.count("without a length is read one batch ahead") == 1
    assert also.text.count("StochasticWeightAveraging makes its scheduler") == 1


def test_plugin_removes_after_saves_resumes_and_refuses_wrapping(tmp_path):
    ended = run(PLUGIN, tmp_path)
    assert ended.returncode == 0, ended.text
    left = next(line for line in ended.text.splitlines() if line.startswith("left"))
    best = left.rpartition(" ")[2]
    assert left == f"left {sorted([best, 'last.ckpt'])} {best}"
    assert "resumed to 15" in ended.text
    assert "nothing there" in ended.text
    assert "refused: AsyncCheckpointIO does not queue removals after saves" in ended.text
