"""Ranks as threads that save together, each with its own checkpointer."""

import threading

from tests.integration.support import TINY, checkpointer

from penstock import Checkpointer
from penstock.core.plan.writers import WRITER_BYTES
from penstock.core.ranks.group import RankGroup
from penstock.testing.coordination import MemoryBoard, MemoryCoordination

PATIENCE_S = 300.0
TIMEOUT_S = 60.0
# A wait of half of this, or a quarter, is longer than any test, and so fails it.
LONG_S = 4 * PATIENCE_S + 100.0
# For waits beyond a timeout: still longer than the delays of a busy machine.
SHORT_TIMEOUT_S = 4.0


class Job:
    """The ranks of one job over one store: each thread gets its own checkpointer."""

    def __init__(
        self,
        world_size,
        store,
        host="node{}".format,
        *,
        writer_bytes=WRITER_BYTES,
        timeout_s=TIMEOUT_S,
        **options,
    ):
        self.world_size = world_size
        self._host = host
        self._writer_bytes = writer_bytes
        self._timeout_s = timeout_s
        self.board = MemoryBoard()
        self._store = store
        self._options = {**TINY, **options}

    def group(self, rank, *, coordination=None, **options):
        member = coordination or MemoryCoordination(self.board)
        return RankGroup(
            rank,
            self.world_size,
            member,
            host=self._host(rank),
            writer_bytes=self._writer_bytes,
            **{"timeout_s": self._timeout_s, **options},
        )

    def checkpointer(self, rank, **group):
        store = self._store(rank) if callable(self._store) else self._store
        return Checkpointer(store, group=self.group(rank, **group), **self._options)

    def run(self, work, **group):
        """Return the result, or error, of `work(checkpointer, rank)` on each rank."""
        results = [None] * self.world_size

        def one(rank):
            try:
                with self.checkpointer(rank, **group) as ckpt:
                    results[rank] = work(ckpt, rank)
            except Exception as error:  # noqa: BLE001 - checked by the test
                results[rank] = error

        threads = [threading.Thread(target=one, args=(n,)) for n in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        return results

    def save(self, state_of, step=1, **options):
        """Save `state_of(rank)` on each rank; return the reports, or errors."""
        return self.run(
            lambda ckpt, rank: ckpt.save(state_of(rank), step, **options).result(PATIENCE_S)
        )


def save_steps(store, count, steps, state_of, state_alone, **options):
    """Save steps by this many ranks, or one process; return the stored bytes of each.

    Args:
        store: The root.
        count: The number of ranks.
        steps: The steps.
        state_of: Returns the state of a rank: `state_of(step, rank, count)`.
        state_alone: Returns the state of one process: `state_alone(step)`.
        options: Of the checkpointers.
    """
    if count == 1:
        with checkpointer(store, **options) as ckpt:
            return [
                ckpt.save(state_alone(step), step, mode="blocking").result().bytes_stored
                for step in steps
            ]

    def work(ckpt, rank):
        return [ckpt.save(state_of(step, rank, count), step).result(PATIENCE_S) for step in steps]

    found = Job(count, store, **options).run(work)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return [sum(r.bytes_stored for r in of_step) for of_step in zip(*found, strict=True)]
