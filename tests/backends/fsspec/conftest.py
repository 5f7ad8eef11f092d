"""Stores under test: a real S3 server on loopback, a proxy that breaks it, and file systems."""

import functools
import uuid
from contextlib import ExitStack, closing, suppress

import pytest
from tests.backends import s3_server
from tests.backends.fault_proxy import FaultProxy

from penstock.backends.fsspec import FsspecBackend, FsspecConfig
from penstock.testing.hasty import FAST

PART = 5 << 20  # the smallest that S3 takes


@pytest.fixture(scope="session")
def s3_url():
    """The URL of an S3 server, one for each process that runs tests."""
    missing = s3_server.missing()
    if missing:
        pytest.skip(f"needs an S3 server on loopback: {missing} is missing")
    with s3_server.running() as url:
        yield url


@pytest.fixture(scope="session", autouse=True)
def _models():
    """Let all clients share the models of botocore, which take 0.2 s of CPU to read."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError):
            from botocore import session

            patch.setattr(session, "create_loader", functools.cache(session.create_loader))
        yield


@pytest.fixture(autouse=True)
def _credentials(monkeypatch):
    for name, value in s3_server.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def _quick_retries(waits):
    waits(FAST)


@pytest.fixture
def proxy(s3_url):
    """A proxy in front of the server, without faults yet."""
    with FaultProxy(s3_url) as running:
        yield running


@pytest.fixture
def folder():
    """A folder of the bucket that no other test uses."""
    return f"{s3_server.BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def plain_client(s3_url):
    """A plain client, which shows the objects that are really stored."""
    with closing(s3_server.client(s3_url)) as client:
        yield client


@pytest.fixture
def opened():
    """Open backends by their options, and close all of them."""
    with ExitStack() as stack:

        def open_one(url, **options):
            return stack.enter_context(closing(FsspecBackend(FsspecConfig(url=url, **options))))

        yield open_one


@pytest.fixture
def store(opened, folder, s3_url):
    """A backend on the server itself."""
    return opened(f"s3://{folder}", options={"endpoint_url": s3_url}, part_bytes=PART)


@pytest.fixture
def behind_proxy(proxy, folder, opened):
    """Open a backend behind the proxy that knows that conditional puts work."""
    # In this order: the proxy lasts until the backend has aborted the uploads that a test left.
    return functools.partial(
        opened,
        f"s3://{folder}",
        options={"endpoint_url": proxy.url},
        part_bytes=PART,
        conditional_put="yes",
    )


@pytest.fixture
def shaky(behind_proxy):
    """One that waits for answers for as long as a busy machine takes."""
    return behind_proxy(timeout_s=60)


@pytest.fixture
def impatient(behind_proxy):
    """One for calls that get no answer."""
    return behind_proxy(timeout_s=4)
