"""The bytes that one save has in flight: layouts are chosen for this number."""

import errno
import threading

import torch
from tests.backends.lustre.test_backend import layout_of

import penstock
from penstock.backends.local.threads import ThreadEngine
from penstock.backends.lustre import LustreBackend
from penstock.backends.lustre.policy import Demand

MIB = 1 << 20


class Gathering(LustreBackend):
    """Threads that begin only when `most` requests were in flight at once, and write nothing."""

    most = 0
    flying_bytes = 0
    flying = 0
    highest_bytes = 0

    def _open_engine(self):
        self.gate = threading.Condition()
        self.opened = False
        return ThreadEngine(self._parallel, writev=self._write)

    def _write(self, fd, views, offset):
        length = sum(view.nbytes for view in views)
        with self.gate:
            self.flying += 1
            self.flying_bytes += length
            self.highest_bytes = max(self.highest_bytes, self.flying_bytes)
            if self.flying == self.most:
                self.opened = True
                self.gate.notify_all()
            if not self.gate.wait_for(lambda: self.opened, 30):
                raise OSError(errno.ETIME, f"only {self.flying} requests came")
            self.flying -= 1
            self.flying_bytes -= length
        return length


def save(backend, size_bytes):
    """Writes begin when all is captured, so that every batch is whole."""
    state = {"weight": torch.ones(size_bytes, dtype=torch.uint8)}
    with penstock.Checkpointer(backend, retention=None, staging_bytes=2 * size_bytes) as ckpt:
        return ckpt.save(state, 1, mode="async").result()


def blob(tmp_path):
    (found,) = (tmp_path / "root").glob("data/*/blobs/*.raw")
    return layout_of(found)[0]


def test_a_lone_rank_has_a_short_request_in_flight_for_every_lane(open_lustre, lfs, tmp_path):
    lfs.set(osts=[{"index": n, "free_kib": 1 << 30} for n in range(96)])
    backend = open_lustre(cls=Gathering)
    assert backend.capabilities.preferred_parallel == Demand(0).in_flight == 64
    backend.most = 64
    save(backend, 384 * MIB)
    layout = blob(tmp_path)
    assert (layout.stripe_count, layout.stripe_bytes) == (6, 4 * MIB)
    assert backend.highest_bytes <= Demand(0).in_flight_bytes
