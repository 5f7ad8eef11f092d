"""The `penstock copy` command."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.abc import Tier
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.prune import GRACE_S
from penstock.core.catalog.survey import is_whole
from penstock.core.cli.app import Exclude, Include, Json, backend_of, command, root, size_of
from penstock.core.cli.job import open_run
from penstock.core.cli.output.render import print_json, print_line, warn
from penstock.core.cli.output.runs_on_disk import same_place
from penstock.core.concurrency.workers import Workers, default_workers
from penstock.core.config.model import load_config, read_file
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.reencode import Reencoding, copy_objects
from penstock.core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DamagedError,
    PenstockError,
    PluginError,
)
from penstock.core.log.inventory import log_bytes, noting
from penstock.core.log.transfer import CopiedLog, copy_log
from penstock.core.pipeline.loader import Loader
from penstock.core.plugins.registry import default_registry
from penstock.core.reporting.progress import ProgressBar
from penstock.core.reporting.reports import Progress
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.storage.open import open_backend
from penstock.core.tree.select import Selection
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Backend
    from penstock.core.copy.checkpoint_copy import CopyReport
    from penstock.core.format.records import CommitRecord


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of copying one step.

    Attributes:
        step: The step.
        state: `copied`, `there` (the target had the checkpoint already) or `failed`.
        verbatim: Whether the copy is identical, byte for byte.
        uid: The uid at the target; None if the copy failed.
        generation: The generation at the target.
        objects: The number of objects in the copy.
        bytes_stored: The bytes of the copy's own blobs.
        bytes_copied: The bytes of blobs that were written, including those that the copy borrows.
        bytes_kept: The bytes of blobs that the target already had: an interrupted copy wrote
            them, or another checkpoint there needs them too.
        seconds: The duration of the copy.
        error: The reason for a failure.
        rounded_by: For a re-encoded copy, the lossy codecs by which the source stores the copied
            objects. Their rounded values are what was copied.
        entries_copied: The number of entries of the checkpoint's log that were copied.
        log_left_out: Why not all of the log was copied; empty if it was.
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
    entries_copied: int = 0
    log_left_out: str = ""


def wanted_rules(
    codecs: Sequence[str] | None, file: str | None, *, raw: bool
) -> dict[str, Any] | None:
    """Return the configuration that these options ask for; None if no option is given.

    It has the key `rules`, and also `deltas` if the file has that.

    Raises:
        ConfigError: The file cannot be read or has no rules; a codec needs options; or `delta` is
            the only codec.
        PluginError: A codec is not installed.
    """
    if raw:
        return {"rules": []}
    if codecs:
        for name in codecs:
            _check_codec(name)
        if list(codecs) == ["delta"]:
            msg = (
                "--codec delta alone makes no copy smaller: add a codec that compresses the "
                "differences, --codec delta --codec floatsplit"
            )
            raise ConfigError(msg)
        return {"rules": [{"match": "**", "codecs": list(codecs)}]}
    if file is None:
        return None
    values = read_file(Path(file))
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
        msg = f"--codec {name}: {error}\nGive options in a file: --rules FILE."
        raise ConfigError(msg) from error


@command("copy")
def copy(  # noqa: PLR0913 - its options
    from_url: Annotated[str, root("FROM", "the run to copy from")],
    to_url: Annotated[
        str, root("TO", "the run to copy to, created if needed", callback=backend_of)
    ],
    *,
    step: Annotated[
        str, typer.Option(metavar="STEP", help="A step, `latest`, or `all`.")
    ] = "latest",
    include: Include = None,
    exclude: Exclude = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODEC",
            help="Encode again with this codec; repeatable, in the order of encoding. With delta, "
            "encode against the newest earlier step that TO has.",
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Encode again, without any codec.")] = False,
    rules: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Encode again by the [[rules]] and [deltas] of this file."
        ),
    ] = None,
    flatten: Annotated[
        bool,
        typer.Option(
            "--flatten", help="Make the copy independent of the data of other checkpoints."
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace a different checkpoint that TO has at that step."
        ),
    ] = False,
    rate: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=size_of, help="Copy at most this per second: 200MiB."),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Do not read again the blobs that an interrupted copy wrote to TO."
        ),
    ] = False,
    as_json: Json = False,
) -> bool:
    r"""Copy checkpoints to another run, by default the latest one.

    Without options that select or encode, the copy is identical, byte for byte; if it is
    interrupted, the same command continues it. Every checksum is compared on the way, and the
    checkpoint appears at the target only when it is whole and durable there.

    Examples:
      penstock copy runs/gpt s3://bucket/gpt
      penstock copy runs/gpt /backup/gpt --step all
      penstock copy runs/gpt /share/weights --include model \
        --codec zstd
    """
    if step not in {"latest", "all"} and not (step.isascii() and step.isdecimal()):
        msg = (
            f"--step: {step!r} is not a step: give a whole number of at least 0, `latest` or `all`"
        )
        raise typer.BadParameter(msg)
    if sum((codec is not None, raw, rules is not None)) > 1:
        msg = "--codec, --raw and --rules each choose the encoding; pass one of them"
        raise typer.BadParameter(msg)
    wanted = wanted_rules(codec, rules, raw=raw)
    encodes = bool(include or exclude or flatten) or wanted is not None
    if encodes and (trust or rate is not None):
        option = "--trust" if trust else "--rate"
        msg = f"{option} is for byte-for-byte copies; leave out options that select or encode"
        raise typer.BadParameter(msg)
    with (
        open_run(from_url, light=False) as source,
        closing(open_backend(to_url)) as target,
        closing(Workers(default_workers())) as workers,
    ):
        _check_two_runs(source, target, anew=encodes and overwrite)
        how = None
        if encodes:
            how = Reencoding(
                config=load_config({"backend": target, **(wanted or {})}, what=rules or "--codec"),
                selection=Selection(include or None, exclude or None),
                keep_codecs=wanted is None,
                overwrite=overwrite,
                alone=flatten,
            )
        copier = _Copier(
            source=source,
            target=target,
            workers=workers,
            how=how,
            overwrite=overwrite,
            bytes_per_s=rate,
            trust_sealed=trust,
        )
        done = _copied(copier, step, quiet=as_json)
        ok = all(copied.state != "failed" for copied in done)
        if as_json:
            found = [asdict(copied) for copied in done]
            print_json({"source": source.url, "target": target.url, "ok": ok, "copies": found})
        elif step == "all":
            _print_sum(done)
    return ok


def _copied(copier: _Copier, step: str, *, quiet: bool) -> list[Copied]:
    """Copy one checkpoint, or all checkpoints of a run, and print the result of each."""
    done: list[Copied] = []
    for number in _steps(copier.source, step):
        try:
            copied = copier.copy(number)
        except KeyboardInterrupt:
            warn(f"interrupted; {copier.interrupted(number)}")
            raise
        except CheckpointNotFoundError:
            if step != "all":
                raise
            continue  # deleted after the listing, for example by retention: not a failure
        except PenstockError as error:
            if step != "all":
                raise
            copied = Copied(number, "failed", copier.how is None, error=str(error))
        done.append(copied)
        if not quiet:
            _print(copied, latest=step == "latest")
    return done


def _check_two_runs(source: Backend, target: Backend, *, anew: bool) -> None:
    # Copying a run onto itself byte for byte would change nothing; encoding it again is useful.
    if same_place(source, target) and not anew:
        both = "" if source.url == target.url else f" and {target.url}"
        msg = (
            f"FROM and TO are the same run, {source.url}{both}: give another place to copy to, or "
            "encode the checkpoints again with --overwrite and, for example, --codec"
        )
        raise ConfigError(msg)


def _steps(source: Backend, step: str) -> Sequence[int]:
    if step == "all":
        return Catalog(source).steps()
    return [Catalog(source).require_latest() if step == "latest" else int(step)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copier:
    """Copies steps of one run to another."""

    source: Backend
    target: Backend
    workers: Workers
    how: Reencoding | None  # for a copy that is a new save, not the same bytes
    overwrite: bool
    bytes_per_s: float | None
    trust_sealed: bool  # skip reading again the blobs that an interrupted copy has sealed

    def copy(self, step: int) -> Copied:
        with noting(self.source, Catalog(self.source), step):
            record = Catalog(self.source).record(step)
        with closing(ProgressBar(f"step {step}", every_s=None, transient=True)) as bar:
            if self.how is None:
                copied = self._copy(record, bar)
            else:
                copied = self._encode(step, self.how, bar)
            log = self._copy_log(record, copied)
        return replace(copied, entries_copied=log.entries, log_left_out=log.left_out)

    def _copy_log(self, record: CommitRecord, copied: Copied) -> CopiedLog:
        assert copied.uid is not None
        if self.how is not None and log_bytes(self.source, record.uid):
            # A replay needs the whole state that was logged, bit for bit.
            if not self.how.selection.everything:
                return CopiedLog(left_out="only a part of the checkpoint was copied")
            encoded = Checkpoint.open(self.target, record.step)
            if encoded.rounding(encoded.objects()).lossless is not True:
                return CopiedLog(left_out="codecs of the copy may round values")
        return copy_log(self.source, record.uid, self.target, copied.uid, overwrite=self.overwrite)

    def interrupted(self, step: int) -> str:
        """Return a message on the state of an interrupted copy, and on how to continue."""
        if self.how is not None:
            return f"step {step} is not at {self.target.url}: copy it again"
        return (
            f"step {step} is at {self.target.url} whole or not at all; "
            "the same command continues the copy"
        )

    def _copy(self, record: CommitRecord, bar: ProgressBar) -> Copied:
        stored = record  # with the generation that the source has: `_above` raises the copy's only
        if self.overwrite:
            record = self._above(record)
        total, done = record.bytes_needed, 0

        def moved(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            bar(Progress(done, max(done, total), "copy"))

        report = self._copy_from_any_tier(stored, record, moved)
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

    def _copy_from_any_tier(
        self, stored: CommitRecord, record: CommitRecord, moved: Callable[[int], None]
    ) -> CopyReport:
        """Copy from the run; if the copy in a tier is damaged, from a slower tier."""
        damage: DamagedError | None = None
        for tier in (Tier("", self.source), *self.source.tiers[1:]):
            if damage is not None:
                if not is_whole(tier.backend, stored):
                    continue
                warn(str(damage))
                warn(f"copying from tier {tier.name} instead")
            copy = CheckpointCopy(
                tier.backend,
                self.target,
                record,
                workers=self.workers,
                grace_s=GRACE_S,
                bytes_per_s=self.bytes_per_s,
                trust_sealed=self.trust_sealed,
                replace=self.overwrite,
                check_cover=True,
            )
            try:
                return copy.run(on_progress=moved)
            except DamagedError as error:
                damage = error
        assert damage is not None
        raise damage

    def _above(self, record: CommitRecord) -> CommitRecord:
        """Return `record`, with a generation above all those that the target has of its step."""
        generation = Catalog(self.target).next_generation(record.step)
        return replace(record, generation=max(record.generation, generation))

    def _encode(self, step: int, how: Reencoding, bar: ProgressBar) -> Copied:
        checkpoint = Checkpoint.open(self.source, step, loader=Loader(self.source, self.workers))
        report = copy_objects(
            checkpoint,
            self.target,
            how,
            registry=default_registry(),
            workers=self.workers,
            on_progress=bar,
        )
        everything = checkpoint.contents.objects()
        selected = (one for one in everything if how.selection.selects(one.path))
        return Copied(
            step=report.step,
            state="copied",
            verbatim=False,
            rounded_by=checkpoint.rounding(selected).lossy,
            uid=report.uid,
            generation=report.generation,
            objects=report.objects,
            bytes_stored=report.bytes_stored,
            bytes_copied=report.bytes_stored,
            bytes_kept=Catalog(self.target).record(report.step).bytes_borrowed,
            seconds=report.seconds["total"],
        )


def _print(copied: Copied, *, latest: bool) -> None:
    name = f"step {copied.step}" + (", the latest," if latest else "")
    if copied.state == "failed":
        print_line(f"{name} is not copied: {copied.error or ''}", style="bold red")
        return
    if copied.state == "there":
        print_line(f"{name} is already there", style="green")
        _print_log(copied)
        return
    # All blobs that it needs: borrowed ones are copied too, or are there already.
    needed = copied.bytes_copied + copied.bytes_kept
    kept = f" ({size_text(copied.bytes_kept)} were there)" if copied.bytes_kept else ""
    what = "copied" if copied.verbatim else "encoded again"
    print_line(
        f"{name} is {what}: {counted(copied.objects, 'object')}, {size_text(needed)}{kept} "
        f"in {copied.seconds:.1f} s",
        style="green",
    )
    if copied.rounded_by:
        print_line(
            f"values that {', '.join(copied.rounded_by)} (lossy) had rounded are copied rounded"
        )
    _print_log(copied)


def _print_log(copied: Copied) -> None:
    if copied.entries_copied:
        entries = "1 entry" if copied.entries_copied == 1 else f"{copied.entries_copied} entries"
        print_line(f"{entries} of its log copied", style="green")
    if copied.log_left_out:
        print_line(f"not all of its log is copied: {copied.log_left_out}", style="yellow")


def _print_sum(done: Sequence[Copied]) -> None:
    states = [copied.state for copied in done]
    print_line(
        f"{counted(states.count('copied'), 'checkpoint')} copied, "
        f"{states.count('there')} already there, {states.count('failed')} failed"
    )
