"""Every kind of store keeps the contract, even if some requests fail."""

import random
import uuid

import pytest

from penstock.backends.fsspec import FsspecBackend, FsspecConfig
from penstock.testing.backends import check_backend
from penstock.testing.backends.blobs import an_abort_leaves_a_later_blob_of_its_name_alone

PART = 5 << 20


@pytest.mark.slow
def test_memory_file_system_conforms():
    root = uuid.uuid4().hex
    check_backend(lambda name: FsspecBackend(FsspecConfig(url=f"memory://{root}/{name}")))


@pytest.fixture
def open_local(tmp_path):
    return lambda name: FsspecBackend(FsspecConfig(url=f"file://{tmp_path}/{name}"))


@pytest.mark.slow
def test_local_file_system_conforms(open_local):
    check_backend(open_local)


def test_abort_on_a_local_file_system_leaves_a_later_blob_alone(open_local):
    an_abort_leaves_a_later_blob_of_its_name_alone(open_local)


@pytest.mark.s3
def test_s3_conforms(s3_url, folder):
    options = {"endpoint_url": s3_url}
    check_backend(
        lambda name: FsspecBackend(FsspecConfig(url=f"s3://{folder}/{name}", options=options))
    )


@pytest.mark.slow
@pytest.mark.s3
def test_s3_conforms_through_failures(proxy, folder):
    chance = random.Random(0)
    taken = proxy.take

    def take(method, path):
        # No lost answer to a conditional put: its caller would have to read the record.
        kinds = ["500", "503", "reset", "lost"] if method in ("GET", "HEAD") else ["503"]
        return chance.choice(kinds) if chance.random() < 0.1 else taken(method, path)

    proxy.take = take
    check_backend(
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
