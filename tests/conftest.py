"""What every test shares: hypothesis profiles, and skips that say what is missing."""

import os
import signal

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
    "ci", hypothesis.settings.get_profile("default"), max_examples=100
)
hypothesis.settings.register_profile(
    "thorough", hypothesis.settings.get_profile("default"), max_examples=2000
)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)


@pytest.fixture(autouse=True)
def _needs_gpu(request):
    """Skip tests marked `gpu` where there is no CUDA device."""
    if request.node.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch.cuda.is_available() is False")


@pytest.fixture(autouse=True)
def _needs_uring(request):
    """Skip tests marked `uring` where io_uring cannot be used."""
    if request.node.get_closest_marker("uring") is None:
        return
    from penstock.backends.uring import UringBackend, UringConfig
    from penstock.core.errors import CapabilityError

    try:
        UringBackend(UringConfig(path="/nonexistent")).close()
    except CapabilityError as error:
        pytest.skip(f"needs io_uring: {error}")
