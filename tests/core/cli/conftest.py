"""Runs the command in this process, which is ten times faster than a new one."""

import pytest
from tests.core.cli.command import caller


@pytest.fixture
def call(capsys, monkeypatch):
    return caller(capsys, monkeypatch)
