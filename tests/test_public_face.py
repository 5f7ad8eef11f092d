"""`import penstock`: it has every public name, and imports nothing heavy."""

import subprocess
import sys

import pytest

import penstock
import penstock.core.errors


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_public_name_resolves(name):
    assert getattr(penstock, name).__name__ == name
    assert name in dir(penstock)


def test_only_public_names_are_listed():
    listed = {name for name in dir(penstock) if not name.startswith("__")}
    assert listed == set(penstock.__all__)


def test_every_error_is_public():
    errors = {
        name
        for name, value in vars(penstock.core.errors).items()
        if isinstance(value, type) and issubclass(value, penstock.core.errors.PenstockError)
    }
    assert errors <= set(penstock.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Chekpointer'"):
        _ = penstock.Chekpointer


def test_import_is_light():
    code = "import sys, penstock; print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert shown.strip() == "[]"


def test_using_an_error_does_not_import_torch():
    code = "import sys, penstock; penstock.DamagedError; print('torch' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert shown.strip() == "False"
