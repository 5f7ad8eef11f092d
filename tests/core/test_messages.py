"""The message on a mistake names it, and the right form."""

import logging
from functools import partial

import pytest
import torch

import penstock
from penstock.core.abc import Node, Placement, StateProvider
from penstock.core.errors import (
    ConfigError,
    PluginError,
    SaverClosedError,
    SelectionError,
    StepExistsError,
)
from penstock.core.plugins.registry import Registry

ZSTD = ["zstd"]


def state(**more):
    return {"model": {"weight": torch.ones(4, 3), "bias": torch.ones(3)}, "epoch": 1, **more}


@pytest.fixture
def ckpt(tmp_path):
    with penstock.Checkpointer(f"posix://{tmp_path}/run") as ckpt:
        ckpt.save(state(options={"lr": 0.1}), step=1, mode="blocking")
        yield ckpt


def message(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# -- rules that match nothing --------------------------------------------------------------------


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def saved_with(rules, states, tmp_path):
    with penstock.Checkpointer(f"posix://{tmp_path}/run", rules=rules) as ckpt:
        for step, one in enumerate(states):
            ckpt.save(one, step=step, mode="blocking")


def test_a_rule_without_a_match_is_reported_once_with_nearest_paths(tmp_path, caplog):
    rules = [{"match": "epoch", "codecs": ZSTD}, {"match": "modle/**", "codecs": ZSTD}]
    saved_with(rules, [state(), state(), state()], tmp_path)
    (text,) = warnings_of(caplog)
    assert text.startswith("rules[1]: pattern 'modle/**' matches nothing; nearest: model")
    assert "(in step 0, so no codec is used for it; logged once)" in text


# -- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("region", [(0,), 0, [0], "first", (slice(0, 1), 2)])
def test_an_invalid_region_error_shows_the_right_form(ckpt, region):
    text = message(SelectionError, lambda: ckpt.open().read("model/weight", region))
    assert f"{region!r} is not a region of model/weight" in text
    assert "(slice(0, 1),)" in text


def test_a_region_of_a_value_error_names_the_whole(ckpt):
    for include in ("options/lr", "options/*"):
        text = message(SelectionError, lambda: ckpt.load(include=include))  # noqa: B023
        assert text.endswith("options is stored as one object, so use 'options'")
    with pytest.raises(KeyError, match="options is stored as one object; read 'options'"):
        ckpt.open()["options/lr"]
    text = message(SelectionError, lambda: ckpt.load(include="*/lr"))
    assert "one object" not in text  # its meaning is unclear


# -- after close ---------------------------------------------------------------------------------

CALLS = {
    "steps": lambda c: c.steps(),
    "latest": lambda c: c.latest(),
    "save": lambda c: c.save(state(), step=9),
    "restore": lambda c: c.restore(state()),
    "load": lambda c: c.load(),
    "info": lambda c: c.info(),
    "open": lambda c: c.open(),
    "verify": lambda c: c.verify(),
    "rewind": lambda c: c.rewind(1),
    "delete": lambda c: c.delete(1),
    "prune": lambda c: c.prune(),
    "fence": lambda c: c.fence(),
    "wait": lambda c: c.wait(),
}


def test_every_call_after_close_reports_the_close(ckpt):
    for name, call in CALLS.items():
        ckpt.close()
        assert "is closed" in message(SaverClosedError, partial(call, ckpt)), name
    ckpt.close()


# -- options -------------------------------------------------------------------------------------


def written(tmp_path, text):
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    return path


RULE = "backend = '{root}/run'\n[[rules]]\nmatch = 'a'\n"
FAST = "{{ type = 'posix', path = '{root}/a', endpiont = 1 }}"


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (
            "[backend]\ntype = 'posix'\npath = '{root}/run'\ndirect = 'off'\n",
            ConfigError,
            "options of backend 'posix': 1 problem\n  backend.direct: unknown key",
        ),
        (
            "[backend]\ntype = 'tiered'\nfast = " + FAST + "\ndurable = '{root}/b'\n",
            ConfigError,
            "options of backend 'posix': 1 problem\n  backend.fast.endpiont: unknown key",
        ),
        (
            "[backend]\ntype = 'posxi'\npath = 'x'\n",
            PluginError,
            "backend.type: no backend called 'posxi' is installed; did you mean posix?",
        ),
        ("backend = 'posix://{root}/run?x=1'\n", ConfigError, "  x: unknown key"),
        (
            RULE + "codecs = ['lz4', {{ type = 'zstd', levle = 3 }}]\n",
            ConfigError,
            "rules[0].codecs[1]: options of codec 'zstd': 1 problem\n  levle: unknown key",
        ),
        (
            RULE + "codecs = ['zsdt']\n",
            PluginError,
            "rules[0].codecs[0]: no codec called 'zsdt'",
        ),
    ],
)
def test_a_wrong_option_is_named_with_its_file_and_its_place(tmp_path, text, kind, words):
    path = written(tmp_path, text.format(root=tmp_path))
    found = message(kind, lambda: penstock.Checkpointer.from_config(path))
    assert found.startswith(f"configuration {path}: ")
    assert words in found


def test_an_existing_step_error_names_overwrite_and_rewind(ckpt):
    first = message(StepExistsError, lambda: ckpt.save(state(), step=1))
    assert "to save this step anyway, pass overwrite=True;" in first
    assert "to start again, first delete step 1 and all later ones." in first
    assert "--overwrite" not in first  # a user of Python has no such option
    ckpt.save(state(), step=5, mode="blocking")
    found = message(StepExistsError, lambda: ckpt.save(state(), step=3))
    assert "to save this step anyway, pass overwrite=True;" in found
    assert "is before the latest step 5. To continue from the latest step, call resume" in found
    assert "first call rewind(1), which deletes all later steps." in found


class Pair:
    def __init__(self, left, right):
        self.left, self.right = left, right


class FailsAtTheEnd(StateProvider):
    """Cannot assemble the restored parts."""

    name = "pair"
    api_version = 1
    forms = ("pair",)

    def claims(self, kind, /):
        return 40 if kind is Pair else None

    def describe(self, value, path, /, *, context):
        yield Node(path, "pair")
        yield from context.describe(value.left, (*path, "left"))
        yield from context.describe(value.right, (*path, "right"))

    def place(self, value, path, /, *, context):
        placed = context.place(value.left, (*path, "left"))
        placed.absorb(context.place(value.right, (*path, "right")))
        placed.finish = lambda: 1 / 0
        return placed

    def rebuild(self, stored, /, *, device, context):
        return Placement(finish=lambda: 1 / 0)


@pytest.mark.parametrize("use", ["restore", "load"])
def test_a_failure_at_the_end_of_a_restore_names_provider_and_path(use):
    registry = Registry()
    registry.register(FailsAtTheEnd)
    tree = state(pairs={"first": Pair(torch.ones(2), torch.ones(2))})
    with penstock.Checkpointer("memory://", registry=registry) as ckpt:
        ckpt.save(tree, 1, mode="blocking")
        call = (lambda: ckpt.restore(tree)) if use == "restore" else ckpt.load
        text = message(penstock.RestoreError, call)
    assert "ZeroDivisionError: division by zero (by `finish` of provider 'pair' (" in text
    assert ".FailsAtTheEnd) at pairs/first)" in text
