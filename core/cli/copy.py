"""`penstock copy`."""

from __future__ import annotations

import os
import sys
import tomllib
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.core.bars import ProgressBar
from penstock.core.catalog import Catalog
from penstock.core.checkpoint import Checkpoint
from penstock.core.cli.places import same_place
from penstock.core.cli.render import print_json, print_line, visible
from penstock.core.config import load_config, parse_size
from penstock.core.copying import CheckpointCopy
from penstock.core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DamagedError,
    PenstockError,
    PluginError,
)
from penstock.core.loading import Loader
from penstock.core.opening import open_backend
from penstock.core.prune import GRACE_S
from penstock.core.reencoding import Reencoding, copy_objects
from penstock.core.registry import default_registry
from penstock.core.reports import Progress
from penstock.core.select import Selection
from penstock.core.sizes import size_text
from penstock.core.survey import is_whole
from penstock.core.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Backend
    from penstock.core.copying import CopyReport
    from penstock.core.manifest import CommitRecord


@dataclass(frozen=True, slots=True)
class How:
    """How to copy.

    Attributes:
        include: Patterns of objects to take; None: all.
        exclude: Patterns of objects to leave out.
        rules: Encode by these; None: as it is.
        rules_from: Where they were written.
        overwrite: Replace another checkpoint at that step.
        bytes_per_s: Most to copy per second; None: as fast as it goes.
        trust_sealed: Do not read again what an interrupted copy has brought there.
    """

    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    rules: Sequence[Any] | None = None
    rules_from: str = "rules"
    overwrite: bool = False
    bytes_per_s: float | None = None
    trust_sealed: bool = False

    @property
    def encodes(self) -> bool:
        """Whether the copy is a save of its own, and not the same bytes."""
        return any(x is not None for x in (self.include, self.exclude, self.rules))


@dataclass(frozen=True, slots=True)
class Copied:
    """What became of one step.

    Attributes:
        step: The step.
        state: `copied`, `there` (it was there already) or `failed`.
        verbatim: Whether the copy is the same byte for byte.
        uid: Name of the attempt at the target; None if it failed.
        generation: At the target.
        objects: Number of objects in the copy.
        bytes_stored: Bytes of its blobs.
        bytes_kept: How many of them an earlier copy had brought there.
        seconds: How long it took.
        error: Why it failed.
    """

    step: int
    state: str
    verbatim: bool
    uid: str | None = None
    generation: int | None = None
    objects: int = 0
    bytes_stored: int = 0
    bytes_kept: int = 0
    seconds: float = 0.0
    error: str | None = None


def wanted_rules(
    codecs: Sequence[str] | None, file: str | None, *, raw: bool
) -> Sequence[Any] | None:
    """The rules that the options ask for; None: none of them does.

    Raises:
        ConfigError: The file cannot be read, or has no rules; or a codec needs options.
        PluginError: A codec is not installed.
    """
    if raw:
        return []
    if codecs:
        for name in codecs:
            _check_codec(name)
        return [{"match": "**", "codecs": list(codecs)}]
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
    return rules


def _check_codec(name: str) -> None:
    try:
        default_registry().codec(name, {})
    except PluginError as error:
        msg = f"--codec {name}: {error}"
        raise PluginError(msg) from error
    except ConfigError as error:
        msg = f"--codec {name}: {error}\nThey can be given in a file: --rules FILE."
        raise ConfigError(msg) from error


def rate_bytes(text: str) -> float:
    """Bytes of `200MiB`.

    Raises:
        typer.BadParameter: It is no size above zero.
    """
    try:
        size = parse_size(text)
    except ValueError as error:
        msg = f"--rate: {text!r} is {error}"
        raise typer.BadParameter(msg) from None
    if not isinstance(size, int) or size <= 0:
        msg = f"--rate: {text!r} is no size above zero"
        raise typer.BadParameter(msg)
    return float(size)


def run(source_url: str, target_url: str, step: str, how: How, *, as_json: bool) -> bool:
    """Copy one checkpoint, or all, and print what became of each.

    Returns:
        Whether the target has all of them now.

    Raises:
        ConfigError: Both are the same run.
        PenstockError: The one step that was asked for cannot be copied.
    """
    done: list[Copied] = []
    with (
        closing(open_backend(source_url, must_exist=True)) as source,
        closing(open_backend(target_url)) as target,
        closing(Workers(min(4, os.cpu_count() or 1))) as workers,
    ):
        _check_apart(source, target, how)
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
                continue  # deleted since it was listed
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


def _check_apart(source: Backend, target: Backend, how: How) -> None:
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

    def __init__(self, source: Backend, target: Backend, workers: Workers, how: How) -> None:
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
        """What is left of a copy that was interrupted."""
        if self._how.encodes:
            return f"step {step} is not at {visible(self._target.url)}: copy it again"
        return (
            f"step {step} is at {visible(self._target.url)} whole or not at all; "
            "the same command goes on from what was copied"
        )

    def _copy(self, record: CommitRecord, bar: ProgressBar) -> Copied:
        stored = record
        if self._how.overwrite:
            record = self._above(record)
        total, done = record.bytes_stored, 0

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
        )
        return copy.run(on_progress=moved)

    def _copy_from_another(
        self,
        stored: CommitRecord,
        record: CommitRecord,
        moved: Callable[[int], None],
        error: DamagedError,
    ) -> CopyReport:
        """From a slower tier, where the fastest that has it has a damaged copy."""
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
        """The record as a generation above all that the target has of that step."""
        generation = Catalog(self._target).next_generation(record.step)
        return replace(record, generation=max(record.generation, generation))

    def _encode(self, step: int, bar: ProgressBar) -> Copied:
        how = self._how
        config = load_config(
            {"backend": self._target, "rules": how.rules or ()}, what=how.rules_from
        )
        checkpoint = Checkpoint.open(self._source, step, loader=Loader(self._source, self._workers))
        report = copy_objects(
            checkpoint,
            self._target,
            Reencoding(
                config=config,
                selection=Selection(how.include, how.exclude),
                keep_codecs=how.rules is None,
                overwrite=how.overwrite,
            ),
            registry=default_registry(),
            workers=self._workers,
            on_progress=bar,
        )
        return Copied(
            step=report.step,
            state="copied",
            verbatim=False,
            uid=report.uid,
            generation=report.generation,
            objects=report.objects,
            bytes_stored=report.bytes_stored,
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
    kept = f", of which {size_text(copied.bytes_kept)} were there" if copied.bytes_kept else ""
    what = "copied" if copied.verbatim else "encoded anew"
    print_line(
        f"{name} is {what}: {copied.objects} objects, {size_text(copied.bytes_stored)}{kept} "
        f"in {copied.seconds:.1f} s",
        style="green",
    )


def _print_sum(done: Sequence[Copied]) -> None:
    states = [copied.state for copied in done]
    print_line(
        f"{states.count('copied')} checkpoints copied, {states.count('there')} were there, "
        f"{states.count('failed')} failed"
    )
