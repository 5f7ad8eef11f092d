"""An adapter without its trainer names the extra to install."""

import importlib
import sys

import pytest

TRAINERS = ("accelerate", "deepspeed", "lightning", "peft", "torchtitan", "transformers")


@pytest.mark.parametrize("name", TRAINERS)
def test_import_without_the_trainer_names_the_extra(name, monkeypatch):
    ours = [module for module in sys.modules if module.startswith(f"penstock.integrations.{name}")]
    theirs = [module for module in sys.modules if module.partition(".")[0] == name]
    for module in (*ours, *theirs):
        monkeypatch.delitem(sys.modules, module)

    class Missing:
        def find_spec(self, module, path=None, target=None):
            if module == name:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'penstock\[{name}\]'"):
        importlib.import_module(f"penstock.integrations.{name}")
