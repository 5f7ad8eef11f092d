"""No read-only command waits for torch, whose import takes more than a second."""

import subprocess
import sys

import torch

import penstock

COMMANDS = """--help
plugins
schema
ls RUN
ls RUN --json
show RUN
verify RUN
verify RUN --all
copy RUN RUN/copy
export RUN RUN/hf --to safetensors --include weight
copy RUN RUN/encoded --include weight --codec zstd
diff RUN RUN/copy --norms
prune RUN
doctor RUN --probe-size 1MiB
delete RUN 3 --yes --force"""
PROGRAM = """
import sys
from penstock.core.cli.main import main
for line in sys.argv.pop().splitlines():
    sys.argv[:] = ["penstock", *line.split()]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, f"{line} failed with {stop.code}"
    assert "torch" not in sys.modules, f"{line} imported torch"
"""


def test_commands_do_not_import_torch(tmp_path):
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save({"weight": torch.arange(4096.0), "epoch": 7}, step=3, mode="blocking")
    commands = COMMANDS.replace("RUN", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, commands], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
