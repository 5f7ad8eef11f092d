"""One training script; which store its checkpoints live in is a matter of its configuration file.

It is run to the middle, and again to the end, each time as a process of its own; the losses must be
those of a run that was never interrupted, wherever the state has been meanwhile.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests import interpreters
from tests.backends import s3_server
from tests.integration.support import uring_missing

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("train_by_config.py")
STEPS = 6

CONFIGS = {
    "local": '[backend]\ntype = "posix"\npath = "${ROOT}/run"\n',
    "plain path": 'backend = "${ROOT}/run"\nmode = "lazy"\n',
    "uring": '[backend]\ntype = "uring"\npath = "${ROOT}/run"\n',
    "lustre, but it is none": (
        '[backend]\ntype = "lustre"\npath = "${ROOT}/run"\nnot_lustre = "warn"\n'
    ),
    "tiered": (
        '[backend]\ntype = "tiered"\nfast = "${ROOT}/fast"\ndurable = "${ROOT}/durable"\n'
        "keep_fast = 1\n"
    ),
    "s3": (
        '[backend]\ntype = "fsspec"\nurl = "s3://${BUCKET}/run"\n'
        'options = { endpoint_url = "${S3}" }\n'
    ),
    "tiered over s3": (
        '[backend]\ntype = "tiered"\nfast = "${ROOT}/fast"\n'
        '[backend.durable]\ntype = "fsspec"\nurl = "s3://${BUCKET}/tiered"\n'
        'options = { endpoint_url = "${S3}" }\n'
    ),
    "redis": (
        '[backend]\ntype = "redis"\nurl = "redis://127.0.0.1:${REDIS_PORT}/0"\nprefix = "run"\n'
    ),
}
RULES = '[[rules]]\nmatch = "optimizer/**"\ncodecs = ["zstd"]\n'


@contextmanager
def redis_running(folder):
    """A server on a free port, and the variables by which the plugin is found."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("needs redis-server: apt-get install redis-server")
    pytest.importorskip("redis", reason="needs redis-py: pip install redis")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    site = folder / "site"
    info = site / "penstock_redis-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-redis\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[penstock.backends]\nredis = penstock_redis.backend:RedisBackend\n"
    )
    command = [binary, "--port", str(port), "--save", "", "--dir", str(folder)]
    command += ["--appendonly", "yes", "--appendfsync", "always"]  # which the backend demands
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, "redis-server did not start"
                time.sleep(0.05)
        path = [str(site), str(ROOT / "examples/plugin-redis/src")]
        yield {"REDIS_PORT": str(port), "PYTHONPATH": os.pathsep.join(path)}
    finally:
        server.kill()
        server.wait()


@contextmanager
def s3_running():
    if reason := s3_server.missing():
        pytest.skip(f"needs {reason}")
    with s3_server.running() as url:
        yield {"S3": url, "BUCKET": s3_server.BUCKET, **s3_server.ENVIRONMENT}


def train(config, steps, variables):
    paths = [variables.get("PYTHONPATH", ""), *(p for p in sys.path if p)]
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    done = interpreters.run(SCRIPT, config, steps, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    config = folder / "penstock.toml"
    config.write_text(CONFIGS["local"])
    return train(config, STEPS, {"ROOT": str(folder)})


QUICK = {"tiered"}  # which has most threads, and needs no server


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CONFIGS]
)
def test_a_run_goes_on_exactly_wherever_its_checkpoints_live(name, uninterrupted, tmp_path):
    if name == "uring" and (reason := uring_missing()) is not None:
        pytest.skip(reason)
    config = tmp_path / "penstock.toml"
    text = CONFIGS[name]
    config.write_text(text + RULES)
    with (
        redis_running(tmp_path) if name == "redis" else _nothing() as redis,
        s3_running() if "${S3}" in text else _nothing() as s3,
    ):
        variables = {"ROOT": str(tmp_path), **redis, **s3}
        first = train(config, 2, variables)
        second = train(config, STEPS, variables)
    assert (first["resumed"], second["resumed"]) == (None, 2)
    assert first["losses"] | second["losses"] == uninterrupted["losses"]
    assert second["weights"] == uninterrupted["weights"]


@contextmanager
def _nothing():
    yield {}
