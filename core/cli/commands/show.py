"""The `penstock show` command."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.notes import NotesOfRun
from penstock.core.cli.app import (
    AsGiven,
    Exclude,
    Include,
    Json,
    Step,
    backend_of,
    command,
    is_configuration,
    whole_number,
)
from penstock.core.cli.commands.ls import record_json
from penstock.core.cli.output.chain import chain_of, depth_of, print_chain
from penstock.core.cli.output.render import (
    Column,
    metadata_text,
    number_text,
    print_json,
    print_line,
    print_table,
    ratio_text,
    visible,
)
from penstock.core.cli.output.stats import Stats, tensor_stats
from penstock.core.cli.output.sums import Sum, print_sums, sums_of
from penstock.core.cli.output.tree import Branch, grown, rows_of
from penstock.core.plan.choice import class_of
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.restore.rounding import Rounding
from penstock.core.restore.specs import storage_of
from penstock.core.storage.open import open_backend
from penstock.core.tree.paths import show_path
from penstock.core.tree.select import Selection
from penstock.core.types import Kind, show_segment
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.catalog.notes import Notes
    from penstock.core.cli.output.chain import Link
    from penstock.core.format.records import ChoiceRecord, CommitRecord, ObjectRecord
    from penstock.core.plan.restore import Located
    from penstock.core.restore.contents import Contents
    from penstock.core.types import WorstErrors

GROUPINGS = ("codec", "rule", "role", "dtype")
"""The values of `--by`."""

_CODECS_OF_A_CONTAINER = 2  # the most that a container names; more would fill the table
_COLUMNS = (
    Column("PATH", flexible=True),
    Column("TYPE", keep=9),
    Column("SHAPE", keep=8),
    Column("BYTES", right=True, keep=9),
    Column("STORED", right=True, keep=10),
    Column("RATIO", right=True, keep=5, spare=True),
    Column("CODECS", keep=4, spare=True),
    Column("ROLE", keep=1, spare=True),
)
_BORROWED = Column("BORROWED", right=True, keep=3, spare=True)
_LINKS = Column("LINKS", right=True, keep=2, spare=True)
_ERROR_COLUMNS = (
    Column("ABS ERROR", right=True, keep=6),
    Column("REL ERROR", right=True, keep=7),
)
_STATS_COLUMNS = (
    Column("MIN", right=True, keep=13),
    Column("MAX", right=True, keep=12),
    Column("MEAN", right=True, keep=14),
    Column("STD", right=True, keep=11),
    Column("NAN", right=True, keep=16),
    Column("INF", right=True, keep=15),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """One object and how it is stored.

    Attributes:
        record: The object's record in the manifest.
        codecs: The codecs of its frames, in the order of encoding.
        bytes_stored: Its bytes in the blobs of the checkpoint itself; of a slab, which holds
            several objects, its share.
        bytes_borrowed: Likewise its bytes in the blobs of other saves: frames that it shares, and
            those that its own ones are encoded against.
        links: How many frames of other chunks its deepest frame needs, one below the other.
        stats: Statistics of its values, if they were asked for and can be computed.
        rounding: Its codecs that are lossy, and those of which that is unknown.
    """

    record: ObjectRecord
    codecs: tuple[str, ...]
    bytes_stored: int
    bytes_borrowed: int = 0
    links: int = 0
    stats: Stats | None = None
    rounding: Rounding = field(default_factory=Rounding)

    @property
    def nbytes(self) -> int:
        """The raw bytes; 0 for a tied object, whose bytes are stored at another path."""
        return 0 if self.record.same_as is not None else self.record.spec.nbytes

    @property
    def elsewhere(self) -> str:
        """`tied` or `derived` if all bytes are stored with another object; empty if not."""
        if self.record.same_as is not None:
            return "tied"
        return "" if self.record.derived is None else "derived"


def _depth(text: str) -> int:
    return whole_number(text, "depth", 1)


@command(
    "show",
    epilog="""\b
Examples:
  penstock show runs/gpt --depth 1
  penstock show runs/gpt --step 300
  penstock show runs/gpt --include 'model/*.bias'
  penstock show runs/gpt --by codec
  penstock show runs/gpt --include model --stats |
    grep -v ' 0 *0$'
""",
)
def show(  # noqa: PLR0913 - its options
    url: AsGiven,
    *,
    step: Step = None,
    include: Include = None,
    exclude: Exclude = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats", help="Read the selected tensors: min, max, mean, std, nan and inf of each."
        ),
    ] = False,
    tree: Annotated[
        bool | None,
        typer.Option(
            "--tree/--flat",
            help="Indented, with sums; or one line with the whole path for each object.",
            show_default="a tree in a terminal, flat in a pipe",
        ),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option("--depth", metavar="N", parser=_depth, help="Fold the tree below N levels."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="WHAT",
            help="Sums instead of objects: by `codec`, `rule`, `role` or `dtype`.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the objects of one checkpoint: type, shape, bytes, ratio, codecs, role.

    Reads the manifest only, unless --stats is given. A pattern is a path with `*` (within one
    segment), `**` (any number), `?`, `[..]`; a bare prefix takes all that is below it.

    STORED is what an object takes without the gaps between objects, RATIO is BYTES over STORED;
    `penstock ls` counts the gaps, too. BORROWED is what it needs of the blobs of other checkpoints.
    """
    if depth is not None and (tree is False or as_json):
        msg = "--depth folds the tree; leave out --flat and --json"
        raise typer.BadParameter(msg)
    if by is not None:
        _check_grouping(url, by, objects=tree is not None or depth is not None or stats)
    selection = Selection(include or None, exclude or None)
    group_of = None if by is None else _grouping(by, url)
    with closing(open_backend(backend_of(url), must_exist=True, light=not stats)) as backend:
        if step is None:
            step = Catalog(backend).require_latest()
        checkpoint = Checkpoint.open(backend, step)
        contents = checkpoint.contents
        located = contents.objects()
        # Before anything is printed: a misspelt pattern would look like an empty checkpoint.
        selection.check_used(one.record.path for one in located)
        chosen = [one for one in located if selection.selects(one.record.path)]
        shown = [
            replace(describe(one, contents), rounding=checkpoint.rounding([one])) for one in chosen
        ]
        chain = chain_of(backend, contents, chosen)
        classes = {class_of(one.record.role, one.record.spec.dtype) for one in chosen}
        choices = [choice for choice in contents.choices() if choice.objects in classes]
        if stats:
            shown = [replace(s, stats=tensor_stats(checkpoint, s.record)) for s in shown]
        notes = NotesOfRun.of(backend, contents.record).read(contents.record)
    record = contents.record
    sums = [] if group_of is None else sums_of(_as_sum(one, group_of(one)) for one in shown)
    if as_json:
        found: dict[str, Any] = {
            "checkpoint": {"step": record.step, **record_json(record, notes)},
            "chain": [link.as_json() for link in chain],
            "choices": [asdict(choice) for choice in choices],
        }
        if by is None:
            found["objects"] = [_as_json(one, stats=stats) for one in shown]
        else:
            found |= {"by": by, "groups": [asdict(one) for one in sums]}
        print_json(found)
        return
    _print_head(record, notes, chain)
    if by is None:
        as_tree = (depth is not None or sys.stdout.isatty()) if tree is None else tree
        _print_objects(shown, tree=as_tree, depth=depth, stats=stats)
    else:
        print_sums(by.upper(), sums)
    _print_sum(record, shown)
    _print_rounding(shown)
    _print_choices(choices)


def _check_grouping(url: str, by: str, *, objects: bool) -> None:
    """Refuse groups that do not exist, and groups beside options of objects."""
    msg = ""
    if by not in GROUPINGS:
        msg = f"--by: {by!r} is none of {', '.join(GROUPINGS)}"
    elif objects:
        msg = "--by prints no objects; leave out --tree, --flat, --depth and --stats"
    elif by == "rule" and not is_configuration(url):
        msg = "--by rule: a checkpoint stores no rules; give their configuration file as URL"
    if msg:
        raise typer.BadParameter(msg)


def _grouping(by: str, rules: str) -> Callable[[Shown], str]:
    """Return the function that names the group of an object."""
    if by == "codec":
        return lambda one: one.elsewhere or "+".join(one.codecs) or "raw"
    if by == "role":
        return lambda one: one.record.role.value
    if by == "dtype":
        return lambda one: (
            one.record.spec.dtype if one.record.kind is Kind.TENSOR else one.record.form
        )
    from penstock.core.config.model import load_config  # noqa: PLC0415 - `show` is quick without

    selections = [
        (Selection(rule.match), ", ".join(rule.match)) for rule in load_config(rules).rules
    ]
    return lambda one: next(
        (name for selection, name in selections if selection.selects(one.record.path)), "no rule"
    )


def _as_sum(one: Shown, group: str) -> Sum:
    return Sum(group, 1, one.nbytes, one.bytes_stored, one.bytes_borrowed)


def describe(located: Located, contents: Contents) -> Shown:
    """Return how an object is stored, as the manifest says."""
    found = storage_of(located, contents)
    return Shown(
        located.record,
        found.codecs,
        found.bytes_stored,
        found.bytes_borrowed,
        depth_of(located),
    )


def _print_head(record: CommitRecord, notes: Notes, chain: Sequence[Link]) -> None:
    print_line(
        f"step {record.step}, generation {record.generation}, of {record.created}, "
        f"written by penstock {visible(record.penstock)} through {visible(record.engine)}"
        + (f" on {record.world_size} ranks" if record.world_size > 1 else "")
    )
    if notes.metadata:
        print_line(metadata_text(notes.metadata))
    if notes.tags:
        print_line(f"pinned: {' '.join(notes.tags)}")
    if chain[1:]:
        print_chain(chain, None if record.base is None else record.base.age)
    print_line("")


def _print_objects(shown: list[Shown], *, tree: bool, depth: int | None, stats: bool) -> None:
    columns = [
        *_COLUMNS,
        _BORROWED,
        _LINKS,
        *(_STATS_COLUMNS if stats else ()),
        *_ERROR_COLUMNS,
    ]
    if tree:
        root = grown((one.record.path, one) for one in shown)
        rows = [
            _branch_row(row.branch, row.level, stats=stats) + [""] * len(_ERROR_COLUMNS)
            if row.item is None
            else _as_row(
                row.item, "  " * row.level + visible(show_segment(row.segment)), stats=stats
            )
            for row in rows_of(root, depth)
        ]
    else:
        rows = [_as_row(one, visible(show_path(one.record.path)), stats=stats) for one in shown]
    if not any(one.record.errors is not None for one in shown):
        del columns[-len(_ERROR_COLUMNS) :]
        rows = [row[: len(columns)] for row in rows]
    for column, used in (
        (_LINKS, any(one.links for one in shown)),
        (_BORROWED, any(one.bytes_borrowed for one in shown)),
    ):
        if not used:
            at = columns.index(column)
            del columns[at]
            for row in rows:
                del row[at]
    print_table(columns, rows)


def _print_sum(record: CommitRecord, shown: list[Shown]) -> None:
    raw = sum(one.nbytes for one in shown)
    stored = sum(one.bytes_stored for one in shown)
    borrowed = sum(one.bytes_borrowed for one in shown)
    print_line(
        f"\n{len(shown)} of {record.objects} objects, {size_text(raw)}, "
        f"{size_text(stored)} stored ({ratio_text(raw, stored)})"
        + (f", {size_text(borrowed)} borrowed" if borrowed else "")
        + _with_gaps(record, shown)
    )


def _print_rounding(shown: list[Shown]) -> None:
    """Print which of the objects are not stored with the values that were saved."""
    rounded = [one for one in shown if one.rounding.lossy]
    if rounded:
        codecs = sorted({name for one in rounded for name in one.rounding.lossy})
        print_line(
            f"{len(rounded)} of these are rounded: codecs marked lossy "
            f"({visible(', '.join(codecs))}) have changed their values"
        )
    unknown = sorted({name for one in shown for name in one.rounding.unknown})
    if unknown:
        print_line(
            f"whether {visible(', '.join(unknown))} is lossy is not known: it is not installed",
            style="yellow",
        )


def _print_choices(choices: Sequence[ChoiceRecord]) -> None:
    """Print why the objects have the codecs that were chosen for them by measurement."""
    for choice in choices:
        print_line(f"chosen for {visible(choice.objects)}: {visible(choice.why)}")


def _codecs_text(one: Shown) -> str:
    if one.elsewhere:
        return "-"
    lossy, unknown = set(one.rounding.lossy), set(one.rounding.unknown)
    marks = ["(lossy)" if c in lossy else "(?)" if c in unknown else "" for c in one.codecs]
    named = (name + mark for name, mark in zip(one.codecs, marks, strict=True))
    return visible("+".join(named)) or "raw"


def _with_gaps(record: CommitRecord, shown: list[Shown]) -> str:
    """Return the end of the sum line that explains why `ls` prints another ratio.

    Empty where the figures agree, or where only some of the objects are shown.
    """
    stored = sum(one.bytes_stored for one in shown)
    same = size_text(stored) == size_text(record.bytes_stored)
    if same or len(shown) < record.objects:
        return ""
    ratio = ratio_text(record.bytes_raw, record.bytes_stored)
    return f"; its blobs take {size_text(record.bytes_stored)} ({ratio}), alignment gaps included"


def _branch_row(branch: Branch[Shown], level: int, *, stats: bool) -> list[str]:
    below = list(branch.leaves())
    raw, stored = sum(s.nbytes for s in below), sum(s.bytes_stored for s in below)
    count = f"{len(below)} object{'' if len(below) == 1 else 's'}"
    return [
        "  " * level + visible(show_segment(branch.segment)) + "/",
        count,
        "",
        size_text(raw),
        size_text(stored),
        ratio_text(raw, stored),
        _codecs_of_all(below),
        "",
        size_text(sum(s.bytes_borrowed for s in below)),
        str(max(s.links for s in below)),
        *([""] * len(_STATS_COLUMNS) if stats else []),
    ]


def _codecs_of_all(below: Sequence[Shown]) -> str:
    """Return the codecs of a container's objects, those of most bytes first."""
    sums = sums_of(_as_sum(one, _codecs_text(one)) for one in below if not one.elsewhere)
    names = [one.group for one in sums]
    more = len(names) - _CODECS_OF_A_CONTAINER
    return ", ".join([*names[:_CODECS_OF_A_CONTAINER], *([f"+{more}"] if more > 0 else [])])


def _as_row(one: Shown, name: str, *, stats: bool) -> list[str]:
    record, tensor = one.record, one.record.kind is Kind.TENSOR
    if record.same_as is not None:
        name += f" = {visible(show_path(record.same_as))}"
    if record.derived is not None:
        name += f" derived from {visible(show_path(record.derived))}"
    return [
        name,
        visible(record.spec.dtype if tensor else record.form),
        "x".join(map(str, record.spec.shape)) if tensor else "",
        size_text(one.nbytes),
        size_text(one.bytes_stored),
        ratio_text(one.nbytes, one.bytes_stored),
        _codecs_text(one),
        record.role.value,
        size_text(one.bytes_borrowed),
        str(one.links),
        *(_stats_cells(one.stats) if stats else []),
        *_error_cells(record.errors),
    ]


def _error_cells(errors: WorstErrors | None) -> list[str]:
    if errors is None:
        return [""] * len(_ERROR_COLUMNS)
    return [number_text(errors.absolute), number_text(errors.relative)]


def _stats_cells(stats: Stats | None) -> list[str]:
    if stats is None:
        return [""] * len(_STATS_COLUMNS)
    figures = [number_text(n) for n in (stats.min, stats.max, stats.mean, stats.std)]
    return [*figures, str(stats.nan), str(stats.inf)]


def _as_json(one: Shown, *, stats: bool) -> dict[str, Any]:
    record = one.record
    found = {
        "path": show_path(record.path),
        "segments": list(record.path),
        "kind": record.kind.value,
        "form": record.form,
        "role": record.role.value,
        "dtype": record.spec.dtype,
        "shape": list(record.spec.shape),
        "bytes_raw": one.nbytes,
        "bytes_stored": one.bytes_stored,
        "bytes_borrowed": one.bytes_borrowed,
        "codecs": list(one.codecs),
        "links": one.links,
        "lossless": one.rounding.lossless,
        "same_as": None if record.same_as is None else show_path(record.same_as),
        "derived": None if record.derived is None else show_path(record.derived),
    }
    if record.errors is not None:
        figures = asdict(record.errors).items()
        found["errors"] = {name: figure if isfinite(figure) else None for name, figure in figures}
    if stats:
        found["stats"] = None if one.stats is None else asdict(one.stats)
    return found
