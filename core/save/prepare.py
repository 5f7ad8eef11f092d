"""Prepares a save: claims its generation, plans its chunks, reserves its staging memory.

Also finds state that objects of the tree need but that the tree does not contain.

Runs before the save has threads, and stores nothing. Only touching memory may happen in the
background.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.core.abc import StateObject, versions_of
from penstock.core.concurrency.workers import local_ranks
from penstock.core.errors import (
    PenstockError,
    PluginError,
    StepExistsError,
    UnsupportedStateError,
)
from penstock.core.foreign import said
from penstock.core.format.records import commit_name, generation_above
from penstock.core.limits import (
    MAX_INT,
)
from penstock.core.pipeline.staging import Staging, default_budget
from penstock.core.plan.derived import find_masters
from penstock.core.plan.save import LARGEST_BLOCK_BYTES, Capture, PlannedObject, plan_save
from penstock.core.ranks.structure import is_below
from penstock.core.save.request import SaveRequest
from penstock.core.save.rules import without_foreign_rounding
from penstock.core.tree.checks import naming
from penstock.core.tree.select import Selection
from penstock.core.types import PAGE_BYTES, Kind, align_up, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from penstock.core.abc import ByteSource
    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.plan.save import Chunk, SavePlan
    from penstock.core.rounds.round import RankPlace
    from penstock.core.save.pending import Pending
    from penstock.core.save.rules import ChainTable
    from penstock.core.tree.describe import Description
    from penstock.core.tree.known import Known
    from penstock.core.types import ObjectPath


def claim_generation(
    step: int,
    entries: Mapping[int, Sequence[str]],
    *,
    url: str,
    overwrite: bool,
    may_be_deleted: Callable[[str], bool] = lambda _: False,
) -> int:
    """Return the generation that a save of `step` publishes.

    Args:
        step: The step to save.
        entries: The names of commit records by step, ascending. An overwrite needs all names: if
            one is missing, the new generation may be lower and count as older.
        url: The name of the run in messages.
        overwrite: Whether the save may replace a committed step.
        may_be_deleted: Returns whether a deletion that timed out may still delete the record of
            this name. Its generation is skipped, since the deletion could hit the new record.

    Raises:
        StepExistsError: This step or a later one is committed, and `overwrite` is off.
    """
    if overwrite:
        generation = generation_above(entries.get(step, ()))
    else:
        generation = 0
        steps = list(entries)
        if steps and step <= steps[-1]:
            raise _step_exists(step, steps, url)
    while may_be_deleted(commit_name(step, generation)):
        generation += 2  # the odd ones are those of compactions
    if generation > MAX_INT:
        msg = f"step {step} has the highest generation possible: delete the step, and save again"
        raise StepExistsError(msg)
    return generation


def plan_state(  # noqa: PLR0913 - options, each by name
    description: Description,
    *,
    config: CheckpointerConfig,
    table: ChainTable,
    step: int,
    generation: int,
    mode: str,
    share: bool,
    derive: bool,
    place: RankPlace | None = None,
    known: Known | None = None,
) -> SaveRequest:
    """Plan the save of a described tree.

    Args:
        description: The tree.
        config: Sizes, budgets, times.
        table: The codec chains.
        step: The step.
        generation: The generation.
        mode: The mode.
        share: Whether to reuse chunks that are stored already.
        derive: Whether to look for objects that may be derived.
        place: This rank among those that save together; None: this process saves alone.
        known: Results of the last save.

    Raises:
        PluginError: A source cannot return its version.
    """
    defer = Selection(include=config.defer) if config.defer and mode == "lazy" else None
    entries, exact = without_foreign_rounding(description.entries, table)

    def chain_of(entry: StateObject) -> int:
        # A tensor of no dimensions is a number, such as the count of an optimizer's steps.
        single = entry.kind is Kind.VALUE or not entry.spec.shape
        return table.number(entry, exact=single or entry.path in exact)

    described = [entry for entry in entries if type(entry) is StateObject]
    owners = [entry for entry in described if entry.same_as is None]
    for entry in owners if place is None else ():
        if entry.replica is not None and not _is_whole(entry):
            _refuse_piece(entry)
    promised = _promised(owners, defer, description) if defer is not None else frozenset()
    later = promised | description.deferrable if mode == "lazy" else frozenset()
    value, frozen, now, deferred = Kind.VALUE, Capture.FROZEN, Capture.NOW, Capture.DEFERRED
    captures = [
        frozen if entry.kind is value else deferred if entry.path in later else now
        for entry in owners
    ]
    chains = [chain_of(entry) for entry in owners] if table.chooses else [0] * len(owners)
    is_auto = [*map(table.is_auto, chains)] if table.chooses else [False] * len(owners)
    columns = zip(owners, captures, chains, _versions(owners), is_auto, strict=True)
    objects = [*map(PlannedObject._make, columns)]
    masters: Mapping[int, Sequence[int]] = {}
    if derive:
        own_paths = description.own_paths
        masters = find_masters(
            objects,
            is_exact=table.is_exact,
            counts=lambda entry: place is None or _is_alike(entry, own_paths),
        )
    # Ranks share the chunks of data that they all hold, so all must make the same cuts.
    even = share or place is not None
    plan = plan_save(
        objects, chunk_bytes=config.chunk_bytes, masters=masters, even_cuts=even, known=known
    )
    # A part can list a raw frame of another save, shared or as a base, only if both saves have
    # blocks of one size. The fitting size changes when an optimizer's first step creates its state,
    # so a save that refers to others takes the largest size.
    refers = share or any(chain is not None and chain.needs_base for chain in table.chains)
    blocks = LARGEST_BLOCK_BYTES if refers else plan.fitting_block_bytes()
    devices = {planned.entry.source.device for planned in objects}
    return SaveRequest(
        step=step,
        generation=generation,
        mode=mode,
        entries=entries,
        plan=plan,
        chains=table.chains,
        auto=table.auto,
        providers=description.providers_used,
        objects=len(described),
        staging_bytes=_staging_need(plan, blocking=mode == "blocking"),
        copied_from=min((d for d in devices if d.startswith("cuda")), default=None),
        promised=bool(promised),
        share=share,
        block_bytes=config.block_bytes or blocks,
        grace_s=config.grace_s,
        io_timeout_s=config.io_timeout_s,
        rank=0 if place is None else place.rank,
        world_size=1 if place is None else place.world_size,
        own_paths=description.own_paths,
        shared=description.shared,
        rounded=_rounded(objects, table),
    )


def _rounded(objects: Sequence[PlannedObject], table: ChainTable) -> str:
    """Return the first object that a lossy codec rounds, with that codec; empty: there is none."""
    lossy = {
        number: next(codec.name for codec in chain.codecs if not codec.lossless)
        for number, chain in enumerate(table.chains)
        if chain is not None and not chain.lossless
    }
    rounded = (planned for planned in objects if planned.chain in lossy)
    first = next(rounded, None) if lossy else None
    return (
        "" if first is None else f"codec {lossy[first.chain]} rounds {show_path(first.entry.path)}"
    )


def _is_alike(entry: StateObject, own_paths: Sequence[ObjectPath]) -> bool:
    """Return whether all ranks with the same structure hold equal, whole copies of an object."""
    return entry.replica is None and not is_below(entry.path, own_paths)


def state_left_out(description: Description, known: Collection[ObjectPath]) -> Iterator[str]:
    """Yield a sentence for each object of the tree that is not stored completely.

    Args:
        description: The tree.
        known: The paths of objects to ignore.
    """
    unchecked = [seen for seen in description.seen if seen.path not in known]
    if not unchecked or description.scan is None:
        return
    objects = (entry for entry in description.entries if type(entry) is StateObject)
    memories = [piece.memory for entry in objects for piece in entry.source.pieces()]
    # The address 0 means freed memory, for example of an offloaded module.
    stored = {0, *(memory.storage for memory in memories if memory is not None)}
    in_tree = {id(seen.value) for seen in description.seen}
    for child in description.scan.found:
        in_tree.add(id(child.value))
        # FSDP1 stores its parameters from its own copies, which may be other memory.
        with naming(child, "naming its parameters"):
            stored.update(
                _storage(tensor) or 0 for _, tensor in child.provider.parameters(child.value)
            )
    for seen in unchecked:
        with naming(seen, "naming objects that are not stored with it"):
            items = list(seen.provider.left_out(seen.value))
        tensors = [storage for _, item in items if (storage := _storage(item)) is not None]
        count = sum(storage not in stored for storage in tensors)
        shown = show_path(seen.path)
        if count:
            yield (
                f"{shown}: {count} of the tensors that it changes are not stored, since nothing in "
                "the state has their memory (float32 masters of a model in half precision?): put "
                "the module or the tensors themselves into the state, unless copies of them are "
                "in it or in another checkpoint"
            )
        others = [
            f"{shown}.{name} ({type(item).__name__})"
            for name, item in items
            if id(item) not in in_tree and _storage(item) is None
        ]
        if others:
            yield (
                f"{shown} is stored without {', '.join(others)}: put what a resume needs into the "
                "state under its own key"
            )


def most_staging(need_bytes: int, config: CheckpointerConfig) -> int:
    """Return the memory that a save takes if it needs `need_bytes`, within the budget."""
    if config.staging_bytes is None:
        return need_bytes
    return min(need_bytes, _for_two_chunks(config.staging_bytes, config))


def _for_two_chunks(budget: int, config: CheckpointerConfig) -> int:
    """Return a budget for at least two chunks: with one, copying and writing would take turns."""
    return max(budget, 2 * config.chunk_bytes)


def staging_for(
    need_bytes: int,
    reusable: Staging | None,
    config: CheckpointerConfig,
    *,
    copied_from: str | None = None,
) -> Staging:
    """Return staging memory within the budget.

    Args:
        need_bytes: The bytes of all blocks that the next save reserves.
        reusable: The staging memory of earlier saves.
        config: Has the budget.
        copied_from: The CUDA device whose copies write to it, if any do.
    """
    budget = config.staging_bytes
    if budget is None:
        # Blocks that earlier saves left mapped may not fit if tensors have moved within a page.
        # With one block too few, training would wait for the store.
        budget = need_bytes + 2 * config.chunk_bytes
        # Take less if less is free. Finding that out takes half a millisecond, so not every time.
        if reusable is None or reusable.budget_bytes < budget:
            budget = default_budget(budget, local_ranks())
    budget = _for_two_chunks(budget, config)
    staging = reusable or Staging(budget)
    staging.budget_bytes = max(staging.budget_bytes, budget)
    largest = min(need_bytes, config.chunk_bytes)
    staging.expect(need_bytes, largest_bytes=largest, copied_from=copied_from)
    return staging


class KeptStaging:
    """Keeps the staging memory that the saves of a checkpointer use in turn.

    Args:
        config: Has the budget of the memory.
        workers: Starts the thread that touches the memory.
        pending: Knows whether the newest save has released the memory. A stuck disk may still read
            it, or write to it.
    """

    def __init__(self, config: CheckpointerConfig, workers: Workers, pending: Pending) -> None:
        self.staging: Staging | None = None
        """The memory of the newest save, or of the next."""
        self._config = config
        self._workers = workers
        self._pending = pending
        self._lock = threading.Lock()  # guards `staging`, `_saves` and `_closed`
        self._saves = 0  # saves that have got memory
        self._closed = False

    def get(self, request: SaveRequest, *, skip: Collection[int]) -> Staging:
        """Return the memory for a save, and begin to touch what the save will copy to.

        Args:
            request: The save.
            skip: The chunks that are not captured, since other ranks write them.
        """
        with self._lock:
            self._saves += 1
            staging = self._get(request.staging_bytes, request.copied_from)
        if request.mode != "blocking":
            chunks = request.plan.chunks
            staging.touch(request.staging_bytes - sum(_room_for(chunks[n]) for n in skip))
        return staging

    def touch(self, need_bytes: int, *, copied_from: str | None = None) -> None:
        """Get memory for the next save and touch it, in the background.

        Args:
            need_bytes: The bytes of all blocks that the save reserves.
            copied_from: The CUDA device whose copies write to it, if any do.
        """
        saves = self._saves

        def touch() -> None:
            with self._lock:
                # A save that has begun meanwhile owns its memory, though it is not pending yet
                # while it prepares.
                is_free = self._pending.released and self._saves == saves
                if is_free and not self._closed:
                    self._get(need_bytes, copied_from).touch()

        # Not in this thread: a signal handler that interrupts it and saves would wait for the lock
        # forever.
        self._workers.spawn("prepare", touch)

    def close(self) -> None:
        """Give the memory back, unless a stuck store may still use it."""
        with self._lock:
            self._closed = True
            if self.staging is not None and self._pending.released:
                self.staging.close()

    def _get(self, need_bytes: int, copied_from: str | None) -> Staging:
        reusable = self.staging if self._pending.released else None
        staging = staging_for(need_bytes, reusable, self._config, copied_from=copied_from)
        if staging is not self.staging:
            self.staging = staging
            # Without `close`, the memory is freed with the checkpointer, even if the user keeps
            # the handle of its last save, which keeps the staging object.
            weakref.finalize(self, staging.close).atexit = False
        return staging


def _step_exists(step: int, steps: Sequence[int], url: str) -> StepExistsError:
    problem = "exists" if step in steps else f"is before the latest step {steps[-1]}"
    older = [s for s in steps if s < step]
    way = (
        f"to continue from an earlier step, first call rewind({older[-1]}), which deletes all "
        "later steps"
        if older
        else f"to start again, first delete step {steps[0]} and all later ones"
    )
    return StepExistsError(
        f"step {step} on {url} {problem}. To continue from the latest step, call resume(state); "
        f"to save this step anyway, pass overwrite=True; {way}. If another training saves here, "
        "give each its own root."
    )


def _is_whole(entry: StateObject) -> bool:
    return entry.source.nbytes == entry.spec.nbytes and len(entry.regions) <= 1


def _refuse_piece(entry: StateObject) -> NoReturn:
    msg = (
        f"{show_path(entry.path)} is a piece of a tensor of shape {list(entry.spec.shape)}, and "
        "this process saves alone: save with all ranks that hold pieces, or save the whole tensor"
    )
    raise UnsupportedStateError(msg)


def _versions(objects: Sequence[StateObject]) -> list[int | None]:
    try:
        return versions_of([entry.source for entry in objects])
    except PenstockError:
        raise
    except Exception:  # noqa: BLE001 - tried again one by one, to name the object
        return [_version(entry) for entry in objects]


def _version(entry: StateObject) -> int | None:
    try:
        return entry.source.version()
    except PenstockError:
        raise
    except Exception as error:
        msg = f"{show_path(entry.path)}: its source cannot return its version: {said(error)}"
        raise PluginError(msg) from error


def _promised(
    objects: Iterable[StateObject], defer: Selection, description: Description
) -> frozenset[ObjectPath]:
    """Return the paths of tensors that are deferred only at the user's request."""
    unclaimed = [entry for entry in objects if entry.path not in description.deferrable]
    return frozenset(
        entry.path
        for entry in unclaimed
        if entry.kind is not Kind.VALUE
        and entry.source.memory is not None
        and defer.selects(entry.path)
    )


def _staging_need(plan: SavePlan, *, blocking: bool) -> int:
    total = 0
    for chunk in plan.chunks:
        source = plan.objects[chunk.pieces[0].item].entry.source
        if blocking and not chunk.slab and source.address is not None and _steady(source):
            continue  # lent to the writer, not copied
        total += _room_for(chunk)
    return total


def _room_for(chunk: Chunk) -> int:
    return align_up(chunk.phase + chunk.length, PAGE_BYTES)


def _steady(source: ByteSource) -> bool:
    try:
        return source.steady()
    except Exception:  # noqa: BLE001 - the capture calls it again, and names the source
        return False


def _storage(item: Any) -> int | None:
    """Return the address of a tensor's memory, 0 if it wraps others, None if not a tensor."""
    try:
        return int(item.untyped_storage().data_ptr())
    except AttributeError:
        return None
    except (RuntimeError, NotImplementedError):
        return 0
