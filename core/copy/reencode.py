"""Copies all or some objects of a checkpoint into a new checkpoint, and encodes them again.

Such a copy is a save that reads its state from another checkpoint. It describes objects, nodes,
ties and roles as stored, and reads their bytes when the save captures them, a chunk at a time. So
a copy needs staging memory, not memory for the whole state, and never imports torch.

Tested in `tests/integration/lifecycle/test_copy.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.abc import Node, StateObject
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.notes import carry_notes
from penstock.core.catalog.retention import clean_up_after
from penstock.core.catalog.survey import last_place
from penstock.core.errors import SelectionError, StepExistsError
from penstock.core.pipeline.codec_chain import CodecChain
from penstock.core.reporting.events import EventStream
from penstock.core.reporting.progress import follow
from penstock.core.restore.earlier import EarlierReader
from penstock.core.restore.stored_source import StoredReader, StoredSource
from penstock.core.save.bases import KeptChunks, SaveBases
from penstock.core.save.job import SaveJob
from penstock.core.save.manifest import ManifestWriter
from penstock.core.save.prepare import plan_state, staging_for
from penstock.core.save.request import Destination, SaveSurroundings
from penstock.core.save.rules import ChainTable
from penstock.core.tree.describe import Description
from penstock.core.tree.stored_tree import PathTree
from penstock.core.types import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.format.records import Chain, NodeRecord, ObjectRecord
    from penstock.core.plugins.registry import Registry
    from penstock.core.reporting.reports import Progress, SaveReport
    from penstock.core.restore.checkpoint import Checkpoint
    from penstock.core.restore.contents import Contents
    from penstock.core.save.request import SaveRequest
    from penstock.core.tree.select import Selection
    from penstock.core.types import ObjectPath, WorstErrors

STAGING_BYTES = 256 << 20
"""The memory for chunks in flight if the configuration does not set `staging_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reencoding:
    """The options of a copy that encodes.

    Attributes:
        config: Rules, sizes of chunks and blocks, staging budget and grace time of the target.
        selection: The objects to copy.
        keep_codecs: Whether to encode every object with the lossless codecs that it is stored with,
            instead of those of the rules.
        overwrite: Whether to replace the target's checkpoint at that step.
        alone: Whether the copy borrows nothing, even if codecs of the rules need a base. With
            `keep_codecs` it never borrows.
        compacts: Whether the copy is a compaction, which replaces the checkpoint.
    """

    config: CheckpointerConfig
    selection: Selection
    keep_codecs: bool = False
    overwrite: bool = False
    alone: bool = False
    compacts: bool = False


def copy_objects(
    checkpoint: Checkpoint,
    target: Backend,
    how: Reencoding,
    *,
    registry: Registry,
    workers: Workers,
    on_progress: Callable[[Progress], None] | None = None,
) -> SaveReport:
    """Save the selected objects of `checkpoint` at `target`, under the same step.

    The copy keeps metadata, roles, kinds of containers and ties. An object that is tied to an
    object outside the selection is stored with its own bytes. A restore of the copy gives the same
    values as a restore of the original with that selection. If a codec of the rules needs a base,
    the base is the target's newest checkpoint of an earlier step, as configured by `deltas`.

    Args:
        checkpoint: The checkpoint to copy; its loader reads it.
        target: The place to copy to; with tiers, the last of them.
        how: The options.
        registry: Finds the codecs.
        workers: The threads that encode and hash.
        on_progress: As for `Checkpointer.save`.

    Raises:
        StepExistsError: The target has a checkpoint at that step, and `how.overwrite` is off.
        SelectionError: A pattern matches nothing, or nothing is selected.
        DamagedError: Stored bytes differ from the written bytes; nothing was committed.
        PenstockError: As for `Checkpointer.save`.
    """
    return save_stored(
        checkpoint,
        last_place(target),
        how,
        generation=_generation(target, checkpoint.step, overwrite=how.overwrite),
        surroundings=_CopyTarget(checkpoint, target),
        registry=registry,
        workers=workers,
        on_progress=on_progress,
    )


def save_stored(
    checkpoint: Checkpoint,
    place: Backend,
    how: Reencoding,
    *,
    generation: int,
    surroundings: SaveSurroundings,
    registry: Registry,
    workers: Workers,
    on_progress: Callable[[Progress], None] | None = None,
) -> SaveReport:
    """Save the selected objects of `checkpoint` as a generation of its step; see `copy_objects`.

    The copy borrows blobs only if a codec of the rules needs a base, and neither `how.keep_codecs`
    nor `how.alone` is set. If the checkpoint was saved with `share`, equal chunks are stored once.

    Args:
        checkpoint: The checkpoint to read.
        place: The place to save to.
        how: The options; `overwrite` is ignored.
        generation: The generation of the new checkpoint.
        surroundings: The run around the save.
        registry: Finds the codecs.
        workers: The threads that encode and hash.
        on_progress: As for `Checkpointer.save`.

    Raises:
        LostRaceError: The step has that generation already.
        PenstockError: As for `copy_objects`; also any error of `surroundings`.
    """
    contents = checkpoint.contents
    reader = StoredReader(checkpoint.opened)
    table = _KeptCodecs(contents, registry) if how.keep_codecs else ChainTable(how.config, registry)
    request = plan_state(
        Description(
            tuple(_entries(contents, how.selection, reader)),
            frozenset(),
            tuple(sorted(contents.record.providers.items())),
        ),
        config=how.config,
        table=table,
        step=checkpoint.step,
        generation=generation,
        mode="blocking",
        share=_is_shared(contents),
        derive=True,  # derived objects stay derived if their master is copied too, losslessly
    )
    reader.read_together(request.plan)
    budget = how.config.staging_bytes
    config = how.config.model_copy(
        update={"staging_bytes": STAGING_BYTES if budget is None else budget}
    )
    job = SaveJob(
        request,
        manifest=ManifestWriter(
            request,
            contents.record.metadata,
            # From the record: the providers of the copied objects need not be installed here.
            shipper=lambda plugin: contents.record.plugins.get(plugin) or registry.shipper(plugin),
            earlier_errors=_errors(contents),
            earlier_choices=contents.manifest.choices() if how.keep_codecs else (),
            compacts=contents.record.uid if how.compacts else "",
        ),
        destination=Destination(place),
        staging=staging_for(request.staging_bytes, None, config, copied_from=request.copied_from),
        workers=workers,
        surroundings=surroundings,
        bases=None if how.keep_codecs or how.alone else _bases(request, how.config, registry),
        log_failure=False,
    )
    return _followed(job, workers, on_progress)


def _bases(request: SaveRequest, config: CheckpointerConfig, registry: Registry) -> SaveBases:
    return SaveBases(
        request.plan,
        request.chains,
        # Never an older generation of the same step: it is deleted once it is replaced.
        step=request.step - 1,
        kept=KeptChunks(),
        earlier=EarlierReader(registry),
        # A copy has no memory for a whole state.
        deltas=config.deltas.model_copy(update={"memory_bytes": 0}),
        share=False,
        block_bytes=request.block_bytes,
    )


class _CopyTarget(SaveSurroundings):
    """Carries notes to a copy, and deletes only the generations that it replaces."""

    def __init__(self, checkpoint: Checkpoint, target: Backend) -> None:
        self._checkpoint = checkpoint
        self._target = target

    def before_commit(self, request: SaveRequest, uid: str) -> None:
        """Carry the notes over, so that the copy has them from its first moment."""
        del request
        source, record = self._checkpoint.backend, self._checkpoint.contents.record
        carry_notes(source, last_place(self._target), record, origin=uid)

    def after_commit(self, request: SaveRequest, report: SaveReport) -> None:
        """Delete the generations that the copy has replaced."""
        del request
        clean_up_after(
            report,
            Catalog(self._target),
            overwrite=report.generation > 0,
            retention=None,
            protect=(),
            events=EventStream(None),
        )


def _generation(target: Backend, step: int, *, overwrite: bool) -> int:
    catalog = Catalog(target)
    if step not in catalog.entries():
        return 0  # unlike a save, a copy may have a step before the target's latest
    if not overwrite:
        msg = (
            f"{target.url} already has a checkpoint at step {step}. Delete it there, or replace it "
            "with `penstock copy --overwrite`."
        )
        raise StepExistsError(msg)
    return catalog.next_generation(step)


def _entries(
    contents: Contents, selection: Selection, reader: StoredReader
) -> Sequence[StateObject | Node]:
    """Return the selected objects and their containers, as if a state tree had been described."""
    everything = contents.objects()
    by_path = {record.path: record for record in everything}
    selection.check_used(by_path)
    chosen = [record for record in everything if selection.selects(record.path)]
    if everything and not chosen:
        msg = f"nothing of step {contents.record.step} is selected"
        raise SelectionError(msg)
    entries: dict[int, StateObject | Node] = {}
    owners: dict[ObjectPath, ObjectPath] = {}  # path of stored bytes -> their first path here
    for record in chosen:
        stored = by_path[record.path if record.same_as is None else record.same_as]
        owner = owners.setdefault(stored.path, record.path)
        entries[record.ordinal] = StateObject(
            path=record.path,
            kind=record.kind,
            spec=record.spec,
            regions=(Region.whole(record.spec.shape),),
            role=record.role,
            form=record.form,
            source=StoredSource(reader, stored),
            same_as=None if owner == record.path else owner,
        )
    needed = _needed(contents.nodes(), by_path, [o.path for o in chosen], selection)
    entries |= {node.ordinal: Node(node.path, node.form, node.meta) for node in needed}
    return [entries[ordinal] for ordinal in sorted(entries)]


def _needed(
    nodes: Sequence[NodeRecord],
    stored: Mapping[ObjectPath, ObjectRecord],
    chosen: Sequence[ObjectPath],
    selection: Selection,
) -> Sequence[NodeRecord]:
    """Return the nodes above the chosen objects, and selected nodes that were empty when saved."""
    selected, known = PathTree(chosen), PathTree(stored)
    return [
        node
        for node in nodes
        if selected.has(node.path)
        or not node.path
        or (not known.has(node.path) and selection.selects(node.path))
    ]


def _errors(contents: Contents) -> dict[ObjectPath, WorstErrors]:
    """Return the errors of all rounded objects, under each of their paths."""
    records = {record.path: record for record in contents.objects()}
    found = {}
    for path, record in records.items():
        stored = record if record.same_as is None else records[record.same_as]
        if stored.errors is not None:
            found[path] = stored.errors
    return found


def _is_shared(contents: Contents) -> bool:
    sections = {id(record.frames): record.frames for record in contents.objects()}
    return any(f.content is not None for frames in sections.values() for f in frames)


class _KeptCodecs(ChainTable):
    """Chooses for every object its stored codecs, not those of the rules.

    Leaves out lossy codecs, since a second encoding would change a tensor again.
    """

    def __init__(self, contents: Contents, registry: Registry) -> None:
        # `ChainTable.__init__` is not called: it reads rules, and there are none here.
        self._numbers_by_path: dict[ObjectPath, int] = {}
        self.auto = None
        self.chooses = True
        self.chains: list[CodecChain | None] = [None]
        known: dict[str, int] = {repr(()): 0}
        by_path = {record.path: record for record in contents.objects()}
        for path, record in by_path.items():
            tied = record.same_as
            chain = _chain_of(contents, record if tied is None else by_path[tied])
            number = known.get(repr(chain))
            if number is None:
                links = [registry.codec_from_record(c.name, c.version, c.config) for c in chain]
                exact = [codec for codec in links if codec.lossless]
                number = known[repr(chain)] = len(self.chains) if exact else 0
                if exact:
                    self.chains.append(CodecChain(exact))
            self._numbers_by_path[path] = number

    def number(self, entry: StateObject, *, exact: bool) -> int:
        del exact
        return self._numbers_by_path[entry.path]

    def is_auto(self, number: int) -> bool:
        """Return False: all chains are known."""
        del number
        return False


def _chain_of(contents: Contents, record: ObjectRecord) -> Chain:
    record = contents.master(record)
    head, frames = record.head, record.frames
    chunks = [chunk for shard in record.shards for chunk in shard.chunks]
    # Codecs may have declined some chunks: the longest chain is the rule's.
    return max((head.chains[frames[chunk.frame].chain] for chunk in chunks), key=len, default=())


def _followed(
    job: SaveJob, workers: Workers, on_progress: Callable[[Progress], None] | None
) -> SaveReport:
    """Run the save to its end; Ctrl-C aborts it."""
    try:
        if on_progress is not None:
            workers.spawn("progress", partial(follow, job.handle, on_progress))
        job.begin_capture()
        job.capture_now()
        job.wait_durable()
    except BaseException as error:
        job.interrupt(error)
        job.finished(None)
        raise
    job.finished(None)
    return job.handle.result()
