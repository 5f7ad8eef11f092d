"""Finds the rank of this process in a torch.distributed job, and the store for agreement.

The store is a clone of the job's own store. A wait on one client of a TCPStore delays all other
calls of that client, and training's calls must not wait for ours. No process group is used:
creating one is collective, and a dead rank breaks it for good.

Tested in `tests/core/ranks/test_coordination.py`, and the places in
`tests/integration/ranks/test_names.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from collections import defaultdict
from concurrent.futures import wait
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.core.abc import (
    Coordination,
    check_blob_name,
    check_coordination_key,
    check_coordination_value,
)
from penstock.core.concurrency.pool import Pool
from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import ConfigError, CoordinationError
from penstock.core.rounds.round import RankPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from typing import TypeVar

    T = TypeVar("T")

# After a call has hung for its whole time limit, later calls wait for this share of theirs.
_HELD_UP_SHARE = 1 / 4
# The n-th instances of all ranks belong together: all ranks run the same program.
_counts: dict[str, Iterator[int]] = defaultdict(itertools.count)


def job_prefix(ranks: Sequence[int] = (), name: str = "") -> str:
    """Return a prefix that is the same for the same call on every rank, and new for each call.

    The prefix holds the number of prefixes that this process has taken. It also holds the number of
    restarts if torchrun's agent hosts the store, which outlives restarts: ranks that sleep through
    a restart must not meet the ranks after it. All ranks must call this in the same order, unless
    they give a name.

    Args:
        ranks: The ranks that agree there, if they are not the whole job.
        name: Replaces the count; each call with this name returns the same prefix.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
        # Each restart then has its own store, and each node counts only its own failures: the
        # numbers of two nodes may differ after the first failure.
        restarts = "0"
    group = "all"
    if ranks:
        group = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    if name:
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:32]
        return f"penstock/{restarts}/{group}/named/{digest}"
    return f"penstock/{restarts}/{group}/{next(_counts[group])}"


class TorchCoordination(Coordination):
    """Stores values as keys of a c10d store: TCPStore, HashStore, FileStore, or a PrefixStore.

    Without torchrun the server of a TCPStore lives in rank 0's process, which must outlive the last
    decision. So rank 0 holds a reference to the store, and closes after it has posted the result
    and the others have had time to read it. If the process dies, all ranks get a CoordinationError
    and look at the root instead.
    """

    def __init__(
        self,
        store: Any = None,
        *,
        prefix: str,
        world_size: int = 1,
        call_s: float = 10.0,
    ) -> None:
        """Clone the store; nothing is sent.

        Args:
            store: The store; None takes the store of the default process group.
            prefix: Names the job within the store, as `job_prefix` does.
            world_size: The number of ranks that use the server; it limits how often each polls.
            call_s: The most seconds for one call.

        Raises:
            ConfigError: The store cannot be used.
        """
        check_blob_name(prefix)
        distributed: Any = import_module("torch.distributed")  # its type hints omit bytes
        if store is None:  # private, but torch's own `new_group` also takes the store this way
            store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
        try:
            self._store = distributed.PrefixStore(prefix, store.clone())
            self._reads_many = self._store.has_extended_api()
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            msg = f"a {type(store).__name__} cannot be cloned ({error}): use a TCPStore"
            raise ConfigError(msg) from error
        self._network_error: type[Exception] = distributed.DistNetworkError
        is_rank_0 = distributed.is_initialized() and distributed.get_rank() == 0
        self._died = "" if is_rank_0 else "rank 0 probably died: "
        self._broken: tuple[Deadline, str] | None = None  # no call before this deadline, and why
        self._late: Future[Any] | None = None  # a call that exceeded its time, and may still hang
        self._original = store  # the server may live in this object
        self._prefix = prefix
        self._call_s = call_s
        self._timing = current_timing()
        self._most_poll_s = max(self._timing.rank_poll_s, world_size * self._timing.rank_share_s)
        # One thread, since a client does one call at a time anyway. The thread never counts as
        # stuck, since a thread in its place would hang, too.
        self._pool = Pool(1, "penstock-ranks")
        self._touched: set[str] = set()  # existing keys; used by the pool's thread alone
        self._closed = False

    @property
    def host(self) -> str | None:
        """The host of the TCPStore; None for a store of another kind."""
        store = self._original
        while (below := getattr(store, "underlying_store", None)) is not None:
            store = below
        host = getattr(store, "host", None)
        return host if isinstance(host, str) else None

    def post(self, key: str, value: bytes, /) -> None:
        """Post as the contract requires."""
        check_coordination_value(key, value)
        data = bytes(value)
        self._call(lambda: self._set(key, data))

    def read(self, keys: Sequence[str], /) -> list[bytes | None]:
        """Read as the contract requires, in one round trip (0.1 s for 10,000 keys on loopback)."""
        for key in keys:
            check_coordination_key(key)
        wanted = list(keys)
        return self._call(lambda: self._read(wanted))

    def decide(self, key: str, value: bytes, /) -> bytes:
        """Decide as the contract requires, by the store's compare-and-set."""
        check_coordination_value(key, value)
        data = bytes(value)
        return self._call(lambda: bytes(self._store.compare_set(key, "", data)))

    def wait(self, key: str, timeout_s: float, /) -> bool:
        """Wait as the contract requires, by polling; the more ranks, the less often.

        Does not use the store's own `wait`: it blocks the client, and the C++ library prints a
        warning at each timeout.
        """
        deadline = Deadline(timeout_s)
        pause_s = self._timing.store_poll_first_s
        while self.read([key])[0] is None:
            if deadline.is_over():
                return False
            time.sleep(min(pause_s, deadline.left_s()))
            pause_s = min(1.5 * pause_s, self._most_poll_s)
        return True

    def close(self) -> None:
        """Close as the contract requires; abandons a call that hangs for the call timeout.

        Waits for a call in flight that long, because a thread that returns from the C++ library
        while the interpreter exits aborts the process.
        """
        self._closed = True
        self._pool.shutdown(wait=False)
        self._pool.join(self._call_s)

    def _set(self, key: str, data: bytes) -> None:
        self._store.set(key, data)
        # A TCPStore does not wait for an answer to `set`. `check` does, and so proves the post.
        self._store.check([key])

    def _read(self, keys: list[str]) -> list[bytes | None]:
        if not self._reads_many:  # a FileStore
            return [bytes(self._store.get(k)) if self._store.check([k]) else None for k in keys]
        # `multi_get` waits for missing keys, and `check` only returns whether all keys exist.
        # Appending nothing makes a missing key empty, atomically, and never harms a value.
        for key in set(keys) - self._touched:
            self._store.append(key, "")
        self._touched.update(keys)
        return [bytes(value) or None for value in self._store.multi_get(keys)] if keys else []

    def _call(self, call: Callable[[], T]) -> T:
        if self._closed:
            msg = "this rank's coordination is closed"
            raise CoordinationError(msg)
        if self._broken is not None and not self._broken[0].is_over():
            raise CoordinationError(self._broken[1])
        # A hanging call delays all later calls, and each would wait for its whole time in turn. So
        # they wait less while it hangs. Once it has ended, calls get their whole time again, since
        # a slow store would otherwise never answer in time.
        if self._late is not None:
            limit_s = self._call_s * _HELD_UP_SHARE
            if wait([self._late], limit_s).not_done:
                raise self._no_answer(limit_s)
        try:
            future = self._pool.submit(call)
        except RuntimeError as error:
            msg = "this rank's coordination was closed during the call"
            raise CoordinationError(msg) from error
        if wait([future], self._call_s).not_done:
            if not future.cancel():
                self._late = future
            raise self._no_answer(self._call_s)
        try:
            return future.result()
        except (RuntimeError, OSError, ValueError) as error:  # DistError is a RuntimeError
            msg = f"the store of the job ({self._prefix}): {error}"
            if isinstance(error, self._network_error):
                msg = f"{self._died}{msg}"
                # Each call on a broken connection prints a stack trace of the C++ library.
                self._broken = Deadline(self._call_s), msg
            raise CoordinationError(msg) from error

    def _no_answer(self, limit_s: float) -> CoordinationError:
        return CoordinationError(
            f"the store of the job ({self._prefix}) did not answer in {limit_s:g} s; is "
            "the process that hosts it alive? Without torchrun that is rank 0's."
        )


def place_in_job(group: Any) -> RankPlace | None:
    """Return the place of this process, without its host; None if it is alone.

    Args:
        group: A process group, or the numbers of ranks in the job; None: the default group.

    Raises:
        ConfigError: This process is not in `group`, or there is no such job.
    """
    # Looked up, not imported: a process that has not imported it has one rank.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        if isinstance(group, tuple) and len(group) > 1:
            raise ConfigError(_remedy(f"group= has {len(group)} ranks"))
        return None
    if isinstance(group, tuple):
        return _place_among(group, distributed.get_rank(), distributed.get_world_size())
    rank: int = distributed.get_rank(group)
    world_size: int = distributed.get_world_size(group)
    if rank < 0:
        msg = (
            "group= is a process group that this process is not in: give each process the group "
            "that it saves with, or ranks='alone' if it saves alone"
        )
        raise ConfigError(msg)
    if world_size < 2:  # noqa: PLR2004 - one rank is alone
        return None
    members = () if group is None else tuple(distributed.get_process_group_ranks(group))
    return RankPlace(rank, world_size, members=members)


def _place_among(members: tuple[int, ...], rank: int, world_size: int) -> RankPlace | None:
    """Return the place of a rank of the job among `members`; None if it is alone there.

    Raises:
        ConfigError: The rank is not a member, or some members are not in the job.
    """
    if members[-1] >= world_size or rank not in members:
        msg = (
            f"group={list(members)} must hold only ranks of this job, and this process, which is "
            f"rank {rank} of {world_size}: give each process the ranks that it saves with, or "
            "ranks='alone' if it saves alone"
        )
        raise ConfigError(msg)
    if len(members) < 2:  # noqa: PLR2004 - one rank is alone
        return None
    return RankPlace(members.index(rank), len(members), members=members)


def initialize() -> None:
    """Join the job that the environment announces, as torchrun does; do nothing if it is joined."""
    distributed: Any = import_module("torch.distributed")
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")


def missing_job() -> str:
    """Return a remedy if the environment announces several ranks but none can be found.

    Empty if it announces none, or if this process can already find them.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return ""
    text = os.environ.get("WORLD_SIZE", "")
    ranks = int(text) if text.isascii() and text.isdigit() else 1
    return _remedy(f"WORLD_SIZE is {ranks}") if ranks > 1 else ""


def _remedy(promise: str) -> str:
    return (
        f"{promise}, and torch.distributed is not initialized, so this rank cannot find the others "
        "to save with: call torch.distributed.init_process_group(...) first, or open the "
        "checkpointer with ranks='alone' and a separate root for each process"
    )
