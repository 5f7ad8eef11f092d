"""Opens the run of a command; as one of several ranks, with the roots of all hosts.

Under torchrun, every rank starts the same command. Rank 0 runs it. The other ranks serve their
roots until rank 0 ends, print nothing, and exit with the code of rank 0.

Tested in `tests/core/cli/test_hosts.py`.
"""

from __future__ import annotations

import json
import os
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from penstock.core.abc import host_roots
from penstock.core.cli.app import backend_of, is_configuration
from penstock.core.cli.output.shares import hosts_seen
from penstock.core.errors import CoordinationError, PenstockError, StorageError
from penstock.core.foreign import said
from penstock.core.storage.open import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.abc import Backend
    from penstock.core.hosts.joining import RootsOfJob
    from penstock.core.ranks.group import RankGroup

_END_KEY = "command/end"
_ANSWER_KEY = "command/{:05d}"

_joined: list[_Job] = []  # at most one: a process runs one command


@contextmanager
def open_run(
    url: str,
    *,
    light: bool = True,
    must_exist: bool = True,
    at_each_host: Callable[[Backend], Any] = lambda _: None,
) -> Iterator[Backend]:
    """Open a run.

    In a job of several ranks, joins the roots of all hosts if the run has any. Then only rank 0
    gets the run.

    Args:
        url: A path, a URL, or a configuration file.
        light: As for `open_backend`.
        must_exist: As for `open_backend`.
        at_each_host: Called with the run on each rank; `answers` returns the results, which are
            written as JSON.

    Raises:
        typer.Exit: On ranks other than 0, after rank 0 has ended.
        PenstockError: The run cannot be opened, or a rank did not join.
    """
    with (
        closing(open_backend(backend_of(url), must_exist=must_exist, light=light)) as backend,
        joined(url, backend, at_each_host),
    ):
        yield backend


@contextmanager
def joined(
    url: str, backend: Backend, at_each_host: Callable[[Backend], Any] = lambda _: None
) -> Iterator[None]:
    """Join the roots of all hosts of an open run, as `open_run` does."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and host_roots(backend):
        job = _Job(url, backend, partial(at_each_host, backend))
        _joined.append(job)
        if job.rank:
            raise typer.Exit(job.follow())
    try:
        yield
    except PenstockError as error:  # often because files are on hosts that are not shown
        with suppress(PenstockError):
            seen = hosts_seen(backend)
            if seen is not None and (note := seen.note()):
                error.add_note(note)
        raise


def answers() -> list[tuple[str, int, Any]]:
    """Wait for each rank; return its host, its number, and the result of `at_each_host`.

    Returns nothing in a process that is the only rank.

    Raises:
        StorageError: It has failed there.
        CoordinationError: The store of the job cannot be reached.
    """
    return _joined[0].answers() if _joined else []


@contextmanager
def ending_job() -> Iterator[None]:
    """End the job that the command has joined, if any, with the exit code of the command."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    finally:
        while _joined:
            _joined.pop().end(code)


class _Job:
    """The ranks that run one command."""

    def __init__(self, url: str, backend: Backend, at_each_host: Callable[[], Any]) -> None:
        # Most commands run as one process, and need none of these.
        from penstock.core.config.model import load_config  # noqa: PLC0415
        from penstock.core.hosts.joining import RootsOfJob  # noqa: PLC0415
        from penstock.core.ranks.group import RanksOfJob  # noqa: PLC0415
        from penstock.core.ranks.torch_job import initialize  # noqa: PLC0415

        config = load_config(url if is_configuration(url) else {"backend": url})
        initialize()
        self._ranks = RanksOfJob(None, config=config, url=backend.url)
        self._roots: RootsOfJob = RootsOfJob(
            backend, self._ranks, network=config.rank_network, order=_refuse
        )
        self._roots.join()
        self._at_each_host = at_each_host
        group = self._ranks.of_restore()
        assert group is not None  # WORLD_SIZE is above 1
        self._group: RankGroup = group
        self.rank = group.place.rank

    def follow(self) -> int:
        """Serve the root of this host until rank 0 ends; return the exit code of rank 0."""
        answer, error = None, ""
        try:
            answer = self._at_each_host()
        except PenstockError as failure:  # rank 0 reports it
            error = said(failure)
        value = json.dumps([self._group.place.host, answer, error]).encode()
        self._group.coordination.post(_ANSWER_KEY.format(self.rank), value)
        code = int(self._wait(_END_KEY))
        self._roots.close()
        return code

    def answers(self) -> list[tuple[str, int, Any]]:
        found = [(self._group.place.host, 0, self._at_each_host())]
        for rank in range(1, self._group.place.world_size):
            host, answer, error = json.loads(self._wait(_ANSWER_KEY.format(rank)))
            if error:
                msg = f"host {host} of rank {rank}: {error}"
                raise StorageError(msg)
            found.append((host, rank, answer))
        return found

    def end(self, code: int) -> None:
        with suppress(CoordinationError):  # the store of the job is gone, and the others see that
            if not self.rank:
                self._group.coordination.post(_END_KEY, b"%d" % code)
                self._roots.close()
            self._ranks.close()

    def _wait(self, key: str) -> bytes:
        """Wait for a value of another rank without a limit: that rank may read for hours.

        Raises:
            CoordinationError: The store of the job cannot be reached, as after rank 0 has died.
        """
        board = self._group.coordination
        while (value := board.read([key])[0]) is None:
            board.wait(key, self._group.timeout_s)
        return value


def _refuse(number: int, kind: str, body: bytes) -> bytes:
    del number, body
    msg = f"a command does not execute the order {kind!r}"
    raise StorageError(msg)
