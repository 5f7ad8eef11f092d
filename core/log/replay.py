"""Replays a log onto a restored base.

Tested in `tests/core/log/test_replay.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.log.recorder import OPTIONS, STATE, STEPS, optimizers_of
from penstock.core.log.steps import NotLoggedError, set_options, take_again
from penstock.core.reader import Reader
from penstock.core.reporting.events import EventStream
from penstock.core.storage.time_limited import TimeLimitedBackend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.log.segments import StoredEntry
    from penstock.core.plugins.registry import Registry


@dataclass(frozen=True, slots=True)
class Replayer:
    """Replays entries of a log.

    Attributes:
        backend: The store.
        config: Whether pickles may be loaded, and how long a store may be stuck.
        registry: Finds providers and codecs.
        workers: The threads.
    """

    backend: Backend
    config: CheckpointerConfig
    registry: Registry
    workers: Workers

    def replay(
        self, state: Mapping[str, Any], entries: Sequence[StoredEntry], *, whole: bool
    ) -> float:
        """Take the logged steps again, and restore what no optimizer changes.

        Args:
            state: The state tree, as the base left it.
            entries: The entries since the base.
            whole: Whether all of the base was restored.

        Returns:
            The seconds that it took.

        Raises:
            NotLoggedError: A step would not give the same bits; earlier steps were taken.
        """
        if not whole:
            msg = "only the whole state can be replayed"
            raise NotLoggedError(msg)
        began = time.monotonic()
        optimizers = optimizers_of(state, self.registry)
        for entry in entries:
            reader = self._reader(entry.open(self.backend))
            logged = reader.load(include=[f"{STEPS}/**", f"{OPTIONS}/**"])
            for step in logged.get(STEPS, ()):
                optimizer = optimizers.get(step["optimizer"])
                if optimizer is None:
                    msg = f"{step['optimizer']}, whose steps are logged, is not in the state"
                    raise NotLoggedError(msg)
                take_again(optimizer, step)
            for path, options in logged.get(OPTIONS, {}).items():
                if path in optimizers:
                    set_options(optimizers[path], options)
            report = reader.restore({STATE: state}, include=[f"{STATE}/**"], strict=False)
            if report.mismatched:
                msg = f"the log has another shape of {report.mismatched[0].path}"
                raise NotLoggedError(msg)
        return time.monotonic() - began

    def _reader(self, backend: Backend) -> Reader:
        limited = TimeLimitedBackend(backend, self.workers, self.config.io_timeout_s)
        return Reader(
            limited, config=self.config, registry=self.registry, workers=self.workers,
            events=EventStream(None), drains=None,
        )  # fmt: skip
