"""Several places as one backend."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.integration.support import holding

from penstock import ConfigError
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.abc import DelegatingBackend
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    CapabilityError,
    StorageError,
)
from penstock.core.storage.open import open_backend
from penstock.core.types import ReadRequest
from penstock.testing.backends import check_backend
from penstock.testing.faults import Fault, FaultyBackend


def memory(name=""):
    return MemoryBackend(MemoryConfig(name=name))


def tiered(fast=None, durable=None, **options):
    config = TieredConfig(fast="memory://", durable="memory://", **options)
    return TieredBackend(config, fast=fast or memory(), durable=durable or memory())


def put(backend, name, data):
    writer = backend.create(name)
    from penstock.core.types import WriteRequest

    writer.write([WriteRequest(0, (memoryview(data),))])
    writer.seal(len(data))


def get(backend, *names, size=4):
    targets = [bytearray(size) for _ in names]
    backend.read([ReadRequest(n, 0, memoryview(t)) for n, t in zip(names, targets, strict=True)])
    return [bytes(target) for target in targets]


@pytest.mark.parametrize("kind", ["posix", pytest.param("uring", marks=pytest.mark.slow)])
def test_the_conformance_suite_passes(kind, tmp_path):
    if kind == "uring":
        from tests.integration.support import uring_missing

        if (reason := uring_missing()) is not None:
            pytest.skip(reason)

    def open_root(root):
        places = {name: f"{kind}://{tmp_path}/{root}/{name}" for name in ("fast", "durable")}
        return open_backend({"type": "tiered", **places})

    left_out = check_backend(open_root)
    assert not [n for n in left_out if "direct_io" not in n and "renamed" not in n]


def test_each_blob_is_read_from_the_fastest_tier_that_has_it():
    fast, durable = memory(), memory()
    backend = tiered(fast, durable)
    put(fast, "data/a/x", b"fast")
    put(durable, "data/a/x", b"slow")
    put(durable, "data/a/y", b"only")
    assert get(backend, "data/a/y", "data/a/x") == [b"only", b"fast"]
    requests = [ReadRequest("data/a/y", 0, memoryview(bytearray(4)))]
    backend.submit_read(requests).result(300)
    assert bytes(requests[0].target) == b"only"
    assert [i.name for i in backend.list("data/")] == ["data/a/x", "data/a/y"]
    assert backend.stat("data/a/y").size_bytes == 4
    with pytest.raises(BlobNotFoundError):
        get(backend, "data/a/z")
    with pytest.raises(BlobNotFoundError):
        backend.stat("data/a/z")


def test_a_failing_fast_tier_is_skipped_but_its_error_is_raised():
    broken = FaultyBackend(memory())
    broken.add(Fault("read", times=None, error=StorageError("the disk is on fire")))
    broken.add(Fault("stat", times=None, error=StorageError("the disk is on fire")))
    durable = memory()
    put(durable, "data/a/y", b"only")
    durable.publish("commits/x", b"record")
    backend = tiered(broken, durable)
    assert get(backend, "data/a/y") == [b"only"]
    assert backend.read_record("commits/x", limit_bytes=10) == b"record"
    assert backend.stat("commits/x").size_bytes == 6
    for call in (lambda: get(backend, "data/z"), lambda: backend.stat("data/z")):
        with pytest.raises(StorageError, match="on fire"):
            call()


def test_blob_evicted_during_its_look_up_comes_from_the_next_tier():
    fast, durable = MemoryBackend(MemoryConfig()), memory()
    for place in (fast, durable):
        put(place, "data/a/x", b"same")
    put(durable, "data/a/y", b"only")

    class Evicting(DelegatingBackend):
        name = "evicting"

        def stat(self, name, /):
            info = super().stat(name)
            self.inner.delete([name])
            return info

    assert get(tiered(Evicting(fast), durable), "data/a/x", "data/a/y") == [b"same", b"only"]


def test_truncated_blob_is_not_sought_in_other_tiers():
    fast, durable = memory(), memory()
    put(fast, "data/a/x", b"cut")
    put(durable, "data/a/x", b"whole")
    backend = tiered(fast, durable)
    for read in (backend.read, lambda requests: backend.submit_read(requests).result(300)):
        with pytest.raises(BlobTruncatedError):
            read([ReadRequest("data/a/x", 0, memoryview(bytearray(5)))])


def test_a_listing_needs_every_tier():
    """A decision on deletions needs all tiers."""
    broken = FaultyBackend(memory())
    broken.add(Fault("list", times=None, error=StorageError("no answer")))
    with pytest.raises(StorageError, match="no answer"):
        tiered(durable=broken).list("commits/")


def test_a_listing_has_blobs_moving_to_the_slower_tier():
    fast, durable = memory(), memory()
    fast.publish("commits/x", b"1")
    faulty = FaultyBackend(fast)
    with ThreadPoolExecutor(1) as pool, holding(faulty, "list") as held:
        listed = pool.submit(tiered(faulty, durable).list, "commits/")
        assert held.reached.wait(30)
        durable.publish("commits/x", b"1")  # as a drain does, and then an eviction
        fast.delete(["commits/x"])
        held.until.set()
        assert [info.name for info in listed.result(30)] == ["commits/x"]


def test_a_name_of_another_tier_is_taken():
    durable = memory()
    durable.publish("commits/x", b"1")
    backend = tiered(durable=durable)
    with pytest.raises(BlobExistsError):
        backend.publish("commits/x", b"2", exclusive=True)
    with pytest.raises(BlobExistsError):
        backend.create("commits/x")


def test_deleting_begins_with_the_most_durable_tier():
    order = []

    class Noting(MemoryBackend):
        def delete(self, names, /):
            order.append(self.url)
            super().delete(names)

    fast, durable = (Noting(MemoryConfig(name=n)) for n in ("noting-fast", "noting-durable"))
    for one in (fast, durable):
        one.publish("data/a/x", b"x")
    backend = tiered(fast, durable)
    backend.delete(["data/a/x"])
    assert order == ["memory://noting-durable", "memory://noting-fast"]
    assert backend.list("") == []


def test_nested_tiers_are_flattened():
    shm = {"type": "tiered", "fast": "memory://", "durable": "memory://", "keep_fast": 1}
    backend = open_backend(
        {"type": "tiered", "fast": shm, "durable": "memory://", "drain_every": 10}
    )
    assert [t.name for t in backend.tiers] == ["fast.fast", "fast.durable", "durable"]
    assert [t.drain_every for t in backend.tiers] == [1, 10, 1]
    assert [t.keep_last for t in backend.tiers] == [1, None, None]
    assert [t.durable for t in backend.tiers] == [False, False, True]
    backend.close()
    lower = {"type": "tiered", "fast": "memory://", "durable": "memory://"}
    backend = open_backend(
        {"type": "tiered", "fast": shm, "durable": lower, "durable_means": "fast"}
    )
    assert [t.durable for t in backend.tiers] == [False, True, False, False]
    backend.close()


def test_opened_tiers_close_if_the_rest_fail(tmp_path):
    closed = []

    class Closing(MemoryBackend):
        def close(self):
            closed.append(self)
            super().close()

    def open_one(spec):
        if spec == "bad":
            raise CapabilityError("cannot be used")
        return Closing(MemoryConfig())

    with pytest.raises(CapabilityError):
        TieredBackend.open(TieredConfig(fast="good", durable="bad"), open_backend=open_one)
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"fast": "memory://"}, "durable"),
        ({"fast": "memory://", "durable": "memory://", "drain": 3}, "drain_every"),
        ({"fast": "memory://", "durable": {"type": "memroy"}}, "did you mean memory"),
        ({"fast": "memory://", "durable": "memory://", "on_full": "wait"}, "block"),
    ],
)
def test_a_wrong_option_names_the_right_one(options, complaint):
    from penstock import PenstockError

    with pytest.raises(PenstockError, match=complaint):
        open_backend({"type": "tiered", **options})


def test_it_is_made_of_two():
    with pytest.raises(ConfigError, match="two backends"):
        TieredBackend(TieredConfig(fast="memory://", durable="memory://"))
