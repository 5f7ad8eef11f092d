"""The `penstock diff` command."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.catalog.catalog import Catalog
from penstock.core.cli.app import (
    Exclude,
    Include,
    Json,
    backend_of,
    command,
    errors,
    root,
    which_step,
)
from penstock.core.cli.job import open_run
from penstock.core.cli.output.render import Column, number_text, print_json, print_line, print_table
from penstock.core.concurrency.workers import Workers, default_workers
from penstock.core.diff.checkpoints import diff_checkpoints
from penstock.core.errors import CheckpointNotFoundError
from penstock.core.log.inventory import noting
from penstock.core.pipeline.loader import Loader
from penstock.core.reporting.progress import ProgressBar
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.storage.open import open_backend
from penstock.core.tree.select import Selection
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.abc import Backend
    from penstock.core.diff.checkpoints import Change, CheckpointDiff

# Each norm's title and `Column.keep`. With norms, a narrow terminal first drops dtypes and shapes
# (the columns A and B), so that it need not cut paths until they look alike.
_NORMS = {
    "max_abs": ("MAX", 9),
    "l2": ("L2", 7),
    "relative_l2": ("REL L2", 8),
    "differing": ("ELEMENTS", 10),
    "elements": ("OF", 6),
    "nan": ("NAN", 5),
    "inf": ("INF", 4),
}
_SPARE = {"L2", "OF", "NAN", "INF"}
_WORDS = {"only_a": "only in A", "only_b": "only in B"}


@command("diff")
def diff(
    url_a: Annotated[str, root("A", "a run")],
    url_b: Annotated[str | None, root("B", "another run", show_default="the same run")] = None,
    *,
    step_a: Annotated[
        int | None, which_step(" of A", "latest; within one run, the step before B's")
    ] = None,
    step_b: Annotated[int | None, which_step(" of B")] = None,
    include: Include = None,
    exclude: Exclude = None,
    norms: Annotated[
        bool,
        typer.Option("--norms", help="Read tensors that differ, and measure by how much."),
    ] = False,
    as_json: Json = False,
) -> bool:
    """Show what differs between two checkpoints, of one run or of two.

    Compares objects, kinds, dtypes, shapes, values, kinds of containers and metadata. Compares
    bytes by their stored checksums where these suffice, else by reading both. Exits with 0 if
    nothing differs, 1 if something does, 2 after an error. Does not look for damage: use
    `penstock verify`.

    Examples:
      penstock diff runs/gpt              the two newest
      penstock diff runs/gpt --step-a 100 --step-b 200
      penstock diff runs/gpt /backup/gpt --include model
      penstock diff runs/gpt --norms --json |
        jq '.changes[] | select(.norms)'
    """
    errors.exit_code = 2  # like diff(1): 1 means that they differ
    with ExitStack() as stack:
        a = stack.enter_context(open_run(url_a, light=False))
        b = a
        if url_b is not None:
            b = stack.enter_context(closing(open_backend(backend_of(url_b), must_exist=True)))
        workers = stack.enter_context(closing(Workers(default_workers())))
        step_b = Catalog(b).require_latest() if step_b is None else step_b
        if step_a is None:
            step_a = _before(a, step_b) if url_b is None else Catalog(a).require_latest()
        sides = []
        for backend, step in ((a, step_a), (b, step_b)):
            with noting(backend, Catalog(backend), step):
                sides.append(Checkpoint.open(backend, step, loader=Loader(backend, workers)))
        bar = stack.enter_context(closing(ProgressBar("diff", every_s=None, transient=True)))
        selection = Selection(include, exclude)
        found = diff_checkpoints(
            sides[0],
            sides[1],
            selection=selection,
            norms=norms,
            on_progress=bar,
        )
        lossy = [_lossy(side, selection) for side in sides]
        bar.close()  # before the output, so that both do not share a line of the terminal
        if as_json:
            named = [
                {
                    "url": s.backend.url,
                    "step": s.step,
                    "uid": s.contents.record.uid,
                    "lossy": codecs,
                }
                for s, codecs in zip(sides, lossy, strict=True)
            ]
            figures = asdict(found)
            changes = figures.pop("changes")
            for change in () if norms else changes:
                del change["norms"]
            ends = {"a": named[0], "b": named[1], "same": found.same}
            print_json({**ends, **figures, "changes": changes})
        else:
            _print(sides, found, lossy, norms=norms)
    return found.same


def _before(backend: Backend, step: int) -> int:
    earlier = [s for s in Catalog(backend).steps() if s < step]
    if not earlier:
        msg = f"{backend.url} has no checkpoint before step {step}: pass --step-a, or another run"
        raise CheckpointNotFoundError(msg)
    return earlier[-1]


def _lossy(side: Checkpoint, selection: Selection) -> tuple[str, ...]:
    """Return the lossy codecs of the compared objects."""
    chosen = (one for one in side.contents.objects() if selection.selects(one.path))
    return side.rounding(chosen).lossy


def _print(
    sides: Sequence[Checkpoint],
    found: CheckpointDiff,
    lossy: Sequence[Sequence[str]],
    *,
    norms: bool,
) -> None:
    for name, side, codecs in zip("AB", sides, lossy, strict=True):
        print_line(f"{name}: step {side.step} of {side.backend.url}")
        if codecs:
            print_line(
                f"   values that {', '.join(codecs)} (lossy) had rounded are compared rounded"
            )
    read = f", {size_text(found.bytes_read)} read"
    if found.same:
        print_line(f"nothing differs in {counted(found.compared, 'object')}{read}", style="green")
        return
    print_line("")
    print_table([*_columns(norms=norms)], found.changes)
    print_line("")
    objects = [c for c in found.changes if c.what not in {"container", "metadata"}]
    alone = sum(c.what in {"only_a", "only_b"} for c in objects)
    print_line(
        f"{len(objects) - alone} of {found.compared} objects in both differ, "
        f"{alone} are in only one of them{read}"
    )


def _columns(*, norms: bool) -> Iterator[Column[Change]]:
    yield Column("PATH", lambda change: change.path or "/", flexible=True, middle=True)
    yield Column("DIFFERS", lambda change: _WORDS.get(change.what, change.what))
    yield Column("A", lambda change: change.a or "-", keep=3, flexible=True, spare=norms)
    yield Column("B", lambda change: change.b or "-", keep=2, flexible=True, spare=norms)
    for name, (title, keep) in _NORMS.items() if norms else ():
        cell = partial(_norm_cell, name)
        yield Column(title, cell, right=True, keep=keep, spare=title in _SPARE)


def _norm_cell(name: str, change: Change) -> str:
    return "" if change.norms is None else number_text(getattr(change.norms, name))
