"""The delivery of events to sinks, each with its own bounded queue and thread."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from penstock import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock import DeleteEvent, PruneEvent, RestoreEvent, SaveEvent, VerifyEvent

    AnyEvent = SaveEvent | RestoreEvent | VerifyEvent | DeleteEvent | PruneEvent

log = logging.getLogger("penstock")


class Sink(ABC):
    """Takes the events of a checkpointer. All calls come from one thread, in order."""

    @abstractmethod
    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event.

        Args:
            event: The event's `as_dict()`, and `time`, the seconds since 1970 at which it happened.

        Raises:
            Exception: Any error; all are counted, and the first is logged.
        """

    def close(self) -> None:  # noqa: B027 - not every sink holds something
        """Release the sink's resources; called once, after the last event."""


class Sinks:
    """Passes events to sinks, each on its own thread; for `on_event` of a checkpointer.

    A sink that is slow, hangs or raises does not delay a save, training, or another sink: its
    events wait in a queue. If the queue is full, events are dropped and counted, with one warning.
    Queued events hold no tensors, since `as_dict` makes plain data of them.

    Close it after the checkpointer: `with Sinks(...) as sinks, Checkpointer(..., on_event=sinks)`.
    The end of the process closes it too. In a forked child it does nothing.
    """

    def __init__(
        self, *sinks: Sink, capacity: int = 1000, close_s: float = 10.0, every_rank: bool = False
    ) -> None:
        """Start a thread for each sink.

        Args:
            sinks: The sinks.
            capacity: The most events that may wait for each sink.
            close_s: The most seconds that `close` waits for all sinks.
            every_rank: Whether ranks of torch.distributed other than 0 pass events too.

        Raises:
            ConfigError: `capacity` or `close_s` is out of range.
        """
        if capacity < 1 or not close_s >= 0:  # `not >=` also refuses `nan`
            msg = f"Sinks: capacity={capacity} must be at least 1, and close_s={close_s} at least 0"
            raise ConfigError(msg)
        self._close_s = close_s
        self._every_rank = every_rank
        self._pid = os.getpid()
        self._closed = False
        self._lanes = [_Lane(sink, capacity) for sink in sinks]
        # The threads are daemonic, so that a sink that hangs keeps no process alive.
        atexit.register(self.close)

    @property
    def dropped(self) -> tuple[int, ...]:
        """The number of dropped events of each sink: its queue was full, or `close` timed out."""
        return tuple(lane.dropped for lane in self._lanes)

    @property
    def failed(self) -> tuple[int, ...]:
        """The number of events for which each sink raised an error."""
        return tuple(lane.failed for lane in self._lanes)

    def __call__(self, event: AnyEvent) -> None:
        """Queue an event for each sink; returns at once."""
        # In a forked child the threads are gone, and queues may stay locked.
        if self._closed or os.getpid() != self._pid or not (self._every_rank or _is_first_rank()):
            return
        figures = {**event.as_dict(), "time": time.time()}
        for lane in self._lanes:
            lane.offer(figures)

    def close(self, timeout_s: float | None = None) -> None:
        """Pass queued events to the sinks, and close them. Repeated calls do nothing.

        Args:
            timeout_s: The most seconds to wait for all sinks together; default: `close_s`. Events
                that a slow sink has not received by then are dropped.
        """
        atexit.unregister(self.close)
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        deadline = time.monotonic() + (self._close_s if timeout_s is None else timeout_s)
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.join(deadline)

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the sinks."""
        self.close()


class _Lane:
    """The queue and the thread of one sink."""

    def __init__(self, sink: Sink, capacity: int) -> None:
        self._sink = sink
        self._capacity = capacity
        # A signal handler may save while `offer` runs on the same thread: only a SimpleQueue is
        # reentrant. It has no bound.
        self._queue: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._warned = False
        self._abandoned = False
        self.dropped = 0
        self.failed = 0
        name = f"penstock-{type(sink).__name__}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, event: Mapping[str, Any]) -> None:
        if self._queue.qsize() < self._capacity:
            self._queue.put(event)
        else:
            self._drop(1, f"{self._capacity} events wait for it, and more are dropped")

    def end(self) -> None:
        self._queue.put(None)

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._abandoned = True
            left = max(0, self._queue.qsize() - 1)  # without the end mark
            self._drop(left, f"it did not end in time, and {left} waiting events are dropped")

    def _run(self) -> None:
        while (event := self._queue.get()) is not None and not self._abandoned:
            self._try(self._sink.write, event)
        self._try(self._sink.close)

    def _try(self, call: Callable[..., None], *arguments: Mapping[str, Any]) -> None:
        try:
            call(*arguments)
        except Exception:  # noqa: BLE001 - the sink's code: recorded in the log
            self.failed += 1
            if self.failed == 1:
                name = type(self._sink).__name__
                # As text: a handler that keeps records would keep frames and their objects.
                text = traceback.format_exc()
                log.warning("%s raised; its later errors are only counted:\n%s", name, text)

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        if not self._warned:
            self._warned = True
            log.warning("%s is late: %s", type(self._sink).__name__, why)


def _is_first_rank() -> bool:
    """Return whether this is rank 0, or torch.distributed is not in use; imports nothing."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return True
    return bool(distributed.get_rank() == 0)
