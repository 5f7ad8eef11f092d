"""Data for ranks of several hosts is read once, and handed on over the network."""

import errno
import gc
import json
import logging
import os
import socket
import threading
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest
import torch
from tests.integration.ranks.saving import LONG_S, SHORT_TIMEOUT_S, Job
from tests.integration.ranks.test_host_reading import (
    COLUMNS,
    NEEDED,
    ROWS,
    columns,
    damage,
    equals,
    read,
    restored,
    rows,
    saved,
    tensors,
    whole,
)
from tests.integration.ranks.wire import Wire
from tests.integration.support import TINY, memory

from penstock import Checkpointer, DamagedError, RankError
from penstock.core.errors import StorageError
from penstock.core.hosts import reading
from penstock.core.pipeline.loader import Loader
from penstock.testing.coordination import MemoryCoordination
from penstock.testing.faults import Fault, FaultyBackend

PAIRS = "node{}".format  # each rank on its own host


def two_hosts(rank):
    return f"node{rank % 2}"


def once(store, values, cut, count, *, host=PAIRS, **options):
    """The reports of a restore that reads once for all hosts; slow ranks are not abandoned."""
    options |= {"read_once_per_job": True, "timeout_s": LONG_S}
    return restored(store, values, cut, count, host=host, **options)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if "read_once_per_job" in r.getMessage()]


@pytest.mark.parametrize(("host", "count"), [(two_hosts, 4), (PAIRS, 4), (PAIRS, 2)])
def test_replicas_of_several_hosts_read_each_byte_once(host, count, caplog):
    store, values = memory(), tensors()
    saved(store, values)
    with caplog.at_level(logging.WARNING, "penstock"):
        reports = once(store, values, whole, count, host=host)
    assert read(reports) == NEEDED
    assert {r.bytes_read + r.bytes_shared + r.bytes_received for r in reports} == {NEEDED}
    assert max(report.bytes_read for report in reports) < 1.3 * NEEDED / count
    hosts = len({host(rank) for rank in range(count)})
    assert sum(report.bytes_received for report in reports) == (hosts - 1) * NEEDED
    assert not caplog.records


def test_without_the_option_each_host_reads_alone():
    store, values = memory(), tensors()
    saved(store, values)
    reports = restored(store, values, whole, 2, host=PAIRS)
    assert read(reports) == 2 * NEEDED
    assert [report.bytes_received for report in reports] == [0, 0]


def test_without_shared_memory_ranks_of_a_host_share_over_the_network():
    store, values = memory(), tensors()
    saved(store, values)
    reports = once(store, values, whole, 3, host="one".format, read_once_per_host=False)
    assert read(reports) == NEEDED
    assert [report.bytes_shared for report in reports] == [0, 0, 0]


@pytest.mark.parametrize(
    ("cut", "host"),
    [(None, two_hosts), (rows, PAIRS), (columns, two_hosts)],
    ids=["one process", "rows", "columns"],
)
def test_columns_of_all_hosts_are_read_once(cut, host):
    store, values = memory(), tensors()
    saved(store, values, cut, 2)
    # Except for frames that begin or end in a row, with a block that only some hosts need.
    assert read(once(store, values, columns, 4, host=host)) <= 1.3 * NEEDED


def test_rows_of_single_hosts_are_read_as_without_the_option():
    store, values = memory(), tensors()
    saved(store, values, columns, 2)
    reports = once(store, values, rows, 4, host=two_hosts)
    assert read(reports) <= 1.05 * NEEDED


def test_replicas_of_shards_on_several_hosts_are_read_once():
    store, values = memory(), tensors()
    saved(store, values)
    reports = once(store, values, lambda rank, _: rows(rank // 2, 2), 4, host=two_hosts)
    assert read(reports) <= 1.05 * NEEDED


def test_encoded_frames_cross_the_network_as_stored():
    store, values = memory(), tensors()
    rules = [{"match": "**", "codecs": ["floatsplit", "zstd"]}]
    stored = saved(store, values, rules=rules).bytes_stored
    for cut, host in ((whole, PAIRS), (columns, two_hosts)):
        reports = once(store, values, cut, 4, host=host)
        assert read(reports) <= stored
        assert sum(report.bytes_received for report in reports) <= 3 * stored


@pytest.mark.parametrize("codecs", [["delta"], ["delta", "zstd"]])
@pytest.mark.parametrize("by_links", [False, True])
def test_chains_of_deltas_are_read_once_unless_they_are_too_long(codecs, by_links, monkeypatch):
    store, values = memory(), tensors()
    values["d"] = torch.zeros(ROWS, COLUMNS)  # equal chunks: one frame is the base of many
    values["e"] = torch.zeros(ROWS, COLUMNS)
    options = {"rules": [{"match": "**", "codecs": codecs}], "share": True}
    with Checkpointer(store, **TINY, **options) as ckpt:
        for step in (1, 2, 3):
            for name in "ade":
                values[name][step] += ord(name)
            ckpt.save({n: t.clone() for n, t in values.items()}, step, mode="blocking")

    def wanted(_rank, _count):
        return {name: torch.zeros(ROWS, COLUMNS) for name in "abcde"}

    alone = read(restored(store, values, wanted, 1))
    if by_links:
        monkeypatch.setattr(Loader, "together_bytes", 1000)
    reports = once(store, values, wanted, 4, host=two_hosts)
    assert by_links or read(reports) == alone


def test_rank_specific_data_does_not_prevent_sharing_the_rest():
    store, values = memory(), tensors()
    more = {f"own{n}": torch.full((8, 8), float(n)) for n in range(4)}
    saved(store, values | more)

    def wanted(rank, count):
        return whole(rank, count) | {f"own{rank}": torch.zeros(8, 8)}

    reports = once(store, values | more, wanted, 4)
    assert read(reports) <= 1.5 * NEEDED  # a bucket with differing data is not shared


def test_hosts_with_unequal_rank_counts_read_separately():
    store, values = memory(), tensors()
    saved(store, values)
    host = lambda rank: "small" if rank == 3 else "large"  # noqa: E731
    assert read(once(store, values, whole, 4, host=host)) == 2 * NEEDED


def test_load_reads_once_too():
    store, values = memory(), tensors()
    saved(store, values)
    recorded = []
    job = Job(2, store, host=PAIRS, on_event=recorded.append, read_once_per_job=True)
    found = job.run(lambda ckpt, _: equals(ckpt.load(), values), timeout_s=LONG_S)
    assert found == [True, True]
    reports = [event.report for event in recorded if event.kind == "load_done"]
    assert sum(report.bytes_read for report in reports) == NEEDED


def test_files_are_read_once_by_the_engine_of_the_disk(tmp_path):
    values = tensors()
    with Checkpointer(tmp_path, **TINY) as ckpt:
        ckpt.save({n: t.clone() for n, t in values.items()}, 1, mode="blocking")
    reports = once(str(tmp_path), values, whole, 4, host=two_hosts)
    assert read(reports) == NEEDED


def test_a_state_larger_than_all_windows_is_read_once():
    store = memory()
    large = {"a": torch.empty(75 << 20, dtype=torch.int16).random_()}
    with Checkpointer(store, chunk_bytes=8 << 20) as ckpt:
        ckpt.save(large, 1, mode="blocking")

    def work(ckpt, rank):
        state = {"a": torch.zeros_like(large["a"])}
        report = ckpt.restore(state)
        assert torch.equal(state["a"], large["a"])
        return report

    job = Job(4, store, host=two_hosts, read_once_per_job=True)
    assert read(job.run(work, timeout_s=LONG_S)) == 150 << 20


@pytest.mark.parametrize("on", [True, False])
def test_the_option_of_rank_0_counts_for_all(on):
    store, values = memory(), tensors()
    saved(store, values)
    job = Job(2, store, host=PAIRS, read_once_per_job=on)
    other = Job(2, store, host=PAIRS, read_once_per_job=not on)
    other.board = job.board
    alone = job.checkpointer
    job.checkpointer = lambda rank, **given: (
        alone(rank, **given) if rank == 0 else other.checkpointer(rank, **given)
    )

    def work(ckpt, rank):
        state = whole(rank, 2)
        report = ckpt.restore(state)
        assert equals(state, values)
        return report

    assert read(job.run(work, timeout_s=LONG_S)) == (NEEDED if on else 2 * NEEDED)


# -- damage ----------------------------------------------------------------------------------------


def wired(wire, store, values, count, *, host=PAIRS, timeout_s=LONG_S, **options):
    """The reports of a restore over a wire."""
    job = Job(count, store, host=host, read_once_per_job=True, **options)

    def work(ckpt, rank):
        state = whole(rank, count)
        report = ckpt.restore(state)
        assert equals(state, values), rank
        return report

    plain = job.group
    job.group = lambda rank, **given: plain(
        rank, coordination=wire.coordination(job.board), **given
    )
    try:
        return job.run(work, timeout_s=timeout_s)
    finally:
        wire.close()


@pytest.mark.parametrize("host", [two_hosts, PAIRS], ids=["2 hosts", "4 hosts"])
def test_a_byte_flipped_on_the_wire_is_found_and_read_from_the_store(host, caplog):
    store, values = memory(), tensors()
    saved(store, values)
    flipped, lock = [], threading.Lock()

    def flip(rank, data):
        with lock:
            if flipped or len(data) < 10_000:
                return data
            flipped.append(rank)
        return data[:5000] + bytes([data[5000] ^ 4]) + data[5001:]

    with caplog.at_level(logging.WARNING, "penstock"):
        reports = wired(Wire(flip), store, values, 4, host=host)
    assert flipped
    assert NEEDED < read(reports) <= NEEDED + TINY["chunk_bytes"]
    (found,) = [record.getMessage() for record in caplog.records]
    assert f"from rank {flipped[0]} are damaged" in found
    assert [report.rescued for report in reports] == [()] * 4


def test_a_wire_that_damages_everything_costs_only_reads():
    store, values = memory(), tensors()
    saved(store, values)

    def flip(_rank, data):
        return data if len(data) < 10_000 else data[:-1] + bytes([data[-1] ^ 1])

    reports = wired(Wire(flip), store, values, 2)
    assert NEEDED < read(reports) <= 2 * NEEDED


def test_damage_in_the_store_fails_all_by_name():
    store, values = memory(), tensors()
    saved(store, values)
    damage(store)
    found = once(store, values, whole, 4, host=two_hosts)
    assert all(isinstance(one, (DamagedError, RankError)) for one in found)
    name = next(one for one in found if isinstance(one, DamagedError)).damaged[0]
    assert all(name in str(one) for one in found)


def test_damage_makes_all_ranks_fall_back():
    store, old = memory(), tensors(1)
    saved(store, old, step=1)
    before = set(store._store.blobs)
    saved(store, tensors(2), step=2)
    for name in set(store._store.blobs) - before:
        if name.endswith(".raw"):
            data = store._store.blobs[name].data
            data[len(data) // 2] ^= 1
    reports = once(store, old, whole, 4, host=two_hosts, on_damage="fallback")
    assert [(report.step, report.fell_back_from) for report in reports] == [(1, (2,))] * 4
    assert read(reports) == NEEDED


def test_a_rank_with_a_failed_store_ends_all_restores_by_name_at_once():
    store, values = memory(), tensors()
    saved(store, values)

    def seen(rank):
        fault = Fault("read", match=".raw", error=StorageError("the cable is cut"), times=None)
        return FaultyBackend(store, *[fault] * (rank == 1))

    found = once(seen, values, whole, 3)
    assert all("the cable is cut" in str(one) for one in found)


# -- peers and strangers ---------------------------------------------------------------------------


def test_unreachable_ranks_cost_reads_and_one_warning_each(caplog):
    store, values = memory(), tensors()
    saved(store, values)

    class Closed(MemoryCoordination):
        def post(self, key, value, /):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                closed = json.dumps(listener.getsockname()[:2]).encode()
            super().post(key, closed if key.startswith("line/") else value)

    job = Job(2, store, host=PAIRS, read_once_per_job=True)
    plain = job.group
    job.group = lambda rank: plain(rank, coordination=Closed(job.board), timeout_s=SHORT_TIMEOUT_S)

    def work(ckpt, rank):
        state = whole(rank, 2)
        report = ckpt.restore(state)
        assert equals(state, values)
        return report

    with caplog.at_level(logging.WARNING, "penstock"):
        assert read(job.run(work)) == 2 * NEEDED
    recorded = warnings_of(caplog)
    assert len(recorded) == 2
    assert any("refused" in one for one in recorded)


def test_a_rank_that_cannot_listen_reads_alone_and_blocks_none(monkeypatch, caplog):
    store, values = memory(), tensors()
    saved(store, values)
    real, lock, asked = reading.own_address, threading.Lock(), []

    def address(*given):
        with lock:
            asked.append(given)
            if len(asked) == 1:
                raise OSError(errno.EMFILE, "no room for another socket")
        return real(*given)

    monkeypatch.setattr(reading, "own_address", address)
    reports = once(store, values, whole, 4, host=two_hosts)
    assert NEEDED < read(reports) <= 2 * NEEDED
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("after", [0, 40_000])
def test_a_silent_rank_is_not_awaited(after, caplog):
    store, values = memory(), tensors()
    saved(store, values)
    sent, lock = {}, threading.Lock()

    def silence(rank, data):
        with lock:
            sent[rank] = sent.get(rank, 0) + len(data)
            return None if rank == 1 and sent[rank] > after else data

    with caplog.at_level(logging.WARNING, "penstock"):
        reports = wired(Wire(silence), store, values, 4, timeout_s=6.0)
    assert NEEDED < read(reports) <= 4 * NEEDED
    assert any("1.5 s" in one for one in warnings_of(caplog))


def test_a_stranger_without_the_secret_gets_and_gives_nothing():
    store, values = memory(), tensors()
    saved(store, values)
    heard, found = [], []

    class Watched(MemoryCoordination):
        def post(self, key, value, /):
            super().post(key, value)
            if key.startswith("line/"):
                crowd = [threading.Thread(target=disturb, args=(json.loads(value),)) for _ in "123"]
                found.extend(crowd)
                for one in crowd:
                    one.start()

    def disturb(address):
        line = HTTPConnection(*address, timeout=20)
        name = next(name for name in store._store.blobs if name.endswith(".raw"))
        token = f"Bearer 1.{os.urandom(32).hex()}"
        with suppress(OSError, HTTPException):  # closed before all was read
            line.request("GET", f"/{name}", headers={"Authorization": token, "Range": "bytes=0-9"})
            answer = line.getresponse()
            heard.append((answer.status, "Penstock-Proof" in answer.headers))
        line.close()

    job = Job(2, store, host=PAIRS, read_once_per_job=True)
    plain = job.group
    job.group = lambda rank: plain(rank, coordination=Watched(job.board), timeout_s=LONG_S)

    def work(ckpt, rank):
        state = whole(rank, 2)
        report = ckpt.restore(state)
        assert equals(state, values)
        return report

    assert read(job.run(work)) == NEEDED
    for one in found:
        one.join(300)
    assert all(status == HTTPStatus.FORBIDDEN and not proved for status, proved in heard)


def test_restores_leave_no_memory_files_or_threads():
    store, values = memory(), tensors()
    saved(store, values)
    met, counts = threading.Barrier(4), []

    def work(ckpt, rank):
        for _ in range(3):
            ckpt.restore(whole(rank, 4))
            met.wait(300)
            if rank == 0:
                windows = Path("/proc/self/maps").read_text().count("penstock-window")
                relays = sum("relay" in thread.name for thread in threading.enumerate())
                counts.append((windows, relays, len([*Path("/proc/self/fd").iterdir()])))
            met.wait(300)

    gc.collect()
    gc.disable()  # like many a training loop
    try:
        Job(4, store, host=two_hosts, read_once_per_job=True).run(work, timeout_s=LONG_S)
    finally:
        gc.enable()
    assert [(windows, relays) for windows, relays, _ in counts] == [(0, 0)] * 3
    assert counts[2][2] <= counts[0][2]
