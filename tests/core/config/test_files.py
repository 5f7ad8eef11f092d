"""`${NAME}` in configuration files."""

import re

import pytest

import penstock
from penstock.core.config.model import filled, load_config
from penstock.core.errors import ConfigError

SET = {"BUCKET": "runs", "LEVEL": "3", "EMPTY": "", "MONEY": "$BUCKET ${BUCKET}"}


def test_a_text_is_filled():
    for text, expected in [
        ("s3://${BUCKET}/gpt", "s3://runs/gpt"),
        ("${BUCKET}${LEVEL}", "runs3"),
        ("${NOWHERE:-/tmp/run}", "/tmp/run"),
        ("${BUCKET:-other}", "runs"),
        ("${EMPTY}", ""),
        ("${NOWHERE:-}", ""),
        ("$$5 and $${BUCKET}", "$5 and ${BUCKET}"),
        ("plain $ and { and } and 5$ and $5", "plain $ and { and } and 5$ and $5"),
        ("$$HOME and $${", "$HOME and ${"),
        ("${MONEY}", "$BUCKET ${BUCKET}"),  # inserted text is not expanded again
    ]:
        assert filled(text, SET, what="file") == expected


def test_only_texts_are_filled_at_any_depth():
    value = {"a": [{"b": "${LEVEL}"}, 5, None, True], "${BUCKET}": 1.5}
    expected = {"a": [{"b": "3"}, 5, None, True], "${BUCKET}": 1.5}
    assert filled(value, SET, what="file") == expected


def test_each_missing_variable_is_named_with_its_place():
    value = {"backend": {"url": "s3://${A}/x"}, "rules": [{"match": "${B}"}, "${not a name}"]}
    with pytest.raises(ConfigError) as caught:
        filled(value, SET, what="configuration run.toml")
    text = str(caught.value)
    assert "configuration run.toml" in text
    assert "backend.url: the environment variable A is not set" in text
    assert "rules[0].match: the environment variable B is not set" in text
    assert "rules[1]: ${not a name} is not a variable" in text


@pytest.mark.parametrize("text", ["$BUCKET", "s3://$BUCKET/gpt", "$NOWHERE", "a$_b"])
def test_a_variable_without_braces_is_refused_with_the_right_form(text):
    name = re.search(r"\$(\w+)", text)[1]
    with pytest.raises(ConfigError) as caught:
        filled({"path": text}, SET, what="file")
    assert f"path: ${name} is not filled in; write ${{{name}}} for the variable" in str(
        caught.value
    )
    assert f"$${name} for the text" in str(caught.value)
    assert filled("$$" + name, SET, what="file") == f"${name}"


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
def test_a_file_gets_environment_variables(suffix, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ROOT", str(tmp_path))
    monkeypatch.setenv("WORKERS", "2")
    texts = {
        "toml": 'backend = "posix://${RUN_ROOT}/run"\nworkers = "${WORKERS}"\n',
        "json": '{"backend": "posix://${RUN_ROOT}/run", "workers": "${WORKERS}"}',
        "yaml": "backend: posix://${RUN_ROOT}/run\nworkers: ${WORKERS}\n",
    }
    path = tmp_path / f"penstock.{suffix}"
    path.write_text(texts[suffix])
    config = load_config(path)
    assert config.backend == f"posix://{tmp_path}/run"
    assert config.workers == 2
    with penstock.Checkpointer.from_config(path) as ckpt:
        ckpt.save({"epoch": 1}, 1, mode="blocking")
    assert (tmp_path / "run" / "commits").is_dir()
