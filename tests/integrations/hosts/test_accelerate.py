"""accelerate programs that are killed, or stopped at chosen steps, and resume exactly."""

import pytest
from tests.integrations.hosts.harness import check_exact_resume, needs, program_of, run

pytestmark = [pytest.mark.process, pytest.mark.slow, needs("accelerate", "torchdata")]

PAGE = "trainers/accelerate.md"

# Its data set draws random numbers in the training process, and it leaves evaluation by `break`.
DRAWS = """
import os, random, sys
import torch
from accelerate import Accelerator, DataLoaderConfiguration
import penstock
from penstock.integrations.accelerate import load_state, save_state

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info():  # draws of workers are not restored
            return torch.full((4,), float(index))
        return torch.randn(4) + index + random.random()

torch.manual_seed(0)
random.seed(0)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(
    use_stateful_dataloader=True, use_seedable_sampler=True))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
workers = int(os.environ["WORKERS"])
data = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers)
other = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)
model, optimizer, data, other = accelerator.prepare(model, optimizer, data, other)
with penstock.Checkpointer("run", mode="lazy") as ckpt:
    step = load_state(accelerator, ckpt) or 0
    for epoch in range(data.iteration, 3):
        for batch in data:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            for number, each in enumerate(other):
                loss = loss + model(each).mean()
                if number == 2:
                    break
            step += 1
            print(f"step {step} loss {loss.item()!r}", flush=True)
            save_state(accelerator, ckpt, step)
            if step == int(os.environ.get("STOP", "0")):
                sys.exit()
"""

# Saved between two optimizer steps, and saved again as soon as it is restored.
AGAIN = """
import torch
from accelerate import Accelerator
import penstock
from penstock.integrations.accelerate import load_state, save_state

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = accelerator.prepare(torch.nn.Linear(2, 1))
with penstock.Checkpointer("run") as ckpt:
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    save_state(accelerator, ckpt, 1).result()
    for step in (2, 3):
        accelerator.gradient_state._set_sync_gradients(True)  # as in a new process
        model.zero_grad()
        load_state(accelerator, ckpt)
        print("gradient", model.weight.grad)
        save_state(accelerator, ckpt, step).result()
"""

PLAIN = """
import torch
from accelerate import Accelerator, DataLoaderConfiguration
import penstock
from penstock.integrations.accelerate import load_state, save_state

options = [{}, {"use_stateful_dataloader": True}]
for number, each in enumerate(options):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**each))
    model = torch.nn.Linear(2, 1)
    loader = torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=2, shuffle=True)
    model, loader = accelerator.prepare(model, loader)
    with penstock.Checkpointer(f"run-{number}") as ckpt:
        for step, batch in enumerate(loader):
            save_state(accelerator, ckpt, step).result()

accelerator.state.distributed_type = "DEEPSPEED"
try:
    save_state(accelerator, ckpt, 9)
except penstock.ConfigError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_job_killed_in_a_save_resumes_exactly(tmp_path, ranks):
    check_exact_resume(program_of(PAGE), tmp_path, ranks=ranks)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_resume_is_exact_where_data_is_random_and_evaluation_is_left_early(tmp_path, workers):
    how = {"WORKERS": workers}
    unbroken = run(DRAWS, tmp_path / "unbroken", environment=how)
    assert len(unbroken.losses) == 15, unbroken.text
    for stop in (2, 5):  # in the middle of an epoch, and in the body of its last batch
        place = tmp_path / f"stopped-at-{stop}"
        stopped = run(DRAWS, place, environment={**how, "STOP": str(stop)})
        resumed = run(DRAWS, place, environment=how)
        assert min(resumed.losses) == stop + 1, resumed.text
        assert stopped.losses | resumed.losses == unbroken.losses


def test_gradients_are_saved_again_right_after_a_restore(tmp_path):
    ended = run(AGAIN, tmp_path)
    assert ended.returncode == 0, ended.text
    assert ended.text.count("gradient tensor([[0.5000, 0.5000]])") == 2, ended.text


def test_first_save_lists_unresumed_state_and_refuses_engines(tmp_path):
    ended = run(PLAIN, tmp_path)
    assert ended.returncode == 0, ended.text
    assert ended.text.count("data loader 0 does not report its position") == 1
    assert ended.text.count("data loader 0 shuffles with a RandomSampler") == 1
    assert "refused: penstock.integrations.accelerate cannot save" in ended.text


def test_other_number_of_ranks_starts_the_epoch_again_with_a_warning(tmp_path):
    program = program_of(PAGE)
    stops = program.replace("step += 1", "step += 1\n            assert step < 14")
    assert len(run(stops, tmp_path).losses) == 13
    resumed = run(program, tmp_path, ranks=2)
    assert resumed.returncode == 0, resumed.text
    assert "saved in the middle of epoch 1 by a different number of ranks" in resumed.text
    assert len(resumed.losses) == 10, resumed.text  # two epochs of five batches


def test_other_batch_size_starts_the_epoch_again_with_a_warning(tmp_path):
    program = program_of(PAGE)
    stops = program.replace("step += 1", "step += 1\n            assert step < 20")
    assert len(run(stops, tmp_path).losses) == 19
    resumed = run(program.replace("batch_size=4", "batch_size=8"), tmp_path)
    assert resumed.returncode == 0, resumed.text
    assert "epoch 1 with batches of 4 and now has batches of 8" in resumed.text
    assert len(resumed.losses) == 10, resumed.text  # two epochs of five batches
