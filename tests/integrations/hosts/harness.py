"""Programs of hosts that are killed in the middle of a save and resume as if nothing had happened.

A program prints `step N loss X` for each step, the loss with all its digits, and saves below its
working directory. Started again, it resumes.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KILLED = Path(__file__).with_name("killed.py")
ROOT = Path(__file__).parents[3]
_LIMIT_S = 600
_LOSS = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What one start of a program printed, and how it ended."""

    losses: dict[int, str]
    calls: int | None
    returncode: int
    text: str


def program_of(page, number=0):
    """The `number`-th Python block of a page of the documentation."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return _BLOCK.findall(text)[number]


def run(program, folder, *, ranks=1, kill_at=0, environment=None):
    """Run a program to its end, or until rank 0 is killed at a call that changes the store."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "program.py"
    script.write_text(program, encoding="utf-8")
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        launcher += ["--master-port", str(_free_port()), "--log-dir", str(folder / "logs")]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "KILL_AT": str(kill_at),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # what a killed process has printed must be seen
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(environment or {}),
    }
    ended = subprocess.run(
        [*launcher, str(KILLED), str(script)],
        cwd=folder, env=variables, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    losses = {int(step): loss for step, loss in _LOSS.findall(ended.stdout)}
    calls = re.search(r"^calls (\d+)$", ended.stderr, re.MULTILINE)
    text = ended.stdout + ended.stderr
    return Outcome(losses, int(calls[1]) if calls else None, ended.returncode, text)


def check_exact_resume(program, folder, **how):
    """Kill a program in the middle of a save, resume it, three times: the losses stay the same."""
    unbroken = run(program, folder / "unbroken", **how)
    assert unbroken.returncode == 0, unbroken.text
    place = folder / "killed"
    losses = {}
    for percent in (40, 25, 15):  # of the calls of the whole, from the last checkpoint on
        killed = run(program, place, kill_at=unbroken.calls * percent // 100, **how)
        assert killed.returncode in {-signal.SIGKILL, 1}, killed.text
        assert killed.calls is None, "it ended before it was killed"
        _join(losses, killed)
    resumed = run(program, place, **how)
    assert resumed.returncode == 0, resumed.text
    _join(losses, resumed)
    assert losses == unbroken.losses


def _join(losses, outcome):
    """Add the losses of one more start, which has to resume where a checkpoint was."""
    if losses:
        assert min(outcome.losses) > 1, f"it began again\n{outcome.text}"
    again = losses.keys() & outcome.losses.keys()
    assert {step: losses[step] for step in again} == {step: outcome.losses[step] for step in again}
    losses |= outcome.losses


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
