"""A training that is killed at any moment resumes at the very step, and repeats the same losses."""

import random
import signal
import subprocess

import pytest
from tests import interpreters

pytestmark = pytest.mark.process

LAST, SAVE_EVERY = 20, 6


def train(root, kill_after=None, sync=1):
    """Train, and kill the training after a number of lines; return its lines."""
    command = (
        "-m",
        "tests.integration.log.train",
        str(root),
        str(LAST),
        str(SAVE_EVERY),
        str(sync),
    )
    process = interpreters.start(*command, stdout=subprocess.PIPE)
    lines = []
    for line in process.stdout:
        lines.append(line.split())
        if len(lines) == kill_after:
            process.send_signal(signal.SIGKILL)
            break
    process.communicate()
    return lines


@pytest.mark.parametrize(
    ("seed", "sync"),
    [(0, 1), (0, 8), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (1, 2))],
)
def test_killed_training_loses_at_most_the_step_that_was_not_yet_written(tmp_path, seed, sync):
    choice = random.Random(seed)
    whole = dict(train(tmp_path / "whole")[1:])
    assert len(whole) == LAST
    kill_until_trained(tmp_path / "killed", choice, whole, sync)


def kill_until_trained(root, choice, whole, sync=1):
    """Kill a training at drawn moments, resume it until its last step, and compare its losses."""
    reached = -1
    while reached < LAST - 1:
        lines = train(root, choice.randrange(2, 14), sync)
        # The entry of the last step may not be written yet.
        assert int(lines[0][1]) >= reached
        for step, loss in lines[1:]:
            assert loss == whole[step]
            reached = max(reached, int(step))
