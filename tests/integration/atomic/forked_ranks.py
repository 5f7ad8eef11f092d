"""The ranks of a job as forked processes, which `rank_jobs` kills, stops and wakes."""

from __future__ import annotations

import os
import random
import threading

import torch.distributed as dist
from tests.integration.atomic.forked_savers import OPTIONS, make
from tests.integration.support import same

from penstock import (
    Checkpointer,
    CheckpointNotFoundError,
    CommitUnknownError,
    CoordinationError,
    PenstockError,
    RankError,
    Shard,
)
from penstock.core.ranks.group import RankGroup
from penstock.core.ranks.torch_job import TorchCoordination

RANK_TIMEOUT_S = 3.0
_CUT = ("raw", "still", "encoded")
_LARGEST_NUMBER = 1 << 24  # float32 holds it exactly


def serve(report):
    """Return the store of a job, hosted in this process, and report its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(report, f"{store.port}\n".encode())
    return store


def serve_forever(report):
    """Host the store of a job, as torchrun's agent does, until killed."""
    store = serve(report)
    threading.Event().wait()
    del store


def reach(port):
    """Return the store of a job that another process hosts."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def shard(state, rank, world_size):
    """A rank's share of the state: some elements of the large tensors, all else whole."""
    found = dict(state)
    for name in _CUT:
        whole = state[name]
        first, last = (len(whole) * n // world_size for n in (rank, rank + 1))
        found[name] = Shard(whole[first:last].clone(), (len(whole),), (first,))
    return found


def held(state):
    """The state with the tensors of shards in their place."""
    return {k: v.tensor if isinstance(v, Shard) else v for k, v in state.items()}


class Rank:
    """One rank of a job: restores and saves in turn, like all others, until one is lost."""

    def __init__(self, url, store, name, *, rank, world_size, seed, say, grace_s):
        self.rank, self.world_size, self.say = rank, world_size, say
        self.chance = random.Random(seed)  # the same on all ranks
        self.step = 0
        member = TorchCoordination(
            store, prefix=name, world_size=world_size, call_s=RANK_TIMEOUT_S / 4
        )
        group = RankGroup(rank, world_size, member, timeout_s=RANK_TIMEOUT_S, host=f"{name}-{rank}")
        options = {**OPTIONS, "grace_s": grace_s, "share": self.chance.random() < 0.5}
        if self.chance.random() < 0.5:
            options["retention"] = {"keep_last": 4, "keep_every": 10}
        self.ckpt = Checkpointer(url, group=group, **options)

    def run(self):
        """Continue until an error reports a lost rank; then end."""
        with self.ckpt:
            self.say("ready", rank=self.rank)
            while True:
                try:
                    if self.step == 0 or self.chance.random() < 0.3:
                        self._restore()
                    self._save()
                except RankError as error:
                    if not error.cause.startswith("failed with"):
                        self.say(
                            "lost", rank=self.rank, named=error.rank, host=error.host,
                            cause=error.cause,
                        )  # fmt: skip
                        return
                    self.say("failed")
                except CoordinationError as error:
                    self.say("lost", rank=self.rank, named=-1, host="", cause=str(error))
                    return
                except CommitUnknownError as error:
                    self.say("unknown", cause=str(error))
                except PenstockError as error:  # its own, posted to the others
                    if "since this one" in str(error):
                        self.say("woken", rank=self.rank)
                        return
                    self.say("own", text=f"{type(error).__name__}: {error}")

    def _restore(self):
        target = shard(make(0), self.rank, self.world_size)
        try:
            report = self.ckpt.restore(target)
        except CheckpointNotFoundError:
            self.say("gone")
            return
        self.step = report.step
        expected = held(shard(make(target["number"]), self.rank, self.world_size))
        if not same(held(target), expected):
            self.say("problem", text=f"a restore is torn, of save {target['number']}")
        self.say("restored")

    def _save(self):
        self.step += self.chance.randint(1, 3)
        number = self.chance.randrange(1, _LARGEST_NUMBER)
        mode = self.chance.choice(["blocking", "async"])
        state = shard(make(number), self.rank, self.world_size)
        self.say("started", step=self.step, number=number)
        handle = self.ckpt.save(state, self.step, mode=mode, metadata={"number": number})
        for name in _CUT:
            state[name].tensor.fill_(-1)  # captured already: the stored state must not see it
        report = handle.result()
        self.say("durable", step=self.step, number=number, uid=report.uid)
