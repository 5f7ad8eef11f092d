"""The password is shown nowhere."""

import logging
import pickle
import traceback

import pytest
from penstock import Checkpointer
from penstock.core.errors import ConfigError, StorageError
from pydantic import ValidationError
from servers import write

from penstock_redis.config import RedisConfig

PASSWORD = "hunter2-and-more"


@pytest.fixture
def guarded(own_server):
    return own_server("--requirepass", PASSWORD, password=PASSWORD)


def shown(error):
    return repr(error) + str(error) + "".join(traceback.format_exception(error))


@pytest.mark.parametrize("way", ["environment", "option"])
def test_it_is_used_and_not_shown(guarded, monkeypatch, caplog, way):
    caplog.set_level(logging.DEBUG)
    options = {"password": PASSWORD} if way == "option" else {}
    if way == "environment":
        monkeypatch.setenv("REDIS_PASSWORD", PASSWORD)
    config = RedisConfig(url=guarded.url, retry_total_s=0, **options)
    backend = guarded.open(retry_total_s=0, **options)
    write(backend, "data/a.raw", b"12345")
    said = [repr(config), str(config), config.model_dump_json(), backend.url, repr(backend)]
    said += [repr(backend._server._redis), repr(backend._server._pool), repr(backend.capabilities)]
    guarded.kill()
    with pytest.raises(StorageError) as caught:
        backend.publish("r.json", b"{}")
    said += [shown(caught.value), repr(pickle.loads(pickle.dumps(caught.value))), caplog.text]
    assert PASSWORD not in "".join(said)
    backend.close()


def test_a_wrong_one_is_not_shown_and_not_tried_again(guarded):
    with pytest.raises(StorageError, match=r"check REDIS_USERNAME, REDIS_PASSWORD") as caught:
        guarded.open(password="wrong-" + PASSWORD, retry_total_s=3600)
    assert PASSWORD not in shown(caught.value)


def test_a_missing_one_says_what_is_missing(guarded):
    with pytest.raises(StorageError, match="check REDIS_USERNAME, REDIS_PASSWORD"):
        guarded.open(retry_total_s=3600)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{PASSWORD}@127.0.0.1:1/0/run",
        f"redis://user:{PASSWORD}@127.0.0.1:1/0/run",
        f"redis://127.0.0.1:1/0/run?password={PASSWORD}",
        f"redis://127.0.0.1:1/0/run?pasword={PASSWORD}",
    ],
)
def test_urls_that_hold_one_are_refused_without_showing_it(url):
    with pytest.raises(ConfigError) as caught:
        Checkpointer(url)
    assert PASSWORD not in shown(caught.value)


@pytest.mark.parametrize("field", ["url", "ttl_s", "max_bytes", "nothing"])
def test_mistaken_options_are_refused_without_showing_them(field):
    options = {"url": "redis://h:1/0", "password": PASSWORD, field: f"x-{PASSWORD}"}
    with pytest.raises(ValidationError) as caught:
        RedisConfig(**options)
    assert PASSWORD not in shown(caught.value)


def test_a_user_with_few_rights_is_enough(server, monkeypatch):
    rights = "~penstock:run:* -@all +@read +@write +@scripting +@connection +info +time"
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "saver", "on", f">{PASSWORD}", *rights.split())
    monkeypatch.setenv("REDIS_USERNAME", "saver")
    monkeypatch.setenv("REDIS_PASSWORD", PASSWORD)
    with Checkpointer(f"{server.url}/run?ttl_s=600&max_bytes=9MiB") as ckpt:
        ckpt.save({"a": 1}, step=1).result()
        assert ckpt.load(step=1) == {"a": 1}
        ckpt.delete(1)
        ckpt.prune()
    with pytest.raises(StorageError, match="check REDIS_USERNAME, REDIS_PASSWORD") as caught:
        server.open(prefix="other").publish("r.json", b"{}")
    assert PASSWORD not in shown(caught.value)
