"""Shared by all tests: hypothesis profiles, and skips that name what is missing."""

import dataclasses
import gc
import os
import signal
import sys
import threading
from contextlib import ExitStack

# A shell without job control starts `pytest &` with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported anywhere: the suite runs several processes at once, and training that
# is compared bit by bit must use the same number of threads in each of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

# No deadline: the disk is shared, and no test asserts a time. Failures print a blob to reproduce.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True, max_examples=50)
hypothesis.settings.register_profile(
    "thorough", hypothesis.settings.get_profile("default"), max_examples=2000
)
# Of `make test`, see `effort.py`: a few examples, the same ones each time.
hypothesis.settings.register_profile(
    "quick",
    hypothesis.settings.get_profile("default"),
    max_examples=10,
    derandomize=True,
    database=None,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser):
    parser.addoption(
        "--fast", action="store_true", help="skip tests as soon as they start a process or sleep"
    )


def pytest_configure(config):
    if "not slow" in config.getoption("markexpr") and "HYPOTHESIS_PROFILE" not in os.environ:
        hypothesis.settings.load_profile("quick")
    if "gpu" not in config.getoption("markexpr"):
        # Several ranks run on the CPU: if they see a device, torch wants one for each of them.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.getoption("--fast"):
        sys.addaudithook(_skip_what_leaves_this_process)


_STARTS = {"subprocess.Popen", "tests.interpreters.start", "os.fork", "os.forkpty"}
_running = set()  # the names of running tests: one, or none


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    _running.add(item.nodeid)
    try:
        return (yield)
    finally:
        _running.clear()
        _freeze_what_was_imported()


def _skip_what_leaves_this_process(event, arguments):
    # This is called for every opened file, and much else: it must be quick.
    if event not in _STARTS and (event != "time.sleep" or arguments[0] <= 0):
        return
    if _running and threading.current_thread() is threading.main_thread():
        pytest.skip(f"--fast: {event} is left out")


@pytest.fixture(autouse=True)
def _needs_gpu(request):
    """Skip tests marked `gpu` where no CUDA device is seen."""
    if request.node.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and `make test-gpu`")


@pytest.fixture(autouse=True)
def _needs_uring(request):
    """Skip tests marked `uring` where io_uring cannot be used."""
    if request.node.get_closest_marker("uring") is None:
        return
    from penstock.backends.uring.engine import UringBackend, UringConfig
    from penstock.core.errors import CapabilityError

    try:
        UringBackend(UringConfig(path="/nonexistent")).close()
    except CapabilityError as error:
        pytest.skip(f"needs io_uring: {error}")


@pytest.fixture
def waits():
    """Applies other waits to everything opened later: `waits(FAST, release_s=0.01)`.

    The first argument, if there is one, is a whole `Timing`; the others are fields of it.
    """
    from penstock.testing.hasty import current_timing, timing_in_force

    with ExitStack() as stack:

        def put(timing=None, **fields):
            timing = dataclasses.replace(timing or current_timing(), **fields)
            return stack.enter_context(timing_in_force(timing))

        yield put


_MANY = 200  # modules; the first optimizer imports 1,000
_frozen = [0]  # the modules at the last freeze


def _freeze_what_was_imported():
    """Let the garbage collector skip imported modules if many are new."""
    if len(sys.modules) > _frozen[0] + _MANY:
        gc.collect()
        gc.freeze()
        _frozen[0] = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage meanwhile: there is none, and each search takes 0.5 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _freeze_what_was_imported()
