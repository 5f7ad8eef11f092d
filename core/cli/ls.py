"""`penstock ls`."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from penstock.core.catalog import Catalog
from penstock.core.cli.render import (
    Cell,
    Column,
    age_text,
    metadata_text,
    print_json,
    print_line,
    print_table,
    print_wrapped,
    ratio_text,
    size_text,
    state_cell,
    visible,
)
from penstock.core.errors import BlobNotFoundError, FormatError
from penstock.core.opening import open_backend
from penstock.core.record import RECORD_LIMIT_BYTES, decode_commit

if TYPE_CHECKING:
    from penstock.core.abc import Backend
    from penstock.core.manifest import CommitRecord

_COLUMNS = (
    Column("STEP", right=True),
    Column("GEN", right=True, keep=1),
    Column("AGE", right=True, keep=7),
    Column("OBJECTS", right=True, keep=4),
    Column("RAW", right=True, keep=5),
    Column("STORED", right=True, keep=6),
    Column("RATIO", right=True, keep=2),
    Column("STATE"),
    Column("METADATA", keep=3, flexible=True),
)


@dataclass(frozen=True, slots=True)
class Listed:
    """One step of a run: its newest record, or why that cannot be read."""

    step: int
    record: CommitRecord | None
    error: str | None


def run(url: str, *, metadata: bool, as_json: bool) -> None:
    """Print the checkpoints of a run, ascending by step.

    Args:
        url: Of the run.
        metadata: Also print all metadata of each, not only what fits a line.
        as_json: For programs.

    Raises:
        PenstockError: The run cannot be looked at.
    """
    with closing(open_backend(url, must_exist=True, light=True)) as backend:
        listed = list_run(backend)
        if as_json:
            print_json({"url": backend.url, "checkpoints": [_as_json(one) for one in listed]})
            return
        if not listed:
            print_line(f"no checkpoints under {visible(backend.url)}")
            return
    now_s = time.time()
    print_table(_COLUMNS, [_as_row(one, now_s) for one in listed])
    for one in listed:
        if one.error:
            print_line(f"step {one.step}: {visible(one.error)}", style="red")
    if metadata:
        for one in listed:
            _print_metadata(one)


def _print_metadata(one: Listed) -> None:
    if one.record is None or not one.record.metadata:
        return
    print_line(f"\nstep {one.step}")
    for key, value in one.record.metadata.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        print_wrapped(visible(f"{key}: {text}"), indent=2)


def list_run(backend: Backend) -> list[Listed]:
    """Every step, ascending; a record that is damaged hides no other."""
    listed = []
    for step, names in Catalog(backend).entries().items():
        try:
            data = backend.read_record(names[-1], limit_bytes=RECORD_LIMIT_BYTES)
            listed.append(Listed(step, decode_commit(data, names[-1]), None))
        except FormatError as error:
            listed.append(Listed(step, None, str(error)))
        except BlobNotFoundError:
            continue  # deleted since it was listed
    return listed


def _as_json(one: Listed) -> dict[str, Any]:
    if one.record is None:
        return {"step": one.step, "state": "damaged", "error": one.error}
    return {"step": one.step, "state": "ok", **record_json(one.record)}


def record_json(record: CommitRecord) -> dict[str, Any]:
    """What a commit record says, for programs."""
    return {
        "generation": record.generation,
        "uid": record.uid,
        "created": record.created,
        "world_size": record.world_size,
        "objects": record.objects,
        "bytes_raw": record.bytes_raw,
        "bytes_stored": record.bytes_stored,
        "codecs": record.codecs,
        "providers": record.providers,
        "references": list(record.references),
        "metadata": record.metadata,
        "penstock": record.penstock,
        "engine": record.engine,
    }


def _as_row(one: Listed, now_s: float) -> list[str | Cell]:
    record = one.record
    if record is None:
        return [str(one.step), *["-"] * 6, state_cell("damaged"), ""]
    created_s = datetime.fromisoformat(record.created).timestamp()
    return [
        str(record.step),
        str(record.generation),
        age_text(now_s - created_s),
        str(record.objects),
        size_text(record.bytes_raw),
        size_text(record.bytes_stored),
        ratio_text(record.bytes_raw, record.bytes_stored),
        state_cell("ok"),
        metadata_text(record.metadata),
    ]
