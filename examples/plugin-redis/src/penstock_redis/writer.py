"""A blob being written."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from penstock.core.abc import BlobWriter
from penstock.core.errors import StorageError

from penstock_redis.scripts import ABORT, GROW, SEAL
from penstock_redis.transfer import top_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.core.types import WriteRequest

    from penstock_redis.keys import Entry
    from penstock_redis.server import Server
    from penstock_redis.transfer import Transfer

_ABORT_S = 1.0  # a blob that cannot be removed now stays listed, and is deleted with its save


class RedisWriter(BlobWriter):
    """Sets chunks that no reader knows of; `seal` makes them known in one step."""

    def __init__(
        self,
        server: Server,
        transfer: Transfer,
        place: tuple[str, str],
        entry: Entry,
        refuse: Callable[[str, str, list[bytes]], None],
        sealed: Callable[[str, str, str], None],
    ) -> None:
        self._server = server
        self._transfer = transfer
        self._place = place
        self._entry = entry
        self._refuse = refuse
        self._sealed = sealed
        self._group, self._name = place[0].encode(), place[1]
        self._changed = threading.Condition()  # guards the two below
        self._under_way = 0
        self._finished = False
        self._stop = threading.Event()

    def write(self, requests: Sequence[WriteRequest], /) -> None:
        with self._using("write"):
            blob = self._entry.blob
            word, rest = self._server.answer(
                f"write {self._name}",
                GROW,
                *self._place,
                blob,
                top_of(requests),
                stop=self._stop,
            )
            self._refuse(f"write {self._name}", word, rest or [self._group])
            self._transfer.write(self._name, self._entry, requests, self._stop)

    def seal(self, length: int, /) -> None:
        with self._changed:
            self._check_unfinished("seal")
            self._changed.wait_for(lambda: not self._under_way)
            self._check_unfinished("seal")
            self._finished = True
        what = f"seal {self._name}"
        word, rest = self._server.answer(
            what, SEAL, *self._place, self._entry.blob, length, stop=self._stop
        )
        self._refuse(what, word, rest or [self._group])
        self._sealed(*self._place, self._entry.blob)

    def abort(self) -> None:
        with self._changed:
            self._finished = True
            self._stop.set()
            self._changed.wait_for(lambda: not self._under_way)
        # The script spares a blob that was sealed.
        with suppress(StorageError):
            self._server.answer(
                f"abort {self._name}", ABORT, *self._place, self._entry.blob, total_s=_ABORT_S
            )

    @contextmanager
    def _using(self, what: str) -> Iterator[None]:
        with self._changed:
            self._check_unfinished(what)
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _check_unfinished(self, what: str) -> None:
        if self._finished:
            msg = f"cannot {what} {self._name} on {self._server.url}: it is finished already"
            raise StorageError(msg)
