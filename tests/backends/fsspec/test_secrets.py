"""Credentials are never shown: not in URLs, errors, logs, reprs or stored bytes."""

import logging
import traceback
from contextlib import closing

import pytest
import torch

import penstock
from penstock.backends.fsspec import FsspecBackend, FsspecConfig
from penstock.backends.fsspec.config import is_secret_name
from penstock.backends.fsspec.messages import Scrubber
from penstock.core.config.plugin_choice import shown_url
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.storage.open import open_backend

SECRETS = ("AKIDVERYSECRET", "s3cr3t/w0rd+", "t0k3n==")
OPTIONS = {"key": SECRETS[0], "secret": SECRETS[1], "token": SECRETS[2]}


def shown(text):
    return [secret for secret in SECRETS if secret in text]


def everything(error):
    return f"{error!r} {error} {''.join(traceback.format_exception(error))}"


@pytest.mark.s3
@pytest.mark.parametrize("kind", ["denied", "reset", "cut"])
def test_no_output_of_a_run_shows_credentials(proxy, folder, plain_client, caplog, kind):
    caplog.set_level(logging.DEBUG, "penstock")
    config = {
        "backend": {
            "type": "fsspec",
            "url": f"s3://{folder}",
            "options": {**OPTIONS, "endpoint_url": proxy.url},
            "attempts": 2,
        }
    }
    with penstock.Checkpointer.from_config(config) as checkpointer:
        texts = [repr(checkpointer), str(checkpointer)]
        handle = checkpointer.save({"a": torch.arange(10)}, step=1, mode="blocking")
        texts.append(repr(handle.result()))
        texts.append(repr(checkpointer.info(1)))
        texts.append(repr(checkpointer.restore({"a": torch.zeros(10, dtype=torch.int64)})))
        proxy.fail(kind, times=1000)
        with pytest.raises(PenstockError) as caught:
            checkpointer.verify(1)
        texts.append(everything(caught.value))
        proxy.heal()
    bucket, _, prefix = folder.partition("/")
    for entry in plain_client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        texts.append(entry["Key"])
        body = plain_client.get_object(Bucket=bucket, Key=entry["Key"])["Body"]
        texts.append(body.read().decode("latin-1"))
    texts.append(caplog.text)
    assert any(e.headers["Authorization"].find(SECRETS[0]) > 0 for e in proxy.exchanges)
    assert shown(" ".join(texts)) == []


def test_config_and_backend_hide_secrets():
    config = FsspecConfig(url="s3://bucket/run", options=OPTIONS)
    backend = FsspecBackend(config)
    texts = f"{config!r} {config} {backend!r} {backend} {backend.url} {vars(backend)}"
    backend.close()
    assert shown(texts) == []
    assert backend.url == "s3://bucket/run"


def test_refusals_hide_secrets():
    for spec in [
        f"s3://{SECRETS[0]}:{SECRETS[1]}@bucket/run",
        f"s3://bucket/run?secret={SECRETS[1]}",
        {"type": "fsspec", "url": "s3://bucket/run", "options": {**OPTIONS, "nonsense": 1}},
        {"type": "fsspec", "url": "s3://bucket/run", "options": {"anon": SECRETS[0]}},
        {"type": "fsspec", "url": "s3://bucket/run", "options": OPTIONS, "parallel": SECRETS[1]},
        {"type": "fsspec", "url": "memory://x", "options": SECRETS[0]},
    ]:
        with pytest.raises(ConfigError) as caught:
            open_backend(spec)
        assert shown(everything(caught.value)) == []


def test_url_of_any_file_system_hides_secrets():
    config = FsspecConfig(url=f"http://user:{SECRETS[2]}@127.0.0.1:9/run")
    with FsspecConfigured(config, attempts=1) as backend:
        assert backend.url == "http://127.0.0.1:9/run"
        with pytest.raises(PenstockError) as caught:
            backend.stat("r.json")
    assert shown(everything(caught.value)) == []
    assert "user" not in str(caught.value)


def test_names_of_credentials_are_known():
    for name in [
        "Authorization",
        "Cookie",
        "connection_string",
        "private_key",
        "apikey",
        "api-key",
        "X-Api-Key",
        "x-ms-key",
        "sas",
        "bearer",
        "jwt",
        "login",
    ]:
        assert is_secret_name(name)


def test_option_texts_are_hidden_unless_known_to_be_harmless():
    options = {
        "headers": {"X-Whatever": "hunter2"},
        "of_some_store": ["swordfish"],
        "region": "eu-central-1",
        "key": "k1",
        "anon": "yes",
    }
    assert {*FsspecConfig(url="gs://b/r", options=options).secrets} == {
        "hunter2",
        "swordfish",
        "k1",
    }


def test_odd_passwords_in_urls_are_not_shown():
    for url in [
        "s3://AKIA:12/hunter2SECRET@b/r",
        "s3://AKIA:a#hunter2SECRET@b/r",
        "s3://AKIA:a?hunter2SECRET@b/r",
        "sftp://u:1/hunter2SECRET@host/r",
        "sftp://u:a@hunter2SECRET@host/r",
        "https://hunter2SECRET@host/r",
    ]:
        assert "SECRET" not in shown_url(url)
        with (
            pytest.raises((ConfigError, PenstockError)) as caught,
            closing(open_backend(url)) as backend,
        ):
            backend.stat("r.json")
        assert "SECRET" not in everything(caught.value)


class FsspecConfigured:
    """Opens a backend for a `with` block."""

    def __init__(self, config, **options):
        self.backend = FsspecBackend(config.model_copy(update=options))

    def __enter__(self):
        return self.backend

    def __exit__(self, *exc):
        self.backend.close()


def test_scrubber_removes_secrets_users_and_queries():
    scrub = Scrubber(("abc", "abcdef"))
    assert scrub("ftp://me:p/w@host/path") == "ftp://host/path"
    assert scrub("http://host:80/a@b") == "http://host:80/a@b"
    text = "abcdef at https://me:pw@host/path?sig=xyz&x=1, and abc"
    assert scrub(text) == "*** at https://host/path and ***"


def test_credentials_in_the_endpoint_are_refused_unseen():
    # Created before: a traceback shows the raising lines.
    config = FsspecConfig(url="s3://bucket/run", options={"endpoint_url": "http://me:pw123@host"})
    with pytest.raises(ConfigError, match="do not belong in it") as caught:
        FsspecBackend(config)
    assert "pw123" not in everything(caught.value)
