"""Stops training on the scheduler's request, on all ranks of a job after the same step."""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import signal
import time
from contextlib import ExitStack, suppress
from multiprocessing.util import register_after_fork
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, Self

from penstock.core.concurrency.latch import Latch
from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline, spawn
from penstock.core.errors import ConfigError, CoordinationError
from penstock.core.limits import MAX_INT
from penstock.core.ranks.group import group_of_job
from penstock.core.ranks.torch_job import missing_job
from penstock.core.types import show_value

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType, TracebackType

    from penstock.core.ranks.group import RankGroup

log = logging.getLogger("penstock")

_NOTHING_PASSED = -1
_NEVER = MAX_INT

_ASKED_KEY = "asked"
_STOP_KEY = "stop"


class AgreedStop:
    """Agrees on a step, the stop, once any rank is asked to stop.

    All ranks leave their loops after the first step that follows the stop.

    A separate thread of each rank checks about once per second whether another rank was asked. If
    so, the rank posts the last step that it has passed, and passes no other step until the stop is
    known. The stop is the furthest step that any rank has passed, so no rank is past the stop when
    it learns it. The main threads need not make progress meanwhile.

    The decision is a register of the store that can be set only once. If a rank's loop ends first,
    or if a rank has waited too long, that rank decides that no rank stops.
    """

    def __init__(self, group: RankGroup, asked: SimpleQueue[str | None], *, limit_s: float) -> None:
        """Start the thread.

        Args:
            group: The ranks; closed by `close`.
            asked: The queue of reasons to stop; a signal handler may put one into it.
            limit_s: The most seconds for the ranks to agree.
        """
        self._group = group
        self._asked = asked
        self._limit_s = limit_s
        self._timing = timing = current_timing()
        ask_s = group.place.world_size * timing.preemption_share_s
        self._poll_s = max(timing.preemption_poll_s, ask_s)
        self._lock = Lock()  # guards `_passed` and `_holds`
        self._passed = _NOTHING_PASSED
        self._holds = False
        self._stop = _NEVER
        self._known = Latch()
        self._thread = spawn("preemption", self._run)

    def is_past(self, step: int) -> bool:
        """Return whether `step` is after the stop; waits only after a rank was asked to stop."""
        with self._lock:
            if not self._holds:
                self._passed = step
                return False
        self._known.wait()
        return step > self._stop

    def close(self) -> None:
        """Decide that no rank stops, if nothing is decided yet, and close the group."""
        with suppress(CoordinationError):  # rank 0 may have ended, and the store with it
            self._decide(_NEVER)
        self._asked.put(None)
        self._thread.join()
        self._group.close()

    def _run(self) -> None:
        try:
            if self._listen():
                self._stop = self._agree()
        finally:
            self._known.open()

    def _listen(self) -> bool:
        """Wait until a rank is asked to stop; return False if this object is closed first."""
        store, place, own = self._group.coordination, self._group.place, b""
        while True:
            reason: str | None = ""
            try:
                reason = self._asked.get(timeout=self._poll_s)
            except Empty:
                pass
            else:
                if reason is None:
                    return False
                own = own or f"{reason} on rank {place.rank} on {place.host}".encode()
            try:
                found = store.decide(_ASKED_KEY, own) if own else store.read([_ASKED_KEY])[0]
            except CoordinationError as error:
                if reason:  # logged once; retried after a pause
                    log.warning(
                        "%s, but the other ranks cannot be notified yet: %s", own.decode(), error
                    )
                continue
            if found is not None:
                level = logging.INFO if place.rank else logging.WARNING
                log.log(level, "%s: training must stop", found.decode())
                return True

    def _agree(self) -> int:
        """Return the step of the stop; `_NEVER` if the ranks cannot agree in time."""
        deadline = Deadline(self._limit_s)
        with self._lock:
            self._holds = True
        why = "a rank has ended its loop, or did not answer"
        stop = None
        while stop is None:
            try:
                stop = self._decide(self._furthest(deadline))
            except CoordinationError as error:
                why = str(error)
                stop = _NEVER if deadline.is_over() else None
                time.sleep(self._timing.rank_poll_s)
        if stop == _NEVER:
            log.warning(
                "training continues, since the ranks did not agree on a step to stop after: %s", why
            )
        else:
            self._group.ended(0)  # rank 0 waits for this: the store may be in its process
        return stop

    def _furthest(self, deadline: Deadline) -> int:
        """Post the step that this rank has passed; on rank 0, return the furthest step.

        Other ranks wait for the decision and return `_NEVER`. Rank 0 returns `_NEVER` if a rank
        does not post.
        """
        store, place = self._group.coordination, self._group.place
        store.post(_passed_key(place.rank), b"%d" % self._passed)
        if place.rank:
            store.wait(_STOP_KEY, deadline.left_s())
            return _NEVER
        keys = [_STOP_KEY, *map(_passed_key, range(place.world_size))]
        while not deadline.is_over():
            decided, *passed = store.read(keys)
            known = [int(step) for step in passed if step is not None]
            if len(known) == place.world_size:
                return max(known)
            if decided is not None:
                break
            time.sleep(self._timing.rank_poll_s)
        return _NEVER

    def _decide(self, stop: int) -> int:
        return int(self._group.coordination.decide(_STOP_KEY, b"%d" % stop))


class Preemption:
    """Ends the training loop on all ranks of a job after the same step.

    ```python
    with penstock.Preemption() as leaving:
        for step in range(ckpt.resume(state), steps):
            train_one_step()
            if leaving(step):
                ckpt.save(state, step, mode="blocking")
                break
    ```

    A signal to any rank counts for all. `leaving(step)` only compares two numbers: another thread
    polls the job's store about once per second, and no collective is used. After a signal, one call
    on each rank waits until all ranks have agreed, for about a second.

    Earlier handlers also run, except Python's own for Ctrl-C, and are restored at the end. In a
    forked child, such as a data loader worker, SIGTERM still ends the child, and the other signals
    do nothing. A data loader worker also leaves its rank's process group, because the launcher may
    send SIGTERM to the whole group.
    """

    def __init__(
        self,
        signals: Iterable[str | int] = ("SIGTERM", "SIGUSR1"),
        *,
        deadline_s: float | None = None,
        ranks: Literal["auto", "alone"] = "auto",
    ) -> None:
        """Prepare; no handler is installed yet.

        Args:
            signals: Names or numbers of the signals that request the stop.
            deadline_s: The seconds from the signal to the kill, if known. If the ranks cannot agree
                in this time, they continue training; default: 60.
            ranks: `"auto"`: all ranks of torch.distributed leave together. `"alone"`: this process
                leaves alone, even if there are others.

        Raises:
            ConfigError: A signal is unknown, or an option is wrong.
        """
        self._signals = [_signal(name) for name in signals]
        if ranks not in {"auto", "alone"}:
            msg = f"ranks must be 'auto' or 'alone', not {show_value(ranks)}"
            raise ConfigError(msg)
        if deadline_s is not None and not deadline_s > 0:
            msg = f"deadline_s must be a number of seconds above 0, not {show_value(deadline_s)}"
            raise ConfigError(msg)
        self._alone = ranks == "alone"
        self._limit_s = current_timing().preemption_s if deadline_s is None else deadline_s

    def __enter__(self) -> Self:
        """Install the handlers, and meet the other ranks.

        Raises:
            ConfigError: This is not the main thread; a signal cannot be handled; or there are
                several ranks, and torch.distributed is not initialized.
            CoordinationError: The store of the job does not answer.
        """
        self._asked: SimpleQueue[str | None] = SimpleQueue()  # signal handlers may call its `put`
        self._earlier: dict[int, Any] = {}
        self._passed, self._stop = _NOTHING_PASSED, _NEVER
        self._agreed: AgreedStop | None = None
        self._pid = os.getpid()
        with ExitStack() as undo:
            undo.callback(self._put_back)  # last: a second signal may come while the ranks part
            for number in self._signals:
                self._install(number)
            group = None if self._alone else _ranks_of_job(self._limit_s)
            if group is not None:
                self._agreed = AgreedStop(group, self._asked, limit_s=self._limit_s)
                undo.callback(self._agreed.close)
            register_after_fork(self, _leave_process_group)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pid == os.getpid():
            self._undo.close()

    def __call__(self, step: int) -> bool:
        """Return whether to leave after `step`; all ranks call this and get the same answer.

        Once true, it stays true for all later steps. The answer for a step never changes.

        Args:
            step: The step that this rank has just finished; ascending, the same steps on all ranks.
        """
        if self._agreed is not None:
            return self._agreed.is_past(step)
        if self._stop == _NEVER:
            if self._asked.empty():
                self._passed = step
                return False
            self._stop = self._passed
            log.warning("%s: training must stop", self._asked.get())
        return step > self._stop

    def _install(self, number: signal.Signals) -> None:
        try:
            self._earlier[number] = signal.signal(number, self._receive)
        except (ValueError, OSError) as error:
            msg = (
                f"{number.name} cannot be handled here ({error}): use Preemption in the main "
                "thread, and only with signals that a process may handle"
            )
            raise ConfigError(msg) from error

    def _put_back(self) -> None:
        for number, earlier in self._earlier.items():
            # None: the handler was not installed by Python code, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier.get(number)
        if os.getpid() != self._pid:
            if number == signal.SIGTERM:  # else the parent's `Process.terminate` waits forever
                signal.signal(number, earlier or signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self._asked.put(signal.Signals(number).name)
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)


def _signal(name: str | int) -> signal.Signals:
    try:
        return signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
    except (KeyError, ValueError) as error:
        msg = f"{show_value(name)} is not a signal: use names such as 'SIGTERM'"
        raise ConfigError(msg) from error


def _ranks_of_job(limit_s: float) -> RankGroup | None:
    """Return the job's ranks, which meet under a fixed name; None if this process is alone."""
    if obstacle := missing_job():
        raise ConfigError(obstacle)
    return group_of_job(
        timeout_s=limit_s, name="penstock.Preemption", token=secrets.token_hex(16).encode()
    )


def _leave_process_group(_: Preemption) -> None:
    """Keep signals for a rank's process group from the workers of its data loader.

    SIGTERM ends a worker even if the rank handles it, and torch then raises an error in the rank
    before it can save. Only data loader workers leave the group: they end when their rank is gone.
    """
    target = getattr(multiprocessing.current_process(), "_target", None)
    if getattr(target, "__name__", "") == "_worker_loop":  # of torch, and of torchdata
        os.setpgid(0, 0)


def _passed_key(rank: int) -> str:
    return f"passed/{rank:05d}"
