"""Promises of this backend that the suite cannot know."""

import multiprocessing
import signal
import tracemalloc

import pytest
from penstock.core.errors import StorageError, StorageFullError, StorageTimeoutError
from penstock.core.types import ReadRequest, WriteRequest

from penstock_example_plugin.sqlite_backend import PIECE_BYTES, SqliteBackend, SqliteConfig


def opened(path, **options):
    return SqliteBackend(SqliteConfig(path=str(path), **options))


def test_memory_is_bounded_by_a_piece(tmp_path):
    size = 24 * PIECE_BYTES
    backend = opened(tmp_path / "run.db")
    data, target = memoryview(bytearray(b"x") * size), memoryview(bytearray(size))
    tracemalloc.start()
    try:
        writer = backend.create("data/large.raw")
        writer.write([WriteRequest(100, (data[100:],))])
        writer.seal(size)
        backend.read([ReadRequest("data/large.raw", 0, target)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    backend.close()
    assert target[100:] == data[100:]
    assert peak < 4 * PIECE_BYTES


def test_full_store_is_reported_and_keeps_no_part(tmp_path):
    backend = opened(tmp_path / "run.db")
    backend.publish("a.json", b"{}")
    with backend.transaction("limit", "the file", writing=False) as db:
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages + 4}")
    with pytest.raises(StorageFullError, match=r"large\.json.*free some space"):
        backend.publish("large.json", bytes(4 * PIECE_BYTES))
    assert [info.name for info in backend.list("")] == ["a.json"]
    backend.close()


def test_waiting_for_another_writer_ends(tmp_path):
    one, two = opened(tmp_path / "run.db"), opened(tmp_path / "run.db", timeout_s=0.05)
    with (
        one.transaction("hold", "the file"),
        pytest.raises(StorageTimeoutError, match="raise timeout_s"),
    ):
        two.publish("a.json", b"{}")
    two.publish("a.json", b"{}")
    one.close()
    two.close()


def test_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "run.db").write_bytes(b"something else" * 1000)
    with pytest.raises(StorageError, match="not a database"):
        opened(tmp_path / "run.db")


def publish_all(path, start, number):
    start.wait()
    backend = opened(path)
    for turn in range(20):
        backend.publish(f"{number}/{turn}.json", b"{}")
    backend.close()


def test_processes_may_open_a_new_file_together(tmp_path):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    path = tmp_path / "run.db"
    processes = [context.Process(target=publish_all, args=(path, start, n)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    backend = opened(path)
    assert len(backend.list("")) == 80
    backend.close()


def write_until_killed(path, ready):
    backend = opened(path)
    backend.publish("kept.json", b"kept")
    writer = backend.create("data/cut.raw")
    writer.write([WriteRequest(0, (memoryview(bytes(3 * PIECE_BYTES)),))])
    with backend.transaction("hang", "in the middle") as db:
        db.execute("DELETE FROM blobs")
        ready.set()
        signal.pause()


def test_killed_writer_leaves_published_and_listed_blobs(tmp_path):
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    process = fork.Process(target=write_until_killed, args=(tmp_path / "run.db", ready))
    process.start()
    assert ready.wait(60)
    process.kill()
    process.join()
    backend = opened(tmp_path / "run.db")
    assert backend.read_record("kept.json", limit_bytes=9) == b"kept"
    assert [info.name for info in backend.list("")] == ["data/cut.raw", "kept.json"]
    backend.delete(["data/cut.raw"])  # as `prune` does
    with backend.transaction("count", "pieces", writing=False) as db:
        assert db.execute("SELECT count(*) FROM pieces").fetchone() == (1,)
    backend.close()
