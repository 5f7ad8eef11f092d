"""Delays are equal in every run, for any threads, and change nothing else."""

import pytest

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.testing.backends import check_backend
from penstock.testing.faults import LatencyBackend


@pytest.fixture
def slept(monkeypatch):
    """Seconds of every sleep, which returns at once."""
    slept = []
    monkeypatch.setattr("penstock.testing.faults.time.sleep", slept.append)
    return slept


def slow(**options):
    return LatencyBackend(MemoryBackend(MemoryConfig()), **options)


def play(backend):
    for number in range(5):
        backend.publish(f"record-{number}", b"x")
        backend.list("")


@pytest.mark.slow
def test_it_conforms(tmp_path):
    def open_root(root):
        memory = MemoryBackend(MemoryConfig(name=f"{tmp_path}{root}"))
        return LatencyBackend(memory, jitter_s=1e-6)

    check_backend(open_root)


def test_jitter_is_the_same_for_the_same_seed(slept):
    for seed in (1, 1, 2):
        play(slow(jitter_s=0.5, seed=seed))
    first, second, other = slept[:10], slept[10:20], slept[20:]
    assert first == second
    assert first != other
    assert len(set(first)) == len(first), "all calls are delayed alike"
    assert all(0 <= seconds < 0.5 for seconds in slept)
