"""Google's and Azure's clients against servers on loopback that speak their protocols.

    pip install gcsfs gcp-storage-emulator adlfs && npm install --prefix /tmp/azurite azurite
    PATH=/tmp/azurite/node_modules/.bin:$PATH pytest tests/backends/fsspec/test_clouds.py

The emulator of Google ignores conditions, Azurite obeys them.
"""

import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager

import pytest
import torch

import penstock
from penstock.backends.fsspec import FsspecBackend, FsspecConfig
from penstock.testing.backends import check_backend

# The clients themselves cause these warnings.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

CONTAINER = "run"
ACCOUNT = "devstoreaccount1"  # the default of Azurite, as is the key
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def serving(command, port):
    """A server that listens at `port`."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            assert process.poll() is None, f"{command[0]} ended by itself"
            with socket.socket() as client:
                if not client.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"{command[0]} does not listen at port {port}")
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def google():
    pytest.importorskip("gcsfs", reason="needs gcsfs")
    pytest.importorskip("gcp_storage_emulator", reason="needs gcp-storage-emulator")
    port = free_port()
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--in-memory"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--default-bucket", CONTAINER]
    with serving(command, port), pytest.MonkeyPatch.context() as patch:
        # Or gcsfs asks by gRPC over TLS for the kind of the bucket, for a minute each time.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        endpoint = f"http://127.0.0.1:{port}"
        yield "gs", {"endpoint_url": endpoint, "token": "anon", "project": "tests"}


@pytest.fixture(scope="module")
def azure(tmp_path_factory):
    adlfs = pytest.importorskip("adlfs", reason="needs adlfs")
    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("needs azurite-blob (npm install azurite)")
    port, folder = free_port(), str(tmp_path_factory.mktemp("azurite"))
    command = [program, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
    text += f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    with serving([*command, "--blobPort", str(port), "--location", folder], port):
        adlfs.AzureBlobFileSystem(connection_string=text).mkdir(CONTAINER)
        yield "abfs", {"connection_string": text}


@pytest.fixture(params=["google", "azure"])
def cloud(request):
    """A configuration of a folder that no other test uses."""
    scheme, options = request.getfixturevalue(request.param)
    return {"url": f"{scheme}://{CONTAINER}/{uuid.uuid4().hex}", "options": options}


@pytest.mark.slow
def test_it_conforms(cloud):
    check_backend(
        lambda name: FsspecBackend(FsspecConfig(**{**cloud, "url": f"{cloud['url']}/{name}"}))
    )


def test_a_run_works_there(cloud):
    backend = {"type": "fsspec", **cloud}
    state = {"w": torch.randn(5_000_000), "small": [torch.arange(10), 3, "x"]}
    with penstock.Checkpointer(backend, retention={"keep_last": 2}) as ckpt:
        for step in (1, 2, 3):
            state["w"] += 1
            ckpt.save(state, step).result()
        ckpt.save(state, 3, overwrite=True).result()
        target = {"w": torch.zeros(5_000_000), "small": [torch.zeros(10, dtype=torch.int64), 0, ""]}
        assert ckpt.restore(target).step == 3
        assert torch.equal(target["w"], state["w"])
        assert ckpt.verify().ok
        ckpt.prune()
        assert ckpt.steps() == [2, 3]
        assert ckpt.load(include="small")["small"][1:] == [3, "x"]


def test_azure_arbitrates_savers(azure):
    scheme, options = azure
    backend = {"type": "fsspec", "url": f"{scheme}://{CONTAINER}/race", "options": options}
    start, won, lost = threading.Barrier(4), [], []

    def save(number):
        with penstock.Checkpointer(backend) as ckpt:
            start.wait()
            try:
                report = ckpt.save({"who": number}, 1, mode="blocking").result()
            except (penstock.LostRaceError, penstock.StepExistsError):
                lost.append(number)
            else:
                assert report.exclusive
                won.append(number)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 3
    with penstock.Checkpointer(backend) as ckpt:
        assert ckpt.load() == {"who": won[0]}
