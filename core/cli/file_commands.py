"""The arguments and help of the commands for files of other tools: `export` and `import`.

A command's own module is imported when it runs, so that `penstock --help` loads none of them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.core.cli.app import Exclude, Include, Json, Step, Url, app, size_of, step_of

_Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename", metavar="OLD=NEW", help="Put NEW for OLD where a path begins; repeatable."
    ),
]


@app.command(
    "export",
    short_help="Write a checkpoint as files of another tool.",
    epilog="""\b
Examples:
  penstock export runs/gpt gpt-hf --to safetensors \\
    --config-from gpt2 --cast bfloat16
  penstock export runs/gpt gpt.pt --to torch
  penstock export runs/gpt gpt-dcp --to dcp
""",
)
def export(  # noqa: PLR0913 - its options
    url: Url,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The file or folder to write; must not exist.")
    ],
    *,
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="`safetensors`, `torch` or `dcp`.")
    ],
    step: Step = None,
    include: Include = None,
    exclude: Exclude = None,
    rename: _Rename = None,
    cast: Annotated[
        str | None, typer.Option("--cast", metavar="DTYPE", help="Convert floats to this dtype.")
    ] = None,
    shard_bytes: Annotated[
        str,
        typer.Option(
            "--shard-bytes", metavar="SIZE", help="The most bytes in one file of safetensors."
        ),
    ] = "5GB",
    keep_tied: Annotated[
        bool, typer.Option("--keep-tied", help="Write tied tensors under each of their names.")
    ] = False,
    config_from: Annotated[
        str | None,
        typer.Option(
            "--config-from", metavar="DIR", help="Copy config.json and tokenizer files from there."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export at OUT.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint, by default the latest one, as files of another tool.

    With `--to safetensors` it is a folder as Hugging Face has it, or one file if OUT ends in
    .safetensors, of what is below `model` unless --include names something else. Every checksum is
    compared on the way, and OUT appears when it is whole and durable, not before.
    """
    from penstock.core.cli.commands.files import pairs, run_export  # noqa: PLC0415

    run_export(
        url,
        out,
        step,
        to=to,
        include=include or None,
        exclude=exclude or None,
        rename=pairs(rename),
        cast=cast,
        shard_bytes=size_of(shard_bytes, "--shard-bytes"),
        keep_tied=keep_tied,
        config_from=config_from,
        overwrite=overwrite,
        as_json=as_json,
    )


@app.command(
    "import",
    short_help="Save files of another tool as a checkpoint.",
    epilog="""\b
Examples:
  penstock import gpt2/ runs/gpt
  penstock import old.pt runs/gpt --rename sd=model
  penstock import dcp/step-900 runs/gpt --step 900
""",
)
def import_(  # noqa: PLR0913 - its options
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="The file or folder to import; is not changed.")
    ],
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Root of the run to save to: a path, a URL, or a configuration file.",
        ),
    ],
    *,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="STEP",
            parser=step_of,
            help="The step to save as.",
            show_default="0",
        ),
    ] = None,
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
            "--names-from",
            metavar="MODEL",
            help="Name the parameters of optimizers by this path or file.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the checkpoint at that step.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Save what is in files of another tool as a checkpoint of a run.

    Takes safetensors and old .bin files as Hugging Face has them, adapters of PEFT, files of
    torch.save, and folders of torch.distributed.checkpoint and of DeepSpeed with ZeRO. No code that
    is in a file runs: what cannot be read without that is refused by name. An import that fails
    leaves the run as it was.
    """
    from penstock.core.cli.commands.files import pairs, run_import  # noqa: PLC0415

    run_import(
        source,
        run,
        step=step or 0,
        format=format,
        include=include or None,
        exclude=exclude or None,
        rename=pairs(rename),
        names_from=names_from,
        overwrite=overwrite,
        as_json=as_json,
    )
