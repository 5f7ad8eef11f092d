"""The commands `penstock annotate`, `pin` and `unpin`.

Tested in `tests/core/cli/test_notes.py`.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.notes import NotesOfRun, check_tag
from penstock.core.cli.app import Json, Url, command
from penstock.core.cli.output.render import metadata_text, print_json, print_line
from penstock.core.save.metadata import check_metadata
from penstock.core.storage.open import open_backend

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_Tag = Annotated[str, typer.Argument(metavar="TAG", help="Letters, digits, and any of . _ -")]
_Step = Annotated[int, typer.Argument(metavar="STEP", min=0, help="Which checkpoint.")]


@command("annotate")
def annotate(
    url: Url,
    step: _Step,
    pairs: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE", help="VALUE is JSON; anything else is text.")
    ],
    *,
    as_json: Json = False,
) -> None:
    """Add metadata to a checkpoint, such as a metric that is known only later.

    New values replace those of existing keys. Prints all resulting metadata.

    Examples:
      penstock annotate runs/gpt 100 val_loss=2.31
      penstock annotate runs/gpt 100 'eval={"mmlu": 0.61}'
    """
    _add(url, step, _parsed(pairs), {}, as_json=as_json)


@command("pin")
def pin(url: Url, step: _Step, tag: _Tag, *, as_json: Json = False) -> None:
    """Tag a checkpoint, so that retention does not delete it.

    `penstock delete` deletes it only with --force. `penstock ls` shows the tags.

    Examples:
      penstock pin runs/gpt 100 best
      penstock pin runs/gpt 300 paper-v2
    """
    _add(url, step, {}, {tag: True}, as_json=as_json)


@command("unpin")
def unpin(url: Url, step: _Step, tag: _Tag, *, as_json: Json = False) -> None:
    """Remove a tag from a checkpoint, or do nothing if it lacks the tag.

    Examples:
      penstock unpin runs/gpt 100 best
    """
    _add(url, step, {}, {tag: False}, as_json=as_json)


def _parsed(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse `KEY=VALUE` pairs; a value that is not JSON is text.

    Raises:
        typer.BadParameter: A pair has no `=`, or no key.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            msg = f"{pair!r} is not KEY=VALUE"
            raise typer.BadParameter(msg)
        try:
            values[key] = json.loads(text)
        except (ValueError, RecursionError):
            values[key] = text
    return values


def _add(
    url: str, step: int, metadata: Mapping[str, Any], tags: Mapping[str, bool], *, as_json: bool
) -> None:
    checked = check_metadata(metadata)
    for tag in tags:
        check_tag(tag)
    with closing(open_backend(url, must_exist=True, light=True)) as backend:
        catalog = Catalog(backend)
        catalog.annotate(step, checked, tags)
        record = catalog.record(step)
        notes = NotesOfRun.of(backend, record).read(record)
    if as_json:
        found = {"metadata": notes.metadata, "tags": list(notes.tags)}
        print_json({"url": backend.url, "step": step, **found})
    elif tags:
        print_line(
            f"step {step} is pinned: {' '.join(notes.tags)}"
            if notes.tags
            else f"step {step} is not pinned"
        )
    else:
        print_line(f"step {step}: {metadata_text(notes.metadata)}")
