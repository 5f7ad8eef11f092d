"""Two tiers in one place: evicting from the one would take the other's."""

from __future__ import annotations

import pytest

from penstock import Checkpointer, ConfigError


@pytest.mark.parametrize("how", ["same", "link", "engine", "not there yet", "parent is a link"])
def test_one_folder_is_no_two_tiers(how, tmp_path):
    fast = durable = str(tmp_path / "run")
    if how != "not there yet":
        (tmp_path / "run").mkdir()
    if how == "link":
        durable = str(tmp_path / "other")
        (tmp_path / "other").symlink_to(fast)
    if how == "engine":
        durable = f"posix://{fast}"
    if how == "parent is a link":
        (tmp_path / "way").symlink_to(tmp_path)
        fast, durable = str(tmp_path / "new"), str(tmp_path / "way" / "new")
    with pytest.raises(ConfigError, match="one place"):
        Checkpointer({"type": "tiered", "fast": fast, "durable": durable})


def test_one_bucket_is_no_two_tiers():
    url = "s3://bucket/run?endpoint_url=http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="one place"):
        Checkpointer({"type": "tiered", "fast": url, "durable": url})


def test_neighbours_are(tmp_path):
    places = {"fast": str(tmp_path / "a"), "durable": str(tmp_path / "b")}
    with Checkpointer({"type": "tiered", **places}) as ckpt:
        ckpt.save({"x": 1}, 1).result(60)
        assert ckpt.verify(1).ok
