"""The Redis example is installed like any other, and used by configuration alone."""

import os
import shutil
import tempfile
import textwrap
from pathlib import Path

import pytest
from tests.environments import Environment, missing_to_install

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "plugin-redis"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    if missing_to_install():
        pytest.skip(f"needs {missing_to_install()}, to build and install the example")
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server: apt-get install redis-server")
    environment = Environment(tmp_path_factory.mktemp("plugin-redis"))
    try:
        # With its dependencies: from the index, unless redis-py is installed.
        environment.install(EXAMPLE, "-c", ROOT / "constraints.txt")
    except AssertionError as error:
        if os.environ.get("CI") or "redis" not in str(error):
            raise
        pytest.skip("needs redis-py, which pip could not get: pip install redis")
    # Only the tests: beside the sources they could pass without an install.
    shutil.copytree(EXAMPLE / "tests", environment.folder / "tests")
    return environment


def test_plugins_lists_it_with_its_distribution(environment):
    plugins = environment.plugins("--check")
    (ours,) = [p for p in plugins if p["distribution"] == "penstock-redis"]
    assert (ours["kind"], ours["name"], ours["version"]) == ("backend", "redis", "0.1.0")
    assert ours["target"] == "penstock_redis.backend:RedisBackend"
    assert ours["state"] == "ok"
    done = environment.code("import penstock_redis as p; print(p.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(environment.site)


CONFIG = """
[backend]
type = "redis"
url = "{url}"
prefix = "run1"
"""

# Two processes; the second knows only what the first put into the server.
SAVE = """
    import penstock, torch

    state = {"weight": torch.arange(2_000_000.0), "step": 3}
    with penstock.Checkpointer.from_config("penstock.toml") as ckpt:
        assert ckpt.save(state, step=3).result().exclusive
"""
RESTORE = """
    import penstock, torch

    state = {"weight": torch.zeros(2_000_000), "step": 0}
    with penstock.Checkpointer.from_config("penstock.toml") as ckpt:
        ckpt.restore(state)
        assert ckpt.verify().ok
    assert torch.equal(state["weight"], torch.arange(2_000_000.0))
    assert state["step"] == 3
"""
SERVER = """
    import subprocess, sys
    sys.path.insert(0, "tests")
    from pathlib import Path
    from conftest import SAFE, RedisServer

    server = RedisServer(Path.cwd()).start(*SAFE)
    try:
        Path("penstock.toml").write_text(sys.argv[1].format(url=server.url))
        for source in sys.argv[2:]:
            subprocess.run([sys.executable, "-c", source], check=True)
        shown = [sys.executable, "-m", "penstock", "ls", server.url + "/run1"]
        print(subprocess.run(shown, check=True, text=True, capture_output=True).stdout)
    finally:
        server.kill()
"""


def test_configuration_alone_saves_and_restores(environment):
    sources = [textwrap.dedent(source) for source in (SAVE, RESTORE)]
    shown = environment.code(SERVER, CONFIG, *sources).stdout
    assert "3" in shown.split()


def test_its_own_tests_pass(environment):
    options = ("-q", "-p", "no:cacheprovider", "-W", "error", "--rootdir", environment.folder)
    # The server syncs its file after each of thousands of commands: in memory that costs nothing.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        done = environment.run(
            "-m", "pytest", *options, f"--basetemp={folder}/runs", "-rs", "tests"
        )
    assert "passed" in done.stdout
    left_out = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("declare" in line for line in left_out), left_out
