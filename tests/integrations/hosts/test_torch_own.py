"""torch's tests of DCP, from a checkout, with our storage in place of its own.

`TORCH_CHECKOUT` names the checkout, of the installed release of torch.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("TORCH_CHECKOUT")
OURS = Path(__file__).with_name("in_place_of_files")
FILES = [
    "test_file_system_checkpoint_cpu.py",
    "test_file_system_checkpoint.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_tp_checkpoint.py",
    "test_hsdp_checkpoint.py",
    "e2e/test_e2e_save_and_load.py",
]
# Asks for GPUs and needs none. The other files move tensors to GPUs, or use FSDP.
ON_CPU = "test_dtensor_resharding.py"
OF_FILES = "Rot13 or ZStandard"  # these test transformations of DCP's files


@pytest.mark.skipif(CHECKOUT is None, reason="needs a checkout of torch, named by TORCH_CHECKOUT")
@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize("file", FILES)
def test_torch_uses_it_as_its_own_storage(tmp_path, file):
    pytest.importorskip("expecttest", reason="needs expecttest, which torch's tests need")
    saves = tmp_path / "saves"
    path = os.pathsep.join([str(OURS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PENSTOCK_SAVES": str(saves)}
    if file == ON_CPU:
        environment["PENSTOCK_ON_CPU"] = "1"
    ended = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-n", "0", "-W", "ignore",
            "-k", f"not ({OF_FILES})", f"test/distributed/checkpoint/{file}",
        ],
        cwd=CHECKOUT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ended.returncode == 0 and not saves.exists():
        pytest.skip(f"all of {file} needs GPUs")
    assert ended.returncode == 0, ended.stdout[-8000:]
