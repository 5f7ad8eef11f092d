"""The same promises on every engine, and a plain path without permission for io_uring."""

from __future__ import annotations

import errno
import logging
import os

import pytest
import torch
from tests.integration.support import (
    ENCODED,
    blank,
    checkpointer,
    make_state,
    same,
    uring_missing,
)

from penstock import CapabilityError
from penstock.backends.local.blob import DirectAccess
from penstock.backends.uring.ring import DISABLE_VARIABLE
from penstock.core.storage import open as opening

ENGINES = ["uring-on", "uring-off", "posix-on", "posix-off"]


@pytest.fixture
def forget_warnings(monkeypatch):
    """A new process, as far as "logged once" matters."""
    monkeypatch.setattr(opening, "_warned", set())


@pytest.fixture(params=ENGINES)
def engine(request, tmp_path):
    """`(what to open, name of the engine, whether it bypasses the page cache)`."""
    name, _, direct = request.param.partition("-")
    root = tmp_path / "root"
    if name == "uring" and (missing := uring_missing()):
        pytest.skip(f"needs io_uring: {missing}")
    if direct == "on" and (refusal := DirectAccess("auto", str(tmp_path)).refusal):
        pytest.skip(f"needs direct I/O: {refusal}")
    return f"{name}://{root}?direct_io={direct}", name, direct == "on"


@pytest.fixture
def ckpt(engine):
    with checkpointer(engine[0], **ENCODED) as ckpt:
        yield ckpt


def test_save_and_restore(engine, ckpt):
    what, name, direct = engine
    state = make_state(1)
    report = ckpt.save(state, 1).result(300)
    assert (report.engine, report.exclusive) == (name, True)
    target = blank(state)
    restored = ckpt.restore(target)
    assert same(target, state)
    assert restored.engine == name
    assert report.direct_io is restored.direct_io is direct
    assert ckpt.verify().ok
    with checkpointer(what) as another:
        assert same(another.load(), state)


def test_a_plain_path_falls_back_with_one_warning_that_says_why(
    tmp_path, monkeypatch, forget_warnings, caplog
):
    monkeypatch.setenv(DISABLE_VARIABLE, "EPERM")
    caplog.set_level(logging.WARNING)
    for number, root in enumerate([tmp_path / "a", f"file://{tmp_path}/b", tmp_path / "a"]):
        with checkpointer(root) as ckpt:
            report = ckpt.save({"w": torch.ones(3)}, number, mode="blocking").result()
            assert report.engine == "posix"
            assert same(ckpt.load(), {"w": torch.ones(3)})
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "uring" in warning
    assert "posix" in warning
    assert "EPERM" in warning
    assert os.strerror(errno.EPERM) in warning


def test_an_explicit_url_never_falls_back(tmp_path, monkeypatch):
    monkeypatch.setenv(DISABLE_VARIABLE, "EPERM")
    with pytest.raises(CapabilityError, match="EPERM"):
        checkpointer(f"uring://{tmp_path}/root")
    assert not (tmp_path / "root").exists()


def test_a_plain_path_silently_uses_io_uring_if_allowed(tmp_path, forget_warnings, caplog):
    missing = uring_missing()
    if missing:
        pytest.skip(f"needs io_uring: {missing}")
    with checkpointer(tmp_path / "root") as ckpt:
        assert ckpt.save({"w": torch.ones(3)}, 1, mode="blocking").result().engine == "uring"
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
