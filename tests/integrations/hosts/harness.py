"""Host programs that are killed during a save and resume exactly.

A program prints `step N loss X` for each step, the loss with all its digits, and saves below its
working directory. Started again, it resumes.
"""

import importlib.util
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import interpreters

KILLED = Path(__file__).with_name("killed.py")
ROOT = Path(__file__).parents[3]
_LIMIT_S = 600
os.environ["HF_HUB_OFFLINE"] = "1"  # is read when a server imports its host
# The imports of the server of a host's programs: theirs, and those of the host in training. A
# program belongs to the first host here that it imports.
_HF = ("penstock.integrations.transformers", "transformers.models.gpt2.modeling_gpt2", "deepspeed")
_HOSTS = {
    "trl": (*_HF, "trl.trainer.sft_trainer"),
    "transformers": (*_HF, "datasets"),
    "accelerate": ("penstock.integrations.accelerate", "torchdata.stateful_dataloader"),
    "lightning": ("lightning.pytorch", "torchdata.stateful_dataloader"),
    "deepspeed": ("penstock.integrations.deepspeed", "torch._dynamo.backends.debugging"),
    "torchtitan": ("penstock.integrations.torchtitan", "torchtitan.components.optimizer"),
}
_LOSS = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """The output of one start of a program, and its end."""

    losses: dict[int, str]
    calls: int | None
    returncode: int
    text: str


def needs(*modules):
    """Skip where one is missing, without importing them: the server does."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: make test-hosts")


def program_of(page, number=0):
    """The `number`-th Python block of a page of the documentation."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return _BLOCK.findall(text)[number]


def run(program, folder, *, ranks=1, kill_at=0, environment=None):
    """Run a program to its end, or until rank 0 is killed at a call that changes the store."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "program.py"
    script.write_text(program, encoding="utf-8")
    variables = {
        **os.environ,
        "KILL_AT": str(kill_at),
        "PYTHONUNBUFFERED": "1",  # the output of a killed process must be seen
        "TOKENIZERS_PARALLELISM": "false",
        **(environment or {}),
    }
    how = {"cwd": folder, "env": variables, "timeout": _LIMIT_S}
    server = _server_for(program)
    if ranks == 1:
        ended = [server.run(KILLED, script, **how)]
    else:
        ended = server.run_as_torchrun(ranks, KILLED, script, **how)
    out = "".join(rank.stdout for rank in ended)
    err = "".join(rank.stderr for rank in ended)
    losses = {int(step): loss for step, loss in _LOSS.findall(out)}
    calls = re.search(r"^calls (\d+)$", err, re.MULTILINE)
    code = next((rank.returncode for rank in ended if rank.returncode), 0)
    return Outcome(losses, int(calls[1]) if calls else None, code, out + err)


def _server_for(program):
    """The server that has imported the host of a program."""
    named = re.findall(r"^(?:import|from) (\w+)", program, re.MULTILINE)
    return interpreters.server(*next((_HOSTS[name] for name in _HOSTS if name in named), ()))


def check_exact_resume(program, folder, **how):
    """Kill a program during a save and resume it, twice: the losses stay the same."""
    unbroken = run(program, folder / "unbroken", **how)
    assert unbroken.returncode == 0, unbroken.text
    place = folder / "killed"
    losses = {}
    for percent in (40, 25):  # of all calls, from the last checkpoint on
        killed = run(program, place, kill_at=unbroken.calls * percent // 100, **how)
        assert killed.returncode == -signal.SIGKILL, killed.text
        assert killed.calls is None, "it ended before it was killed"
        _join(losses, killed)
    resumed = run(program, place, **how)
    assert resumed.returncode == 0, resumed.text
    _join(losses, resumed)
    assert losses == unbroken.losses


def _join(losses, outcome):
    """Add the losses of one more start, which must resume at a checkpoint."""
    if losses:
        assert min(outcome.losses) > 1, f"it began again\n{outcome.text}"
    again = losses.keys() & outcome.losses.keys()
    assert {step: losses[step] for step in again} == {step: outcome.losses[step] for step in again}
    losses |= outcome.losses
