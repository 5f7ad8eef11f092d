"""Prove that the command line never waits for torch (importing it takes more than a second).

Saves a small run, then looks at it with real commands in fresh processes, and at `sys.modules`
after each.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

SAVE = """
import sys, torch, penstock
with penstock.Checkpointer(sys.argv[1]) as ckpt:
    ckpt.save({"weight": torch.arange(4096.0), "epoch": 7}, step=3, mode="blocking").result()
"""

COMMAND = """
import sys
import penstock.core.cli.main
code = 0
sys.argv[0] = "penstock"
try:
    penstock.core.cli.main.main()
except SystemExit as stop:
    code = stop.code or 0
if code:
    sys.exit(f"failed with {code}")
if "torch" in sys.modules:
    sys.exit("imported torch")
"""


def main() -> None:
    """Run every command once."""
    with tempfile.TemporaryDirectory(prefix="penstock-torch-free-") as run:
        subprocess.run([sys.executable, "-P", "-c", SAVE, run], check=True)
        commands = (
            ["--help"],
            ["plugins"],
            ["schema"],
            ["ls", run],
            ["ls", run, "--json"],
            ["show", run],
            ["verify", run],
            ["verify", run, "--all"],
            ["copy", run, f"{run}/copy"],
            ["export", run, f"{run}/hf", "--to", "safetensors", "--include", "weight"],
            ["copy", run, f"{run}/encoded", "--include", "weight", "--codec", "zstd"],
            ["diff", run, f"{run}/copy", "--norms"],
            ["prune", run],
            ["doctor", run, "--probe-size", "1MiB"],
            ["delete", run, "3", "--yes", "--force"],
        )
        for arguments in commands:
            done = subprocess.run(
                [sys.executable, "-P", "-c", COMMAND, *arguments],
                check=False,
                capture_output=True,
                text=True,
            )
            if done.returncode != 0:
                shown = " ".join(arguments)
                sys.exit(f"check_torch_free: `penstock {shown}`:\n{done.stdout}{done.stderr}")
        print(f"torch-free: {len(commands)} commands ran without importing torch")


if __name__ == "__main__":
    main()
