"""The `penstock export` and `penstock import` commands."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock import export_checkpoint, import_checkpoint
from penstock.core.catalog.catalog import Catalog
from penstock.core.cli.app import AsGiven, Exclude, Include, Json, Step, command, root, size_of
from penstock.core.cli.job import open_run
from penstock.core.cli.output.render import print_json, print_line
from penstock.core.errors import StepExistsError
from penstock.core.log.inventory import last_logged, noting
from penstock.core.reporting.progress import ProgressBar
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

_Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="OLD=NEW",
        help="Replace OLD with NEW at the start of paths; repeatable.",
    ),
]


def _pairs(texts: Sequence[str] | None) -> dict[str, str] | None:
    """Parse `OLD=NEW` texts.

    Raises:
        typer.BadParameter: A text has no `=`, or two have the same OLD.
    """
    found: dict[str, str] = {}
    for text in texts or ():
        old, equals, new = text.partition("=")
        if not equals or old in found:
            msg = f"--rename: {text!r} is not OLD=NEW, or an earlier --rename has the same OLD"
            raise typer.BadParameter(msg)
        found[old] = new
    return found or None


@command("export")
def export(  # noqa: PLR0913 - its options
    url: AsGiven,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="The file or folder to write; must not exist, unless --overwrite is given.",
        ),
    ],
    *,
    to: Annotated[str, typer.Option(metavar="FORMAT", help="`safetensors`, `torch` or `dcp`.")],
    step: Step = None,
    include: Include = None,
    exclude: Exclude = None,
    rename: _Rename = None,
    cast: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Convert floats to this dtype.")
    ] = None,
    shard_bytes: Annotated[
        int,
        typer.Option(
            metavar="SIZE",
            parser=size_of,
            help="Maximum bytes in one safetensors file.",
            show_default="5GB",
        ),
    ] = 5 * 10**9,
    keep_tied: Annotated[
        bool, typer.Option("--keep-tied", help="Write tied tensors under each of their names.")
    ] = False,
    config_from: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Copy config.json and tokenizer files from this folder."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export at OUT.")
    ] = False,
    as_json: Json = False,
) -> None:
    r"""Write a checkpoint, by default the latest one, as files of another tool.

    With `--to safetensors`, OUT is a folder in Hugging Face's layout, or one file if OUT ends in
    .safetensors. It has the objects below `model` unless --include selects others. Every checksum
    is compared on the way, and OUT appears only when it is whole and durable.

    Examples:
      penstock export runs/gpt gpt-hf --to safetensors \
        --config-from gpt2 --cast bfloat16
      penstock export runs/gpt gpt.pt --to torch
      penstock export runs/gpt gpt-dcp --to dcp
    """
    with (
        open_run(url, light=False) as backend,
        closing(ProgressBar("export", every_s=None, transient=True)) as bar,
    ):
        number = Catalog(backend).require_latest() if step is None else step
        with noting(backend, Catalog(backend), number):
            checkpoint = Checkpoint.open(backend, number)
        logged = last_logged(backend, checkpoint.contents.record.uid)
        report = export_checkpoint(
            checkpoint,
            out,
            to=to,
            include=include or None,
            exclude=exclude or None,
            rename=_pairs(rename),
            cast=cast,
            shard_bytes=shard_bytes,
            keep_tied=keep_tied,
            config_from=config_from,
            overwrite=overwrite,
            on_progress=bar,
        )
    if as_json:
        print_json(asdict(report))
        return
    name = f"step {report.step}" + (", the latest," if step is None else "")
    print_line(
        f"{name} is exported to {report.out}: {counted(report.tensors, 'tensor')}, "
        f"{size_text(report.bytes_written)} in {counted(len(report.files), 'file')}",
        style="green",
    )
    if logged is not None:
        print_line(f"its log, up to step {logged}, is left out: only saved steps are exported")
    for left_out, owner in report.tied.items():
        print_line(f"{left_out} is tied to {owner}, and left out; --keep-tied writes it too")


@command("import")
def import_(  # noqa: PLR0913 - its options
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="The file or folder to import; not changed.")
    ],
    run: Annotated[str, root("RUN", "the run to save to")],
    *,
    step: Annotated[int, typer.Option(metavar="STEP", min=0, help="The step to save as.")] = 0,
    format: Annotated[  # noqa: A002 - the option's name
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="`safetensors`, `torch`, `dcp`, `deepspeed` or `auto`.",
        ),
    ] = "auto",
    include: Include = None,
    exclude: Exclude = None,
    rename: _Rename = None,
    names_from: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Where to find the names of an optimizer's parameters: the path of the model in "
            "FROM, another file, or a run.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the checkpoint at that step.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Save the contents of files of another tool as a checkpoint of a run.

    Reads safetensors and old .bin files in Hugging Face's layout, PEFT adapters, files of
    torch.save, and folders of torch.distributed.checkpoint and of DeepSpeed with ZeRO. No code in a
    file runs: objects that need it are refused by name. A failed import leaves the run unchanged.

    Examples:
      penstock import gpt2/ runs/gpt
      penstock import old.pt runs/gpt --rename sd=model
      penstock import dcp/step-900 runs/gpt --step 900
    """
    try:
        with closing(ProgressBar("import", every_s=None, transient=True)) as bar:
            report = import_checkpoint(
                source,
                run,
                step=step,
                format=format,
                include=include or None,
                exclude=exclude or None,
                rename=_pairs(rename),
                names_from=names_from,
                overwrite=overwrite,
                on_progress=bar,
            )
    except StepExistsError as error:  # its own advice is for callers in Python
        msg = (
            f"{run} has step {step} or a later one: choose a later --step, or save this one "
            "with --overwrite"
        )
        raise StepExistsError(msg) from error
    if as_json:
        print_json({"source": source, **asdict(report)})
        return
    print_line(
        f"{source} is step {report.step} of {run}: "
        f"{counted(report.objects, 'object')}, {size_text(report.bytes_stored)} "
        f"in {report.seconds['total']:.1f} s",
        style="green",
    )
