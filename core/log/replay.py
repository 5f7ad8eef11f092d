"""Replays a log onto a restored base.

Tested in `tests/integration/log/test_replay.py`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.abc import StateObject, Unit
from penstock.core.concurrency.pool import Pool
from penstock.core.errors import BlobNotFoundError, DamagedError, RestoreMismatchError
from penstock.core.format.commit_record import decode_commit
from penstock.core.format.records import commit_name
from penstock.core.format.strict_json import load_json
from penstock.core.limits import RECORD_LIMIT_BYTES
from penstock.core.log.archive import EntryBackend, EntryLoader
from penstock.core.log.encoding import LAYOUT, OPTIONS, STATE, STEPS
from penstock.core.log.grads import NotLoggedError
from penstock.core.log.recorder import optimizers_of
from penstock.core.log.recut import recut
from penstock.core.log.replayed import CUT, cut_digest, take_again
from penstock.core.log.steps import (
    parameters_of,
    set_options,
    storages_of_step,
    with_groups,
)
from penstock.core.pipeline.staging import ThreadMemory
from penstock.core.restore.fallback import Overwritten
from penstock.core.restore.fill import Opened
from penstock.core.restore.restore import build_new, restore_into
from penstock.core.tree.describe import describe_tree
from penstock.core.tree.paths import parse_path, show_path
from penstock.core.tree.select import Rename, Selection
from penstock.core.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend, Replayer
    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.log.segments import StoredEntry
    from penstock.core.plugins.registry import Registry
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")

_OPTIONS = "param_groups", "0", "lr"
"""A path below an optimizer. If it is selected, all options of the optimizer are restored."""


_AHEAD = 2  # steps whose entries are read ahead: decoding takes longer than most steps


class _DamagedEntryError(NotLoggedError):
    """The bytes of an entry differ from the written bytes."""


class _ReplayedEntry(NamedTuple):
    """The parts of an entry that a replay needs.

    `tree` has the steps and options. `parameters` has the paths of the parameters that the entry
    stores.
    """

    tree: Mapping[str, Any]
    parameters: Collection[ObjectPath]


@dataclass(frozen=True, slots=True)
class LogReplay:
    """Replays entries of a log.

    Attributes:
        backend: The store.
        config: Whether pickles may be loaded, and how long a store may be stuck.
        registry: Finds providers, codecs and replayers.
        workers: The threads.
    """

    backend: Backend
    config: CheckpointerConfig
    registry: Registry
    workers: Workers

    def replay(
        self,
        state: Mapping[str, Any],
        logs: Mapping[int, Sequence[StoredEntry]],
        *,
        rest_of: int,
        selection: Selection,
        stored: Collection[ObjectPath] = (),
        moved: Callable[[], None] = lambda: None,
        ends_at_damage: bool = False,
    ) -> tuple[float, int]:
        """Take the logged steps again, and restore the state that no optimizer changes.

        Args:
            state: The state tree, with the base restored into it.
            logs: The entries that follow the base, by rank: this rank's, or those of all ranks that
                logged.
            rest_of: The rank whose entries supply the state that no optimizer changes.
            selection: The objects that were restored from the base.
            stored: The paths of all objects of the base; only needed if not all are selected.
            moved: Called after each entry.
            ends_at_damage: Whether the replay stops before a damaged entry. Otherwise a damaged
                entry is an error.

        Returns:
            The duration in seconds, and the number of steps that were replayed.

        Raises:
            NotLoggedError: A step would not give the same bits; earlier steps were taken.
            StorageError: The store failed; earlier steps were taken.
        """
        began = time.monotonic()
        optimizers = optimizers_of(state, self.registry)
        try:
            chosen = None
            if not selection.everything:
                chosen = self._chosen(state, optimizers, selection, stored)
            place = [*logs].index(rest_of)
            rest: list[tuple[StoredEntry, Collection[ObjectPath]]] = []
            try:
                for logged in self._ahead([*zip(*logs.values(), strict=True)]):
                    trees = [entry.tree for entry in logged]
                    for steps in zip(*(tree.get(STEPS, ()) for tree in trees), strict=True):
                        self._take(optimizers, steps, chosen)
                    for path, options in trees[0].get(OPTIONS, {}).items():
                        if path in optimizers and selection.selects((*parse_path(path), *_OPTIONS)):
                            set_options(optimizers[path], options)
                    rest.append((logs[rest_of][len(rest)], logged[place].parameters))
                    moved()
            except _DamagedEntryError as error:
                if not ends_at_damage:
                    raise
                log.warning("the log %s", str(error))
            self._restore_rest(state, rest, selection)
        except (DamagedError, RestoreMismatchError) as error:
            # The entry matches its checksum. But its records are wrong, or an object has another
            # kind than in the checkpoint, or is logged in part.
            raise NotLoggedError(str(error)) from error
        except BaseException as error:  # Ctrl-C, too
            error.add_note("The state is between two steps now: restore again.")
            raise
        return time.monotonic() - began, len(rest)

    def _chosen(
        self,
        state: Mapping[str, Any],
        optimizers: Mapping[str, Any],
        selection: Selection,
        stored: Collection[ObjectPath],
    ) -> set[int]:
        """Return the ids of the selected parameters.

        Raises:
            NotLoggedError: The selection splits memory that one step changes: a parameter without
                its optimizer state, or some parameters of an optimizer that steps all together.
        """
        description = describe_tree(
            state, providers=self.registry.providers, allow_pickle=self.config.allow_pickle
        )
        paths: dict[bool, dict[int, ObjectPath]] = {True: {}, False: {}}
        for entry in description.entries:
            if isinstance(entry, StateObject) and entry.source.memory is not None:
                paths[selection.selects(entry.path)][entry.source.memory.storage] = entry.path
        chosen = set()
        for path, optimizer in optimizers.items():
            parameters = [*parameters_of(optimizer)]
            states = *parse_path(path), "state"
            has_state = any(p[: len(states)] == states for p in stored)
            for parameter in parameters:
                memory = storages_of_step(optimizer, parameter)
                inside, outside = (memory & paths[flag].keys() for flag in (True, False))
                unequal = has_state and not optimizer.state.get(parameter)
                if inside and (outside or unequal):
                    here = show_path(paths[True][min(inside)])
                    there = show_path(paths[False][min(outside)] if outside else states)
                    msg = f"{here} is selected without {there}, but one step changes both"
                    raise NotLoggedError(msg)
                if inside:
                    chosen.add(id(parameter))
            some = [id(parameter) in chosen for parameter in parameters]
            replayer = self.registry.replayer(optimizer)
            alone = replayer is not None and replayer.unit(optimizer) is not Unit.OPTIMIZER
            if any(some) and not all(some) and not alone:
                msg = f"{path} steps all its parameters together, and only some are selected"
                raise NotLoggedError(msg)
        return chosen

    def is_cut_as(self, state: Mapping[str, Any], entry: StoredEntry) -> bool | None:
        """Return whether this rank holds the same parts of the parameters as the entry.

        Returns None if there are no parts, because every rank holds whole parameters.
        """
        ((logged,),) = self._ahead([(entry,)])
        steps = logged.tree.get(STEPS, ())
        there = [step["engine"].get(CUT, "") for step in steps]
        optimizers = optimizers_of(state, self.registry)
        named = [optimizers.get(step["optimizer"]) for step in steps]
        here = ["" if o is None else cut_digest([*parameters_of(o)]) for o in named]
        return None if not any((*there, *here)) else there == here

    def _take(
        self,
        optimizers: Mapping[str, Any],
        steps: Sequence[Mapping[str, Any]],
        chosen: set[int] | None,
    ) -> None:
        """Take one step again, given that step as each rank has logged it."""
        step = steps[0]
        optimizer = optimizers.get(step["optimizer"])
        if optimizer is None:
            msg = f"{step['optimizer']}, whose steps are logged, is not in the state"
            raise NotLoggedError(msg)
        replayer = self.registry.replayer(optimizer)
        if replayer is None:
            msg = f"no installed replayer handles {type(optimizer).__name__}"
            raise NotLoggedError(msg)
        cut = cut_digest([*parameters_of(optimizer)])
        if len(steps) > 1 or step["engine"].get(CUT, "") != cut:
            step = self._recut(optimizer, replayer, steps, cut)
        take_again(optimizer, replayer, step, chosen)

    def _recut(
        self, optimizer: Any, replayer: Replayer, steps: Sequence[Mapping[str, Any]], cut: str
    ) -> Mapping[str, Any]:
        """Return a step that is cut for the parts of the parameters that this rank holds."""
        engines = [{k: v for k, v in step["engine"].items() if k != CUT} for step in steps]
        groups = [
            {**group, **options}
            for group, options in zip(optimizer.param_groups, steps[0]["options"], strict=False)
        ]
        logged = with_groups(optimizer, groups, vars(optimizer))
        kind = type(optimizer).__name__
        if any(engine != engines[0] for engine in engines):
            msg = f"the ranks that wrote the log did not all step {kind} in the same way: {engines}"
            raise NotLoggedError(msg)
        if replayer.unit(logged) is not Unit.ELEMENT:
            msg = (
                f"the log was written with different shards of the parameters, and steps of {kind} "
                "can be repeated only with the same shards; unfused steps of most optimizers can "
                "be repeated with any"
            )
            raise NotLoggedError(msg)
        parameters = [group["params"] for group in optimizer.param_groups]
        step = recut(steps, parameters, self.registry.providers)
        return {**step, "engine": {**engines[0], CUT: cut} if cut else engines[0]}

    def _ahead(
        self, entries: Sequence[Sequence[StoredEntry]]
    ) -> Iterator[Sequence[_ReplayedEntry]]:
        """Yield the entries of each step, while threads read those of the next steps.

        Raises:
            NotLoggedError: An entry is damaged.
        """
        memory = ThreadMemory(max(map(len, entries), default=0))

        def read(of_ranks: Sequence[StoredEntry]) -> Sequence[_ReplayedEntry]:
            return [self._read(entry, memory, which) for which, entry in enumerate(of_ranks)]

        pool = Pool(_AHEAD, "penstock-log", timing=self.workers.timing)
        reads = (pool.submit(partial(read, of_ranks)) for of_ranks in entries)
        following = deque(islice(reads, _AHEAD))
        while following:
            current = following.popleft()
            following += islice(reads, 1)
            yield current.result()

    def _read(self, entry: StoredEntry, memory: ThreadMemory, which: int) -> _ReplayedEntry:
        opened = self._open(entry, memory, which)
        records = opened.contents.objects()  # all at once: else `build_new` reads a part again
        parameters = {r.path for r in records if r.path[0] == STATE and r.role is Role.PARAMETER}
        selection = Selection([f"{STEPS}/**", f"{OPTIONS}/**"])
        tree = build_new(opened, selection=selection, device=None)[0]
        for step in tree.get(STEPS, ()):
            step[LAYOUT] = load_json(str(step[LAYOUT]).encode(), "the layout of an entry")
        return _ReplayedEntry(tree, parameters)

    def _restore_rest(
        self,
        state: Mapping[str, Any],
        entries: Sequence[tuple[StoredEntry, Collection[ObjectPath]]],
        selection: Selection,
    ) -> None:
        """Restore objects that no optimizer changes, each from the last entry that stores it."""
        restored: set[ObjectPath] = set()
        for number, (entry, parameters) in enumerate(reversed(entries)):
            if number and restored.issuperset(parameters):
                continue
            opened = self._open(entry, ThreadMemory(), 0)
            # An entry stores a parameter only if it changed, so earlier entries may be needed.
            paths = [
                record.path
                for record in opened.contents.objects()
                if record.path[0] == STATE
                and len(record.path) > 1
                and (number == 0 or (record.role is Role.PARAMETER and record.path not in restored))
                and selection.selects(record.path[1:])
            ]
            if paths:
                every = number == 0 and selection.everything
                wanted = Selection.subtree((STATE,)) if every else Selection.subtrees(paths)
                self._restore(state, opened, wanted)
            restored |= {*paths, *parameters}

    def _restore(self, state: Mapping[str, Any], entry: Opened, selection: Selection) -> None:
        tree = {STATE: state}
        report = restore_into(
            entry, tree, selection=selection, rename=Rename(None), strict=False, cast=False,
            overwritten=Overwritten(
                tree, self.registry.providers, allow_pickle=self.config.allow_pickle
            ),
        )  # fmt: skip
        if report.mismatched:
            msg = f"the log has another shape for {report.mismatched[0].path} than the template"
            raise NotLoggedError(msg)

    def _open(self, entry: StoredEntry, memory: ThreadMemory, which: int) -> Opened:
        """Read an entry, compare it with its checksum, and open it.

        Raises:
            NotLoggedError: The entry is damaged.
        """
        payload = memory.take(entry.header.payload_bytes, which)
        if not entry.is_whole(self.backend, payload):
            raise _DamagedEntryError(entry.damage(self.backend))
        backend = EntryBackend(self.backend, entry, payload)
        name = commit_name(entry.header.step, 0)
        try:
            data = backend.read_record(name, limit_bytes=RECORD_LIMIT_BYTES)
        except BlobNotFoundError as error:
            raise DamagedError(str(error), [entry.segment]) from error
        return Opened.open(
            backend,
            decode_commit(data, name),
            EntryLoader(backend, self.workers),
            self.registry,
            allow_pickle=self.config.allow_pickle,
        )
