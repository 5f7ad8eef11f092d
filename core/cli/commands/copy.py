"""The `penstock copy` command."""

from __future__ import annotations

import os
import sys
import tomllib
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.prune import GRACE_S
from penstock.core.catalog.survey import is_whole
from penstock.core.cli.output.render import print_json, print_line, visible
from penstock.core.cli.output.runs_on_disk import same_place
from penstock.core.concurrency.workers import Workers
from penstock.core.config.model import load_config
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.reencode import Reencoding, copy_objects
from penstock.core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DamagedError,
    PenstockError,
    PluginError,
)
from penstock.core.pipeline.reader import Loader
from penstock.core.plugins.registry import default_registry
from penstock.core.reporting.progress_bar import ProgressBar
from penstock.core.reporting.reports import Progress
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.storage.open import open_backend
from penstock.core.tree.select import Selection
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.copy.checkpoint_copy import CopyReport
    from penstock.core.format.records import CommitRecord


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """The options of a copy.

    Attributes:
        include: Patterns of objects to take; None takes all.
        exclude: Patterns of objects to leave out.
        rules: The rules to encode by, and the options of deltas if there are any, as in a
            configuration; None copies the stored frames as they are.
        rules_from: The file or option that the rules come from, for messages.
        overwrite: Whether to replace another checkpoint at the same step.
        bytes_per_s: The most to copy per second; None sets no limit.
        trust_sealed: Whether to skip reading again the blobs that an interrupted copy has sealed.
        flatten: Whether the copy borrows no blobs of other checkpoints.
    """

    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    rules: Mapping[str, Any] | None = None
    rules_from: str = "rules"
    overwrite: bool = False
    bytes_per_s: float | None = None
    trust_sealed: bool = False
    flatten: bool = False

    @property
    def encodes(self) -> bool:
        """Whether the copy is a new save that encodes, not the same bytes."""
        chosen = any(x is not None for x in (self.include, self.exclude, self.rules))
        return chosen or self.flatten


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of copying one step.

    Attributes:
        step: The step.
        state: `copied`, `there` (the target had the checkpoint already) or `failed`.
        verbatim: Whether the copy is the same byte for byte.
        uid: The uid at the target; None if the copy failed.
        generation: The generation at the target.
        objects: The number of objects in the copy.
        bytes_stored: The bytes of the copy's own blobs.
        bytes_copied: The bytes of blobs that were written, those that it borrows included.
        bytes_kept: The bytes of blobs that the target had already: an interrupted copy brought
            them, or another checkpoint there needs them as well.
        seconds: The duration of the copy.
        error: The reason of a failure.
        rounded_by: Of a copy that was encoded anew, the lossy codecs of what was copied: the copy
            has the values that these had rounded.
    """

    step: int
    state: str
    verbatim: bool
    uid: str | None = None
    generation: int | None = None
    objects: int = 0
    bytes_stored: int = 0
    bytes_copied: int = 0
    bytes_kept: int = 0
    seconds: float = 0.0
    error: str | None = None
    rounded_by: tuple[str, ...] = ()


def wanted_rules(
    codecs: Sequence[str] | None, file: str | None, *, raw: bool
) -> dict[str, Any] | None:
    """Return the options of a configuration that these options ask for: `rules`, maybe `deltas`.

    None if no option asks to encode.

    Raises:
        ConfigError: The file cannot be read, or has no rules; or a codec needs options, or
            another codec behind it.
        PluginError: A codec is not installed.
    """
    if raw:
        return {"rules": []}
    if codecs:
        for name in codecs:
            _check_codec(name)
        if list(codecs) == ["delta"]:
            msg = (
                "--codec delta alone makes no copy smaller: add a codec that makes differences "
                "smaller, --codec delta --codec floatsplit"
            )
            raise ConfigError(msg)
        return {"rules": [{"match": "**", "codecs": list(codecs)}]}
    if file is None:
        return None
    try:
        values = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"{file} cannot be read: {error.strerror}"
        raise ConfigError(msg) from error
    except ValueError as error:
        msg = f"{file} is not valid TOML: {error}"
        raise ConfigError(msg) from error
    rules = values.get("rules")
    if not isinstance(rules, list):
        msg = f"{file} has no [[rules]]; for copies without codecs pass --raw"
        raise ConfigError(msg)
    return {name: values[name] for name in ("rules", "deltas") if name in values}


def _check_codec(name: str) -> None:
    try:
        default_registry().codec(name, {})
    except PluginError as error:
        msg = f"--codec {name}: {error}"
        raise PluginError(msg) from error
    except ConfigError as error:
        msg = f"--codec {name}: {error}\nThey can be given in a file: --rules FILE."
        raise ConfigError(msg) from error


def run(source_url: str, target_url: str, step: str, how: CopyOptions, *, as_json: bool) -> bool:
    """Copy one checkpoint, or all of a run, and print the result of each.

    Returns:
        Whether the target has all of these checkpoints now.

    Raises:
        ConfigError: Both URLs name the same run.
        PenstockError: The one step that was asked for cannot be copied.
    """
    done: list[Copied] = []
    with (
        closing(open_backend(source_url, must_exist=True)) as source,
        closing(open_backend(target_url)) as target,
        closing(Workers(min(4, os.cpu_count() or 1))) as workers,
    ):
        _check_two_runs(source, target, how)
        copier = _Copier(source, target, workers, how)
        for number in _steps(source, step):
            try:
                copied = copier.copy(number)
            except KeyboardInterrupt:
                sys.stderr.write(f"penstock: interrupted; {copier.interrupted(number)}\n")
                raise
            except CheckpointNotFoundError:
                if step != "all":
                    raise
                continue  # deleted after the listing, as by retention: nothing to copy, no failure
            except PenstockError as error:
                if step != "all":
                    raise
                copied = Copied(number, "failed", not how.encodes, error=str(error))
            done.append(copied)
            if not as_json:
                _print(copied, latest=step == "latest")
        ok = all(copied.state != "failed" for copied in done)
        if as_json:
            found = [asdict(copied) for copied in done]
            print_json({"source": source.url, "target": target.url, "ok": ok, "copies": found})
        elif step == "all":
            _print_sum(done)
    return ok


def _check_two_runs(source: Backend, target: Backend, how: CopyOptions) -> None:
    # Copying a run onto itself byte for byte does nothing: only encoding it anew is a use.
    if same_place(source, target) and not (how.encodes and how.overwrite):
        both = "" if source.url == target.url else f" and {target.url}"
        msg = (
            f"FROM and TO are the same run, {source.url}{both}: give another place to copy to, or "
            "say how to encode its checkpoints anew, with --overwrite"
        )
        raise ConfigError(msg)


def _steps(source: Backend, step: str) -> Sequence[int]:
    if step == "all":
        return Catalog(source).steps()
    return [Catalog(source).require_latest() if step == "latest" else int(step)]


class _Copier:
    """Copies steps of one run to another."""

    def __init__(
        self, source: Backend, target: Backend, workers: Workers, how: CopyOptions
    ) -> None:
        self._source = source
        self._target = target
        self._workers = workers
        self._how = how

    def copy(self, step: int) -> Copied:
        record = Catalog(self._source).record(step)
        bar = ProgressBar(f"step {step}", every_s=None, transient=True)
        try:
            if self._how.encodes:
                return self._encode(step, bar)
            return self._copy(record, bar)
        finally:
            bar.close()

    def interrupted(self, step: int) -> str:
        """Return the sentence that says what an interrupted copy has left, and how to go on."""
        if self._how.encodes:
            return f"step {step} is not at {visible(self._target.url)}: copy it again"
        return (
            f"step {step} is at {visible(self._target.url)} whole or not at all; "
            "the same command goes on from what was copied"
        )

    def _copy(self, record: CommitRecord, bar: ProgressBar) -> Copied:
        stored = record  # under its own generation: `_above` renames only the copy
        if self._how.overwrite:
            record = self._above(record)
        total, done = record.bytes_needed, 0

        def moved(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            bar(Progress(done, max(done, total), "copy"))

        try:
            report = self._copy_from(self._source, record, moved)
        except DamagedError as error:
            report = self._copy_from_another(stored, record, moved, error)
        return Copied(
            step=report.step,
            state="there" if report.already_there else "copied",
            verbatim=True,
            uid=report.uid,
            generation=report.generation,
            objects=record.objects,
            bytes_stored=record.bytes_stored,
            bytes_copied=report.bytes_copied,
            bytes_kept=report.bytes_kept,
            seconds=report.seconds,
        )

    def _copy_from(
        self, source: Backend, record: CommitRecord, moved: Callable[[int], None]
    ) -> CopyReport:
        copy = CheckpointCopy(
            source,
            self._target,
            record,
            workers=self._workers,
            grace_s=GRACE_S,
            bytes_per_s=self._how.bytes_per_s,
            trust_sealed=self._how.trust_sealed,
            replace=self._how.overwrite,
            check_cover=True,
        )
        return copy.run(on_progress=moved)

    def _copy_from_another(
        self,
        stored: CommitRecord,
        record: CommitRecord,
        moved: Callable[[int], None],
        error: DamagedError,
    ) -> CopyReport:
        """Copy from a slower tier after the fastest tier with this checkpoint had damage."""
        for tier in self._source.tiers[1:]:
            if is_whole(tier.backend, stored):
                sys.stderr.write(f"penstock: {visible(str(error))}\n")
                sys.stderr.write(f"penstock: tier {tier.name} is tried instead\n")
                try:
                    return self._copy_from(tier.backend, record, moved)
                except DamagedError as another:
                    error = another
        raise error

    def _above(self, record: CommitRecord) -> CommitRecord:
        """Return the record with a generation above all that the target has of its step."""
        generation = Catalog(self._target).next_generation(record.step)
        return replace(record, generation=max(record.generation, generation))

    def _encode(self, step: int, bar: ProgressBar) -> Copied:
        how = self._how
        config = load_config({"backend": self._target, **(how.rules or {})}, what=how.rules_from)
        checkpoint = Checkpoint.open(self._source, step, loader=Loader(self._source, self._workers))
        selection = Selection(how.include, how.exclude)
        report = copy_objects(
            checkpoint,
            self._target,
            Reencoding(
                config=config,
                selection=selection,
                keep_codecs=how.rules is None,
                overwrite=how.overwrite,
                alone=how.flatten,
            ),
            registry=default_registry(),
            workers=self._workers,
            on_progress=bar,
        )
        everything = checkpoint.contents.objects()
        taken = (one for one in everything if selection.selects(one.record.path))
        return Copied(
            step=report.step,
            state="copied",
            verbatim=False,
            rounded_by=checkpoint.rounding(taken).lossy,
            uid=report.uid,
            generation=report.generation,
            objects=report.objects,
            bytes_stored=report.bytes_stored,
            bytes_copied=report.bytes_stored,
            bytes_kept=Catalog(self._target).record(report.step).bytes_borrowed,
            seconds=report.seconds["total"],
        )


def _print(copied: Copied, *, latest: bool) -> None:
    name = f"step {copied.step}" + (", the latest," if latest else "")
    if copied.state == "failed":
        print_line(f"{name} is not copied: {visible(copied.error or '')}", style="bold red")
        return
    if copied.state == "there":
        print_line(f"{name} is there already", style="green")
        return
    # Of all blobs that it needs: those that it borrows are brought as well, or are there already.
    needed = copied.bytes_copied + copied.bytes_kept
    kept = f", of which {size_text(copied.bytes_kept)} were there" if copied.bytes_kept else ""
    what = "copied" if copied.verbatim else "encoded anew"
    print_line(
        f"{name} is {what}: {copied.objects} objects, {size_text(needed)}{kept} "
        f"in {copied.seconds:.1f} s",
        style="green",
    )
    if copied.rounded_by:
        print_line(
            f"values that went through {visible(', '.join(copied.rounded_by))} (lossy) were copied "
            "as they are after rounding"
        )


def _print_sum(done: Sequence[Copied]) -> None:
    states = [copied.state for copied in done]
    print_line(
        f"{counted(states.count('copied'), 'checkpoint')} copied, "
        f"{states.count('there')} already there, {states.count('failed')} failed"
    )
