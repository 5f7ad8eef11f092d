"""Replays a log onto a restored base.

Tested in `tests/integration/log/test_replay.py`.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.catalog import Catalog
from penstock.core.log.archive import EntryBackend
from penstock.core.log.recorder import OPTIONS, STATE, STEPS, optimizers_of
from penstock.core.log.replayed import take_again
from penstock.core.log.steps import NotLoggedError, set_options
from penstock.core.pipeline.loader import Loader
from penstock.core.restore.fallback import Overwritten
from penstock.core.restore.fill import Opened
from penstock.core.restore.restore import build_new, restore_into
from penstock.core.tree.select import Rename, Selection
from penstock.core.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.log.segments import StoredEntry
    from penstock.core.plugins.registry import Registry


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
        entries: Sequence[StoredEntry],
        moved: Callable[[], None] = lambda: None,
    ) -> float:
        """Take the logged steps again, and restore what no optimizer changes.

        Args:
            state: The state tree, as the base left it.
            entries: The entries since the base.
            moved: Called after each entry.

        Returns:
            The seconds that it took.

        Raises:
            NotLoggedError: A step would not give the same bits; earlier steps were taken.
            StorageError: The store failed; earlier steps were taken.
        """
        began = time.monotonic()
        optimizers = optimizers_of(state, self.registry)
        opened = self._open(entries)
        try:
            for logged in self._ahead(opened):
                for step in logged.get(STEPS, ()):
                    self._take(optimizers, step)
                for path, options in logged.get(OPTIONS, {}).items():
                    if path in optimizers:
                        set_options(optimizers[path], options)
                moved()
            self._restore_rest(state, opened)
        except BaseException as error:  # Ctrl-C, too
            error.add_note("The state is between two steps now: restore again.")
            raise
        return time.monotonic() - began

    def _take(self, optimizers: Mapping[str, Any], step: Mapping[str, Any]) -> None:
        optimizer = optimizers.get(step["optimizer"])
        if optimizer is None:
            msg = f"{step['optimizer']}, whose steps are logged, is not in the state"
            raise NotLoggedError(msg)
        replayer = self.registry.replayer(optimizer)
        if replayer is None:
            msg = f"no installed replayer handles {type(optimizer).__name__}"
            raise NotLoggedError(msg)
        take_again(optimizer, replayer, step)

    def _ahead(self, opened: Sequence[Opened]) -> Iterator[Mapping[str, Any]]:
        """Yield the steps of each entry; a thread reads the next ones meanwhile."""
        selection = Selection([f"{STEPS}/**", f"{OPTIONS}/**"])

        def read(entry: Opened) -> Mapping[str, Any]:
            tree, _ = build_new(entry, selection=selection, device=None)
            return dict(tree)

        following: Future[Mapping[str, Any]] | None = None
        for number in range(len(opened)):
            current = following or self._spawn(read, opened[number])
            following = None
            if number + 1 < len(opened):
                current.exception()
                following = self._spawn(read, opened[number + 1])
            yield current.result()

    def _spawn(
        self, read: Callable[[Opened], Mapping[str, Any]], entry: Opened
    ) -> Future[Mapping[str, Any]]:
        future: Future[Mapping[str, Any]] = Future()

        def run() -> None:
            try:
                future.set_result(read(entry))
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                future.set_exception(error)

        self.workers.spawn("log", run)
        return future

    def _restore_rest(self, state: Mapping[str, Any], opened: Sequence[Opened]) -> None:
        """Restore the objects that no optimizer changes, each from the last entry that has it."""
        restored = set()
        for number, entry in enumerate(reversed(opened)):
            objects = [
                o for o in entry.contents.objects() if o.path[0] == STATE and len(o.path) > 1
            ]
            if not objects:  # the optimizers change everything
                continue
            if number == 0:
                self._restore(state, entry, Selection([f"{STATE}/**"]))
            else:  # a parameter is in an entry only if it changed
                for record in objects:
                    if record.role is Role.PARAMETER and record.path not in restored:
                        self._restore(state, entry, Selection.subtree(record.path))
            restored |= {record.path for record in objects}

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
