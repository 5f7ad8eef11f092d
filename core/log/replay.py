"""Replays a log onto a restored base.

Tested in `tests/integration/log/test_replay.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.abc import StateObject, Unit
from penstock.core.catalog.catalog import Catalog
from penstock.core.concurrency.pool import Pool
from penstock.core.errors import DamagedError
from penstock.core.format.strict_json import load_json
from penstock.core.log.archive import EntryBackend
from penstock.core.log.encoding import LAYOUT, OPTIONS, STATE, STEPS
from penstock.core.log.recorder import optimizers_of
from penstock.core.log.recut import recut
from penstock.core.log.replayed import CUT, cut_digest, take_again
from penstock.core.log.steps import (
    NotLoggedError,
    parameters_of,
    set_options,
    storages_of_step,
    with_groups,
)
from penstock.core.pipeline.loader import Loader
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


_OPTIONS = "param_groups", "0", "lr"
"""Where an optimizer has its options: they are restored if this one is selected."""


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
    ) -> float:
        """Take the logged steps again, and restore what no optimizer changes.

        Args:
            state: The state tree, as the base left it.
            logs: The entries since the base of this rank, or of all ranks that logged, by rank.
            rest_of: The rank whose entries have what no optimizer changes.
            selection: What was restored of the base.
            stored: The paths of all objects of the base; only needed if not all are selected.
            moved: Called after each entry.

        Returns:
            The seconds that it took.

        Raises:
            NotLoggedError: A step would not give the same bits; earlier steps were taken.
            StorageError: The store failed; earlier steps were taken.
        """
        began = time.monotonic()
        optimizers = optimizers_of(state, self.registry)
        try:
            opened = {rank: self._open(entries) for rank, entries in logs.items()}
            chosen = None
            if not selection.everything:
                chosen = self._chosen(state, optimizers, selection, stored)
            for logged in self._ahead([*zip(*opened.values(), strict=True)]):
                for steps in zip(*(tree.get(STEPS, ()) for tree in logged), strict=True):
                    self._take(optimizers, steps, chosen)
                for path, options in logged[0].get(OPTIONS, {}).items():
                    if path in optimizers and selection.selects((*parse_path(path), *_OPTIONS)):
                        set_options(optimizers[path], options)
                moved()
            self._restore_rest(state, opened[rest_of], selection)
        except DamagedError as error:  # the checksums of an entry were right, its records are not
            raise NotLoggedError(str(error)) from error
        except BaseException as error:  # Ctrl-C, too
            error.add_note("The state is between two steps now: restore again.")
            raise
        return time.monotonic() - began

    def _chosen(
        self,
        state: Mapping[str, Any],
        optimizers: Mapping[str, Any],
        selection: Selection,
        stored: Collection[ObjectPath],
    ) -> set[int]:
        """Return the ids of the selected parameters.

        Raises:
            NotLoggedError: A part of what a step needs is not selected.
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
                    msg = f"{here} is selected without {there}"
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
        """Return whether this rank has the parts of parameters that an entry has.

        None: neither has parts; every rank has whole parameters.
        """
        (logged,) = next(self._ahead([tuple(self._open([entry]))]))
        there = [step["engine"].get(CUT, "") for step in logged.get(STEPS, ())]
        optimizers = optimizers_of(state, self.registry)
        named = [optimizers.get(step["optimizer"]) for step in logged.get(STEPS, ())]
        here = ["" if o is None else cut_digest([*parameters_of(o)]) for o in named]
        return None if not any((*there, *here)) else there == here

    def _take(
        self,
        optimizers: Mapping[str, Any],
        steps: Sequence[Mapping[str, Any]],
        chosen: set[int] | None,
    ) -> None:
        """Take a step again; `steps` has it as each rank has logged it."""
        step = steps[0]
        optimizer = optimizers.get(step["optimizer"])
        if optimizer is None:
            msg = f"{step['optimizer']}, whose steps are logged, is not in the state"
            raise NotLoggedError(msg)
        replayer = self.registry.replayer(optimizer)
        if replayer is None:
            msg = f"no installed replayer handles {type(optimizer).__name__}"
            raise NotLoggedError(msg)
        if len(steps) > 1:
            step = self._recut(optimizer, replayer, steps)
        take_again(optimizer, replayer, step, chosen)

    def _recut(
        self, optimizer: Any, replayer: Replayer, steps: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return a step for the parts of the parameters that this rank has."""
        engines = [{k: v for k, v in step["engine"].items() if k != CUT} for step in steps]
        groups = [
            {**group, **options}
            for group, options in zip(optimizer.param_groups, steps[0]["options"], strict=False)
        ]
        logged = with_groups(optimizer, groups, vars(optimizer))
        if any(e != engines[0] for e in engines) or replayer.unit(logged) is not Unit.ELEMENT:
            msg = (
                f"the ranks have other parts of the parameters than those that logged, and a step "
                f"of {type(optimizer).__name__} depends on the parts (fused=True does)"
            )
            raise NotLoggedError(msg)
        parameters = [group["params"] for group in optimizer.param_groups]
        step = recut(steps, parameters, self.registry.providers)
        cut = cut_digest([*parameters_of(optimizer)])
        return {**step, "engine": {**engines[0], CUT: cut} if cut else engines[0]}

    def _ahead(self, opened: Sequence[Sequence[Opened]]) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Yield the trees of the entries of each step; a thread reads the next ones meanwhile."""
        selection = Selection([f"{STEPS}/**", f"{OPTIONS}/**"])

        def read(entries: Sequence[Opened]) -> Sequence[Mapping[str, Any]]:
            trees = [build_new(e, selection=selection, device=None)[0] for e in entries]
            for step in (step for tree in trees for step in tree.get(STEPS, ())):
                step[LAYOUT] = load_json(step[LAYOUT].encode(), "the layout of an entry")
            return trees

        pool = Pool(1, "penstock-log", timing=self.workers.timing)
        reads = (pool.submit(partial(read, entries)) for entries in opened)
        following = next(reads, None)
        while following is not None:
            current = following
            following = next(reads, None)
            yield current.result()

    def _restore_rest(
        self, state: Mapping[str, Any], opened: Sequence[Opened], selection: Selection
    ) -> None:
        """Restore the objects that no optimizer changes, each from the last entry that has it."""
        restored: set[ObjectPath] = set()
        for number, entry in enumerate(reversed(opened)):
            # A parameter is in an entry only if it changed.
            paths = [
                record.path
                for record in entry.contents.objects()
                if record.path[0] == STATE
                and len(record.path) > 1
                and (number == 0 or (record.role is Role.PARAMETER and record.path not in restored))
                and selection.selects(record.path[1:])
            ]
            if paths:
                every = number == 0 and selection.everything
                wanted = Selection.subtree((STATE,)) if every else Selection.subtrees(paths)
                self._restore(state, entry, wanted)
            restored |= set(paths)

    def _restore(self, state: Mapping[str, Any], entry: Opened, selection: Selection) -> None:
        tree = {STATE: state}
        report = restore_into(
            entry, tree, selection=selection, rename=Rename(None), strict=False, cast=False,
            overwritten=Overwritten(
                tree, self.registry.providers, allow_pickle=self.config.allow_pickle
            ),
        )  # fmt: skip
        if report.mismatched:
            msg = f"the log has another shape of {report.mismatched[0].path}"
            raise NotLoggedError(msg)

    def _open(self, entries: Sequence[StoredEntry]) -> list[Opened]:
        files: dict[str, tuple[str, int, int]] = {}
        for entry in entries:
            files |= entry.files(self.backend)
        backend = EntryBackend(self.backend, files)
        loader = Loader(backend, self.workers, io_timeout_s=self.config.io_timeout_s)
        allow_pickle = self.config.allow_pickle
        return [
            Opened.open(backend, record, loader, self.registry, allow_pickle=allow_pickle)
            for step in Catalog(backend).steps()
            for record in [Catalog(backend).record(step)]
        ]
