"""Options, and URLs that mean the same."""

import pytest
from penstock.core.errors import ConfigError
from pydantic import ValidationError

from penstock_redis.backend import RedisBackend
from penstock_redis.config import RedisConfig


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:7000/3/run/a", ("host", 7000, 3, "run/a")),
        ("redis://host:7000/3", ("host", 7000, 3, "penstock")),
        ("redis://host:7000/3/", ("host", 7000, 3, "penstock")),
        ("redis://host", ("host", 6379, 0, "penstock")),
        ("redis://[::1]:7000/0/run", ("::1", 7000, 0, "run")),
    ],
)
def test_url_says_where(url, expected):
    config = RedisBackend.from_url(url, {"ttl_s": "3600", "max_bytes": "4 GiB"})
    assert (config.host, config.port, config.database, config.prefix) == expected
    assert (config.ttl_s, config.max_bytes) == (3600, 4 << 30)
    again = RedisBackend.from_url(config.shown_url, {})
    assert (again.host, again.port, again.database, again.prefix) == expected


@pytest.mark.parametrize(
    "url",
    ["redis://", "redis:///0", "http://host:1/0", "redis://host:1/run", "redis://host:99999/0",
     "redis://host:0/0", "redis://host:x/0", "redis://host:1/0?db=1", "host"],
)  # fmt: skip
def test_url_that_means_nothing_is_refused(url):
    with pytest.raises(ValidationError):
        RedisConfig(url=url)


@pytest.mark.parametrize("prefix", ["", "/", "a//b", "a:b", "a b", "{a}", "a*", "a/", "/a"])
def test_prefix_that_could_reach_into_another_root_is_refused(prefix):
    with pytest.raises(ValidationError):
        RedisConfig(url="redis://host:1/0", prefix=prefix)


def test_mistakes_are_configuration_errors():
    import penstock

    for url in ("redis://host:1/run", "redis://host:1/0/run?ttl_s=0", "redis://h:1/0?what=1"):
        with pytest.raises(ConfigError):
            penstock.Checkpointer(url)
