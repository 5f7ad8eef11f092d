"""The `penstock show` command."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.lender_report import find_lenders, records_newest_first
from penstock.core.catalog.notes import NotesOfRun
from penstock.core.cli.app import (
    AsGiven,
    Exclude,
    Include,
    Json,
    Step,
    command,
    is_configuration,
)
from penstock.core.cli.commands.ls import record_json
from penstock.core.cli.job import open_run
from penstock.core.cli.output.figures import (
    Branch,
    Stats,
    Sum,
    grown,
    print_sums,
    tensor_stats,
    total,
    totals,
)
from penstock.core.cli.output.render import (
    Cell,
    Column,
    metadata_text,
    number_text,
    print_json,
    print_line,
    print_table,
    ratio_text,
    value_text,
)
from penstock.core.cli.output.shares import hosts_json, hosts_seen, print_hosts, spreads_of
from penstock.core.errors import DamagedError
from penstock.core.format.records import blob_uid
from penstock.core.log.inventory import LogInfo, log_info, noting
from penstock.core.pipeline.auto import class_of
from penstock.core.reporting.reports import LendingSave
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.restore.specs import Rounding, storage_of
from penstock.core.tree.paths import show_path
from penstock.core.tree.select import Selection
from penstock.core.types import Kind, show_segment
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.catalog.notes import Notes
    from penstock.core.format.records import ChoiceRecord, CommitRecord, Frame, ObjectRecord
    from penstock.core.restore.contents import Contents
    from penstock.core.restore.specs import Storage

GROUPINGS = ("codec", "rule", "role", "dtype")
"""The values of `--by`."""

_CODECS_OF_A_CONTAINER = 2  # the most codecs shown for a container
# In a narrow terminal, columns with the highest numbers stay longest.
_STATS = {"min": 13, "max": 12, "mean": 14, "std": 11, "nan": 16, "inf": 15}
_ERRORS = {"absolute": ("ABS ERROR", 6), "relative": ("REL ERROR", 7)}


@dataclass(frozen=True, slots=True)
class Shown:
    """One object and how it is stored.

    Attributes:
        record: The object's record in the manifest.
        storage: How it is stored.
        links: The greatest number of other frames that decoding one of its frames needs.
        stats: Statistics of its values, if requested and computable.
        rounding: Those of its codecs that are lossy, and those that may be, since they are not
            installed.
    """

    record: ObjectRecord
    storage: Storage
    links: int = 0
    stats: Stats | None = None
    rounding: Rounding = field(default_factory=Rounding)

    @property
    def nbytes(self) -> int:
        """The raw bytes; 0 for a tied object, whose bytes are stored at another path."""
        return 0 if self.record.same_as is not None else self.record.spec.nbytes

    def as_sum(self, group: str = "") -> Sum:
        """Return the figures of this object alone, in a group."""
        return Sum(group, 1, self.nbytes, self.storage.bytes_stored, self.storage.bytes_borrowed)

    @property
    def type(self) -> str:
        """The dtype of a tensor, or the form of another object."""
        return self.record.spec.dtype if self.record.kind is Kind.TENSOR else self.record.form

    @property
    def elsewhere(self) -> str:
        """`tied` or `derived` if all bytes are stored with another object; empty if not."""
        if self.record.same_as is not None:
            return "tied"
        return "" if self.record.derived is None else "derived"


@command("show")
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
            help="Print an indented tree with sums, or one line with the whole path per object.",
            show_default="a tree in a terminal, flat in a pipe",
        ),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Fold the tree below N levels.")
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="Sum objects by `codec`, `rule`, `role` or `dtype`."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the objects of one checkpoint: type, shape, bytes, ratio, codecs, role.

    Reads only the manifest, unless --stats is given. A pattern is a path with `*` (within one
    segment), `**` (any number), `?`, `[..]`; a bare prefix selects everything below it.

    STORED is an object's stored size without the gaps between objects; `penstock ls` includes the
    gaps. RATIO is BYTES over STORED. BORROWED is the data that an object needs from the blobs of
    other checkpoints.

    Examples:
      penstock show runs/gpt --depth 1
      penstock show runs/gpt --step 300
      penstock show runs/gpt --include 'model/*.bias'
      penstock show runs/gpt --by codec
      penstock show runs/gpt --include model --stats |
        grep -v ' 0 *0$'
    """
    if depth is not None and (tree is False or as_json):
        msg = "--depth folds the tree; leave out --flat and --json"
        raise typer.BadParameter(msg)
    if by is not None:
        _check_grouping(url, by, objects=tree is not None or depth is not None or stats)
    selection = Selection(include or None, exclude or None)
    group_of = None if by is None else _grouping(by, url)
    with open_run(url, light=not stats) as backend:
        if step is None:
            step = Catalog(backend).require_latest()
        with noting(backend, Catalog(backend), step):
            checkpoint = Checkpoint.open(backend, step)
        contents = checkpoint.contents
        objects = contents.objects()
        # Before printing: a misspelled pattern would look like an empty checkpoint.
        selection.check_used(one.path for one in objects)
        chosen = [one for one in objects if selection.selects(one.path)]
        shown = [describe(one, contents, checkpoint.rounding([one])) for one in chosen]
        chain = chain_of(backend, contents, chosen)
        classes = {class_of(one.role, one.spec.dtype) for one in chosen}
        choices = [choice for choice in contents.manifest.choices() if choice.objects in classes]
        if stats:
            shown = [replace(s, stats=tensor_stats(checkpoint, s.record)) for s in shown]
        notes = NotesOfRun.of(backend, contents.record).read(contents.record)
        record = contents.record
        logged, log_error = _logged(backend, record.uid)
        hosts = hosts_seen(backend), spreads_of(backend, [record]).get(record.uid)
    sums = [] if group_of is None else totals(one.as_sum(group_of(one)) for one in shown)
    if as_json:
        found: dict[str, Any] = {
            "checkpoint": {"step": record.step, **record_json(record, notes)},
            "chain": [
                {**asdict(link.lender), "frames": link.frames, "bytes_read": link.bytes_read}
                for link in chain
            ],
            "choices": [asdict(choice) for choice in choices],
            "log": None if logged is None else asdict(logged),
        }
        if by is None:
            found["objects"] = [_as_json(one, stats=stats) for one in shown]
        else:
            found |= {"by": by, "groups": [asdict(one) for one in sums]}
        print_json({**found, **hosts_json(*hosts)})
        return
    _print_head(record, notes, chain)
    if by is None:
        as_tree = (depth is not None or sys.stdout.isatty()) if tree is None else tree
        _print_objects(shown, tree=as_tree, depth=depth, stats=stats)
    else:
        print_sums(by.upper(), sums)
    _print_sum(record, shown)
    print_hosts(*hosts)
    _print_rounding(shown)
    _print_choices(choices)
    _print_log(logged, log_error)


def _check_grouping(url: str, by: str, *, objects: bool) -> None:
    """Refuse an unknown grouping, one with options for objects, or `rule` without a config file."""
    msg = ""
    if by not in GROUPINGS:
        msg = f"--by: {by!r} is not one of {', '.join(GROUPINGS)}"
    elif objects:
        msg = "--by prints no objects; leave out --tree, --flat, --depth and --stats"
    elif by == "rule" and not is_configuration(url):
        msg = "--by rule: checkpoints do not store rules; pass a configuration file as URL"
    if msg:
        raise typer.BadParameter(msg)


def _grouping(by: str, rules: str) -> Callable[[Shown], str]:
    """Return the function that names the group of an object."""
    if by == "codec":
        return lambda one: one.elsewhere or "+".join(one.storage.codecs) or "raw"
    if by == "role":
        return lambda one: one.record.role.value
    if by == "dtype":
        return lambda one: one.type
    from penstock.core.config.model import load_config  # noqa: PLC0415 - `show` is quick without

    selections = [
        (Selection(rule.match), ", ".join(rule.match)) for rule in load_config(rules).rules
    ]
    return lambda one: next(
        (name for selection, name in selections if selection.selects(one.record.path)), "no rule"
    )


def describe(record: ObjectRecord, contents: Contents, rounding: Rounding = Rounding()) -> Shown:
    """Return how an object is stored, according to the manifest."""
    links = max((len(list(frame.links())) - 1 for frame in _frames(record)), default=0)
    return Shown(record, storage_of(record, contents), links, rounding=rounding)


def _print_head(record: CommitRecord, notes: Notes, chain: Sequence[Link]) -> None:
    print_line(
        f"step {record.step}, generation {record.generation}, of {record.created}, "
        f"written by penstock {record.penstock} through {record.engine}"
        + (f" on {record.world_size} ranks" if record.world_size > 1 else "")
    )
    if notes.metadata:
        print_line(metadata_text(notes.metadata))
    if notes.tags:
        print_line(f"pinned: {' '.join(notes.tags)}")
    if chain[1:]:
        print_chain(chain, None if record.base is None else record.base.age)
    print_line("")


@dataclass(frozen=True, slots=True)
class _TableLine:
    """A line of the table: an object, or, with `leaf` None, a container of objects."""

    name: str
    objects: Sequence[Shown]
    leaf: Shown | None

    @property
    def sum(self) -> Sum:
        return total("", [one.as_sum() for one in self.objects])


def _print_objects(shown: list[Shown], *, tree: bool, depth: int | None, stats: bool) -> None:
    if tree:
        root = grown((one.record.path, one) for one in shown)
        lines = list(_lines(root, 0, depth))
    else:
        lines = [_TableLine(_name(one, show_path(one.record.path)), [one], one) for one in shown]
    print_table([*_columns(shown, stats=stats)], lines)


def _lines(root: Branch[Shown], level: int, depth: int | None) -> Iterator[_TableLine]:
    """Yield the lines below a branch from the top down; branches at `depth` are folded."""
    for branch in root.below.values():
        name = "  " * level + show_segment(branch.segment)
        # Both: one path may hold an object and be a prefix of longer paths.
        if branch.item is not None:
            yield _TableLine(_name(branch.item, name), [branch.item], branch.item)
        if branch.below:
            yield _TableLine(f"{name}/", list(branch.leaves()), None)
            if depth is None or level + 1 < depth:
                yield from _lines(branch, level + 1, depth)


def _name(one: Shown, name: str) -> str:
    if one.record.same_as is not None:
        name += f" = {show_path(one.record.same_as)}"
    if one.record.derived is not None:
        name += f" derived from {show_path(one.record.derived)}"
    return name


def _columns(shown: Sequence[Shown], *, stats: bool) -> Iterator[Column[_TableLine]]:
    yield Column("PATH", lambda line: line.name, flexible=True)
    yield Column("TYPE", _type_text, keep=9)
    yield Column("SHAPE", _shape_text, keep=8)
    yield Column("BYTES", lambda line: size_text(line.sum.bytes_raw), right=True, keep=9)
    yield Column("STORED", lambda line: size_text(line.sum.bytes_stored), right=True, keep=10)
    yield Column(
        "RATIO",
        lambda line: ratio_text(line.sum.bytes_raw, line.sum.bytes_stored),
        right=True,
        keep=5,
        spare=True,
    )
    yield Column("CODECS", _codecs_of, keep=4, spare=True)
    yield Column(
        "ROLE", lambda line: line.leaf.record.role.value if line.leaf else "", keep=1, spare=True
    )
    if any(one.storage.bytes_borrowed for one in shown):
        yield Column(
            "BORROWED",
            lambda line: size_text(line.sum.bytes_borrowed),
            right=True,
            keep=3,
            spare=True,
        )
    if any(one.links for one in shown):
        yield Column(
            "LINKS",
            lambda line: str(max(one.links for one in line.objects)),
            right=True,
            keep=2,
            spare=True,
        )
    for name, keep in _STATS.items() if stats else ():
        yield Column(name.upper(), partial(_figure_text, name), right=True, keep=keep)
    if any(one.record.errors is not None for one in shown):
        for name, (title, keep) in _ERRORS.items():
            yield Column(title, partial(_figure_text, name), right=True, keep=keep)


def _type_text(line: _TableLine) -> str:
    if line.leaf is None:
        return counted(len(line.objects), "object")
    return line.leaf.type


def _shape_text(line: _TableLine) -> str:
    if line.leaf is None or line.leaf.record.kind is not Kind.TENSOR:
        return ""
    return "x".join(map(str, line.leaf.record.spec.shape))


def _codecs_of(line: _TableLine) -> str:
    """Return an object's codecs; for a container, those with the most bytes, and how many more."""
    if line.leaf is not None:
        return _codecs_text(line.leaf)
    sums = totals(one.as_sum(_codecs_text(one)) for one in line.objects if not one.elsewhere)
    names = [one.group for one in sums]
    more = len(names) - _CODECS_OF_A_CONTAINER
    return ", ".join([*names[:_CODECS_OF_A_CONTAINER], *([f"+{more}"] if more > 0 else [])])


def _figure_text(name: str, line: _TableLine) -> str:
    """Return a figure of an object's statistics or rounding errors."""
    figures = () if line.leaf is None else (line.leaf.stats, line.leaf.record.errors)
    found = (getattr(figure, name) for figure in figures if hasattr(figure, name))
    return next(map(number_text, found), "")


def _print_sum(record: CommitRecord, shown: list[Shown]) -> None:
    whole = total("", [one.as_sum() for one in shown])
    raw, stored = size_text(whole.bytes_raw), size_text(whole.bytes_stored)
    ratio = ratio_text(whole.bytes_raw, whole.bytes_stored)
    text = f"{len(shown)} of {counted(record.objects, 'object')}, {raw}, {stored} stored ({ratio})"
    if whole.bytes_borrowed:
        text += f", {size_text(whole.bytes_borrowed)} borrowed"
    blobs = size_text(record.bytes_stored)
    # `ls` computes the ratio from the size of the blobs, so it prints another ratio.
    if len(shown) == record.objects and blobs != stored:
        ratio = ratio_text(record.bytes_raw, record.bytes_stored)
        text += f"; its blobs take {blobs} ({ratio}), including alignment gaps"
    print_line("")
    print_line(text)


def _print_rounding(shown: list[Shown]) -> None:
    """Print how many objects are rounded, by which codecs, and which codecs may be lossy."""
    rounded = [one for one in shown if one.rounding.lossy]
    if rounded:
        codecs = sorted({name for one in rounded for name in one.rounding.lossy})
        print_line(
            f"{len(rounded)} of these are rounded: lossy codecs "
            f"({', '.join(codecs)}) have changed their values"
        )
    unknown = sorted({name for one in shown for name in one.rounding.unknown})
    if unknown:
        print_line(
            f"{', '.join(unknown)} may be lossy: not installed here, so this is unknown",
            style="yellow",
        )


def _print_choices(choices: Sequence[ChoiceRecord]) -> None:
    for choice in choices:
        print_line(f"chosen for {choice.objects}: {choice.why}")


def _codecs_text(one: Shown) -> str:
    if one.elsewhere:
        return "-"
    lossy, unknown = set(one.rounding.lossy), set(one.rounding.unknown)
    marks = ["(lossy)" if c in lossy else "(?)" if c in unknown else "" for c in one.storage.codecs]
    named = (name + mark for name, mark in zip(one.storage.codecs, marks, strict=True))
    return "+".join(named) or "raw"


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
        "bytes_stored": one.storage.bytes_stored,
        "bytes_borrowed": one.storage.bytes_borrowed,
        "codecs": list(one.storage.codecs),
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


@dataclass(frozen=True, slots=True)
class Link:
    """The frames that a restore of some objects reads from the blobs of one save.

    Attributes:
        lender: The save; the first link of a chain is the checkpoint itself.
        frames: The number of frames.
        bytes_read: The total length of the frames.
    """

    lender: LendingSave
    frames: int
    bytes_read: int


def chain_of(backend: Backend, contents: Contents, chosen: Iterable[ObjectRecord]) -> list[Link]:
    """Return the links that a restore of `chosen` reads, the checkpoint's own first.

    The saves that are nearest to the checkpoint in a chain of frames come next. Reads commit
    records until it finds all these saves; reads none if the checkpoint borrows nothing.
    """
    record = contents.record
    frames: dict[str, dict[tuple[str, int], int]] = defaultdict(dict)
    depths: dict[str, int] = {}
    stored = map(contents.master, map(contents.owner, chosen))
    for one in (part for whole in stored for part in contents.descriptions(whole)):
        blobs = one.head.blobs
        for frame in _frames(one):
            for depth, link in enumerate(frame.links()):
                name = blobs[link.blob].name
                uid = blob_uid(name) or ""
                frames[uid][name, link.offset] = link.length
                depths[uid] = min(depth, depths.get(uid, depth))
    lenders: Mapping[str, LendingSave] = {}
    if record.references:
        lenders = find_lenders(
            records_newest_first(Catalog(backend), record.step), record.references
        )
    own = LendingSave(record.uid, record.step)
    found = sorted(lenders.values(), key=lambda one: (depths.get(one.uid, 0), -(one.step or 0)))
    return [
        Link(one, len(frames[one.uid]), sum(frames[one.uid].values()))
        for one in (own, *(one for one in found if one.uid in depths))
    ]


def print_chain(links: Sequence[Link], age: int | None) -> None:
    """Print the chain of a checkpoint.

    Args:
        links: The links.
        age: How many saves ago the newest checkpoint without a base was made; None if this
            checkpoint has no base.
    """
    total = size_text(sum(link.bytes_read for link in links))
    kind = "it borrows blobs" if age is None else f"{counted(age, 'save')} after one without a base"
    print_line(f"{kind}; a restore reads {total} from {counted(len(links), 'checkpoint')}")
    print_line("")
    columns: tuple[Column[Link], ...] = (
        Column("CHAIN", partial(_lender_cell, first=links[0]), flexible=True),
        Column("READ", lambda link: size_text(link.bytes_read), right=True),
        Column("FRAMES", lambda link: str(link.frames), right=True, keep=2),
        Column("UID", lambda link: link.lender.uid, keep=1),
    )
    print_table(columns, links)


def _lender_cell(link: Link, *, first: Link) -> Cell:
    lender = link.lender
    name = "a deleted step" if lender.step is None else str(lender)
    return Cell(name if link is first else f"  {name}", "" if lender.state == "ok" else "yellow")


def _frames(record: ObjectRecord) -> Iterable[Frame]:
    for shard in record.shards:
        for ref in shard.chunks:
            yield record.frames[ref.frame]


def _logged(backend: Backend, uid: str) -> tuple[LogInfo | None, str]:
    """Return what is stored of a checkpoint's log, or None; and why it is unreadable, if it is."""
    try:
        return log_info(backend, uid), ""
    except DamagedError as error:
        return None, str(error)


def _print_log(logged: LogInfo | None, error: str) -> None:
    if error:
        print_line(f"the log cannot be read: {error}", style="red")
    if logged is None:
        return
    print_line(f"logged: {logged}")
    for path, engine in logged.optimizers.items():
        facts = ", ".join(f"{key} {value_text(value)}" for key, value in engine.items())
        print_line(f"  {path}: {facts}")
