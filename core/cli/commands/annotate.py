"""The commands `penstock annotate`, `pin` and `unpin`."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.notes import NotesOfRun, check_tag
from penstock.core.cli.output.render import metadata_text, print_json, print_line
from penstock.core.save.prepare import check_metadata
from penstock.core.storage.open import open_backend

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def parse_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse `KEY=VALUE` pairs; a value that is no JSON is text.

    Raises:
        ValueError: A pair has no `=`, or nothing in front of it.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            msg = f"{pair!r} is not KEY=VALUE"
            raise ValueError(msg)
        try:
            found[key] = json.loads(text)
        except (ValueError, RecursionError):
            found[key] = text
    return found


def run(
    url: str, step: int, metadata: Mapping[str, Any], tags: Mapping[str, bool], *, as_json: bool
) -> None:
    """Add metadata and tags to a checkpoint, and print what it has then.

    Raises:
        PenstockError: As for `Catalog.annotate`.
    """
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
