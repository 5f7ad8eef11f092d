"""Every kind of store keeps the contract, even if some requests fail."""

import random
import uuid

import pytest

from penstock.backends.fsspec import FsspecBackend, FsspecConfig
from penstock.core.testing.backends import BACKEND_CHECKS
from penstock.core.testing.expectations import NotDeclaredError

PART = 5 << 20


def checks(test):
    return pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda c: c.__name__)(test)


@checks
def test_memory_file_system_conforms(check):
    root = uuid.uuid4().hex
    check(lambda name: FsspecBackend(FsspecConfig(url=f"memory://{root}/{name}")))


@checks
def test_local_file_system_conforms(check, tmp_path):
    check(lambda name: FsspecBackend(FsspecConfig(url=f"file://{tmp_path}/{name}")))


@pytest.mark.s3
@checks
def test_s3_conforms(check, s3_url, folder):
    options = {"endpoint_url": s3_url}
    check(lambda name: FsspecBackend(FsspecConfig(url=f"s3://{folder}/{name}", options=options)))


@pytest.mark.slow
@pytest.mark.s3
@checks
def test_s3_conforms_through_failures(check, proxy, folder):
    chance = random.Random(check.__name__)
    taken = proxy.take

    def take(method, path):
        # No lost answer to a conditional put: its caller would have to read the record.
        kinds = ["500", "503", "reset", "lost"] if method in ("GET", "HEAD") else ["503"]
        return chance.choice(kinds) if chance.random() < 0.1 else taken(method, path)

    proxy.take = take
    check(
        lambda name: FsspecBackend(
            FsspecConfig(
                url=f"s3://{folder}/{name}",
                options={"endpoint_url": proxy.url},
                part_bytes=PART,
                conditional_put="no",
                attempts=10,
            )
        )
    )


def test_what_is_not_declared_is_left_out_on_file_systems_only(tmp_path, opened):
    backend = opened(f"file://{tmp_path}/x")
    assert backend.capabilities.ordered
    assert not backend.capabilities.exclusive_publish
    left_out = []
    for check in BACKEND_CHECKS:
        if check.__name__ in ("batches_from_threads_read_back", "of_publishers_in_a_race_exactly"):
            with pytest.raises(NotDeclaredError):
                check(lambda name: FsspecBackend(FsspecConfig(url=f"file://{tmp_path}/{name}")))
            left_out.append(check.__name__)
    assert left_out == ["batches_from_threads_read_back"]
