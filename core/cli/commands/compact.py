"""The `penstock compact` command."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.catalog.catalog import Catalog
from penstock.core.cli.app import DryRun, Json, Url, command
from penstock.core.cli.output.render import print_json, print_line, warn
from penstock.core.concurrency.workers import Workers, default_workers
from penstock.core.config.model import load_config
from penstock.core.copy.compaction import CompactedStep, Compactor
from penstock.core.errors import CheckpointGoneError, PenstockError
from penstock.core.pipeline.loader import Loader
from penstock.core.plugins.registry import default_registry
from penstock.core.reporting.progress import ProgressBar
from penstock.core.restore.inspector import Inspector
from penstock.core.storage.open import open_backend
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import Backend
    from penstock.core.format.records import CommitRecord


@command("compact")
def compact(
    url: Url,
    steps: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="STEP",
            min=0,
            help="Which checkpoints.",
            show_default="those that keep data of deleted checkpoints alive",
        ),
    ] = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Every checkpoint that needs data of others.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> bool:
    """Rewrite checkpoints that need other checkpoints' data, so that they need none.

    The checkpoints keep their steps and restore to the same values. Data that is no longer needed
    is freed, but the run may still take more space afterwards; --dry-run shows about how much.
    Exits with 1 if a checkpoint could not be compacted; that checkpoint is unchanged.

    Examples:
      penstock compact runs/gpt --dry-run
      penstock compact runs/gpt
      penstock compact runs/gpt 100 200
    """
    if everything and steps:
        msg = "--all takes every checkpoint that needs data of others; leave out the steps"
        raise typer.BadParameter(msg)
    with (
        closing(open_backend(url, must_exist=True)) as backend,
        closing(Workers(default_workers())) as workers,
    ):
        registry = default_registry()
        inspector = Inspector(registry)
        compactor = Compactor(
            backend,
            Catalog(backend, look=inspector.is_whole, note_own=inspector.note_own),
            config=load_config({"backend": backend}),
            registry=registry,
            workers=workers,
            loader=Loader(backend, workers),
        )
        chosen = compactor.choose(steps or None, everything=everything)
        failed: dict[int, str] = {}
        if dry_run:
            report = compactor.plan(chosen)
            done, before, after = list(report.steps), report.bytes_before, report.bytes_after
        else:
            before = compactor.needed_bytes()
            done = _compact(compactor, chosen, failed, quiet=as_json)
            after = compactor.needed_bytes()
        if as_json:
            print_json(
                {
                    "url": backend.url,
                    "dry_run": dry_run,
                    "ok": not failed,
                    "compacted": [asdict(one) for one in done],
                    "failed": failed,
                    "bytes_before": before,
                    "bytes_after": after,
                }
            )
        else:
            _print(backend, done, failed, before=before, after=after, dry_run=dry_run)
    return not failed


def _compact(
    compactor: Compactor,
    chosen: Sequence[CommitRecord],
    failed: dict[int, str],
    *,
    quiet: bool,
) -> list[CompactedStep]:
    done = []
    for record in chosen:
        try:
            with closing(ProgressBar(f"step {record.step}", every_s=None, transient=True)) as bar:
                one = compactor.compact(record, bar)
        except CheckpointGoneError:
            continue  # already deleted, so not a failure
        except KeyboardInterrupt:
            warn(f"interrupted; step {record.step} is either unchanged or compacted")
            raise
        except PenstockError as error:
            failed[record.step] = str(error)
            if not quiet:
                text = f"step {record.step} is not compacted: {error}"
                print_line(text, style="bold red")
            continue
        done.append(one)
        if not quiet:
            print_line(f"{_sizes(one, 'stands')} in {one.seconds:.1f} s", style="green")
    return done


def _sizes(one: CompactedStep, verb: str) -> str:
    after, before = size_text(one.bytes_after), size_text(one.bytes_before)
    return f"step {one.step} {verb} alone: {after} instead of {before}"


def _print(
    backend: Backend,
    done: Sequence[CompactedStep],
    failed: dict[int, str],
    *,
    before: int,
    after: int,
    dry_run: bool,
) -> None:
    if not done and not failed:
        print_line(f"nothing to compact under {backend.url}")
        return
    if dry_run:
        for one in done:
            print_line(_sizes(one, "would stand"))
    change = f"{size_text(abs(after - before))} {'freed' if after <= before else 'more'}"
    would = "would take about" if dry_run else "takes"
    print_line(f"the run {would} {size_text(after)} instead of {size_text(before)}: {change}")
