"""The backend suite catches every known way to break the contract."""

import ctypes
import os
import signal
import textwrap
import threading
import time
import unittest
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import pytest
from tests import interpreters

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.abc import BlobWriter
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    StorageError,
)
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.backends import BACKEND_CHECKS, blobs, check_backend, forks, published
from penstock.testing.expectations import NotDeclaredError, NotTriedError
from penstock.testing.faults import WrapperBackend


class Good(WrapperBackend):
    """Like a third party's, around a store that keeps the contract."""

    api_version = 1

    def create(self, name, /, *, size_hint=None):
        made = self.Writer(self.inner.create(name, size_hint=size_hint))
        made.name, made.store = name, self.inner
        return made

    class Writer(BlobWriter):
        end = 0

        def __init__(self, inner):
            self.inner = inner

        def write(self, requests, /):
            self.inner.write(requests)
            self.end = max([self.end, *(r.offset + r.length for r in requests)])

        def seal(self, length, /):
            self.inner.seal(length)

        def sync(self, length, /):
            self.inner.sync(length)

        def abort(self):
            self.inner.abort()


class Files(PosixBackend):
    """Like a third party's, in files: other processes see their content."""

    api_version = 1

    def __init__(self, inner):
        super().__init__(PosixConfig(path="/" + inner.url.partition("://")[2].strip("/")))


class Own(MemoryBackend):
    """Opened by its URL, like an installed one."""

    api_version = 1

    def __init__(self, inner):
        super().__init__(inner if isinstance(inner, MemoryConfig) else MemoryConfig(name=inner.url))


def root_of(cls, tmp_path):
    return lambda root: cls(MemoryBackend(MemoryConfig(name=f"{tmp_path}/{root}")))


# -- parts of the mutants ------------------------------------------------------------------------

DIRECT = "direct_io_leaves_the_page_cache_alone"
# Other processes do not see this process's memory; it declares that.
OF_PROCESSES = (
    "what_was_sealed_or_published_outlives_a_killed_process",
    "synced_bytes_outlive_a_killed_process",
    "of_processes_in_a_race_exactly_one_wins",
)
MUTANTS = {}
write, seal, abort = Good.Writer.write, Good.Writer.seal, Good.Writer.abort


def broken(check, name, base=Good, /, *, writer=None, **members):
    """Adds a mutant that `check` must catch: `base` with other members, or with such a writer."""
    if writer is not None:
        members["Writer"] = type("Writer", (Good.Writer,), writer)
    MUTANTS[name] = check, type(name, (base,), members)


def writes(change):
    return {"write": lambda w, requests: write(w, change(requests))}


def reads(change):
    return lambda s, requests: s.inner.read(change(requests))


def ignoring(method, error=StorageError):
    def call(self, *arguments, **options):
        with suppress(error):
            return method(self, *arguments, **options)

    return call


def translating(error, other, method):
    def call(self, *arguments, **options):
        try:
            return method(self, *arguments, **options)
        except error as caught:
            raise other("a") from caught

    return call


def declaring(**changes):
    return property(lambda s: replace(s.inner.capabilities, **changes))


def done():
    future = Future()
    future.set_result(None)
    return future


def fill(writer, end):
    """Write the non-zero bytes up to this byte."""
    if end > writer.end:
        write(writer, [WriteRequest(writer.end, (memoryview(b"\xff" * (end - writer.end)),))])


def flip_sources(writer, requests):
    write(writer, requests)
    for buffer in (buffer for request in requests for buffer in request.buffers):
        if buffer.nbytes and not buffer.readonly:
            buffer[0] ^= 1


def write_alone(writer, requests):
    if not getattr(writer, "busy", False):
        writer.busy = True
        time.sleep(0.001)
        write(writer, requests)
        writer.busy = False


def append(writer, requests):
    for request in requests:
        write(writer, [WriteRequest(writer.end, request.buffers)])


def fill_gaps(writer, requests):
    for request in requests:
        fill(writer, request.offset)
        write(writer, [request])


def abort_once(writer):
    if hasattr(writer, "aborted"):
        raise StorageError("aborted already")
    writer.aborted = True
    abort(writer)


def create_another(store, name, /, *, size_hint=None):
    try:
        return Good.create(store, name)
    except BlobExistsError:
        with suppress(BlobNotFoundError):
            store.inner.stat(name)
            raise
        return Good.create(store, name + ".again")


def read_one_too_many(store, requests):
    store.inner.read(requests)
    for view in (request.target for request in requests):
        if isinstance(view.obj, bytearray) and len(view.obj) > view.nbytes + 200:
            whole = memoryview(view.obj)
            at = bytes(whole).find(bytes(view)) + view.nbytes
            if 0 < at < len(whole):
                whole[at] ^= 1


def pad(store, requests):
    for request in requests:
        try:
            store.inner.read([request])
        except BlobTruncatedError:
            request.target[:] = bytes(request.target.nbytes)


def look_then_put(publish):
    def put(store, name, data, /, *, exclusive=False):
        if exclusive:
            with suppress(BlobNotFoundError):
                store.stat(name)
                raise BlobExistsError(name)
            time.sleep(0.001)
        publish(store, name, data)

    return put


def publish_in_halves(store, name, data, /, *, exclusive=False):
    if not exclusive:
        store.inner.publish(name, data[: len(data) // 2])
    store.inner.publish(name, data, exclusive=exclusive)


def delete_folders(store, names):
    for name in names:
        store.inner.delete([i.name for i in store.inner.list(name.rpartition("/")[0])])


def forget(store):
    store.inner.delete([i.name for i in store.inner.list("")] if not store.inner._closed else [])
    Good.close(store)


def close_once(store):
    if hasattr(store, "closed"):
        raise StorageError("closed already")
    store.closed = True
    Good.close(store)


class WishesForDirectIo(PosixBackend):
    """Declares the given values, and opens its files normally."""

    api_version = 1

    def __init__(self, inner):
        path = "/" + inner.url.partition("://")[2].strip("/")
        super().__init__(PosixConfig(path=path, direct_io="off"))

    @property
    def capabilities(self):
        return replace(super().capabilities, direct_io=True)


class WritesWhenClosed(Files):
    """Keeps replaceable records, and answers from its own memory."""

    def __init__(self, inner):
        super().__init__(inner)
        self.records = {}

    def publish(self, name, data, /, *, exclusive=False):
        if exclusive:
            super().publish(name, data, exclusive=True)
        else:
            self.records[name] = data

    def read_record(self, name, /, *, limit_bytes):
        if name in self.records:
            return self.records[name]
        return super().read_record(name, limit_bytes=limit_bytes)

    def close(self):
        for name, data in self.records.items():
            super().publish(name, data)
        self.records = {}
        super().close()


class SealsWhenClosed(Files):
    sealing = ()

    def create(self, name, /, *, size_hint=None):
        made = super().create(name, size_hint=size_hint)
        seal = made.seal
        made.seal = lambda length: setattr(self, "sealing", (*self.sealing, (seal, length)))
        return made

    def close(self):
        for seal, length in self.sealing:
            seal(length)
        self.sealing = ()
        super().close()


class SyncsWhenClosed(Files):
    """Writes nothing before the seal."""

    def create(self, name, /, *, size_hint=None):
        made = super().create(name, size_hint=size_hint)
        write, seal, held = made.write, made.seal, []
        made.write, made.sync = held.append, lambda length: None

        def write_and_seal(length):
            for requests in held:
                write(requests)
            seal(length)

        made.seal = write_and_seal
        return made


class DecidesByALock(Files):
    """Right among threads, as far as it was tested."""

    lock = threading.Lock()

    def publish(self, name, data, /, *, exclusive=False):
        with self.lock:
            look_then_put(Files.publish)(self, name, data, exclusive=exclusive)


# -- the mutants ---------------------------------------------------------------------------------

# fmt: off
check = blobs
broken(check.buffers_are_free_after_write_returns, "KeepsBuffers", writer={
    "kept": (),
    "write": lambda w, requests: setattr(w, "kept", (*w.kept, *requests)),
    "seal": lambda w, length: (write(w, w.kept), seal(w, length)),
})
broken(check.buffers_are_only_lent, "KeepsWhatItWrote", writer={
    "write": lambda w, requests: (write(w, requests), setattr(w, "last", requests)),
})
broken(check.buffers_are_only_lent, "KeepsTargets", read=lambda s, requests: (
    s.inner.read(requests), setattr(s, "last", [request.target for request in requests])))
broken(check.other_threads_run_during_writes_and_reads, "HoldsTheGil", writer={
    "write": lambda w, requests: (ctypes.PyDLL(None).usleep(40_000), write(w, requests)),
})
broken(check.writing_does_not_change_the_source, "ChangesSource", writer={"write": flip_sources})
broken(check.gathered_buffers_read_back, "FirstBufferOnly",
       writer=writes(lambda batch: [WriteRequest(r.offset, r.buffers[:1]) for r in batch]))
broken(check.more_buffers_than_a_system_call_takes_read_back, "LimitedVector",
       writer=writes(lambda batch: [WriteRequest(r.offset, r.buffers[:1024]) for r in batch]))
broken(check.batches_in_the_background_read_back, "BackgroundWritesAreLost",
       submit_write=lambda s, writer, requests: done())
broken(check.many_small_requests_read_back, "LastRequestLost",
       writer=writes(lambda batch: batch[:-1] if len(batch) > 1000 else batch))
broken(check.odd_offsets_lengths_and_addresses_read_back, "AppendsOnly", writer={"write": append})
broken(check.gaps_read_as_zero, "GapsAreNotZero", writer={"write": fill_gaps})
broken(check.gaps_read_as_zero, "TailIsNotZero",
       writer={"seal": lambda w, length: (fill(w, length), seal(w, length))})
broken(check.seal_cuts_to_length, "SealIgnoresLength",
       writer={"seal": lambda w, length: seal(w, max(length, w.end))})
broken(check.empty_blob_can_be_sealed, "EmptyBlobsVanish",
       writer={"seal": lambda w, length: seal(w, length) if length else abort(w)})
broken(check.batches_from_threads_read_back, "NotThreadSafe", writer={"write": write_alone})
broken(check.blob_of_one_small_request_reads_back, "ShortRead",
       read=reads(lambda batch: [ReadRequest(r.name, r.offset, r.target[:-1]) for r in batch]))
broken(check.one_large_request_reads_back, "LimitedRead",  # as `preadv`, but at 2 GiB
       read=reads(lambda batch: [ReadRequest(r.name, r.offset, r.target[:8 << 20]) for r in batch]))

check = blobs
broken(check.a_finished_writer_takes_no_more, "WritesAfterSeal", writer={"write": ignoring(write)})
broken(check.a_finished_writer_takes_no_more, "SealsTwice", writer={"seal": ignoring(seal)})
delete_by_name = {"abort": lambda w: (abort(w), w.store.delete([w.name]))}
broken(check.a_finished_writer_takes_no_more, "AbortDeletesSealed", writer=delete_by_name)
broken(check.an_abort_leaves_a_later_blob_of_its_name_alone, "AbortDeletesByName",
       writer=delete_by_name)
broken(check.an_aborted_blob_can_be_deleted_and_made_again, "AbortRaisesAgain",
       writer={"abort": abort_once})
broken(check.create_never_takes_an_existing_name, "CreatesOverOthers",
       create=lambda s, name, size_hint=None: (s.inner.delete([name]), Good.create(s, name))[1])
broken(check.create_never_takes_an_existing_name, "NameIsFreeUntilSealed", create=create_another)
broken(check.reads_fill_many_targets_from_several_blobs, "OneBlobPerBatch",
       read=reads(lambda batch: [ReadRequest(batch[0].name, r.offset, r.target) for r in batch]))
broken(check.reads_touch_nothing_around_the_target, "ReadsOneTooMany", read=read_one_too_many)
broken(check.reading_what_is_not_there_says_so, "PadsAfterTheEnd", read=pad)
broken(check.reading_what_is_not_there_says_so, "OneErrorForAll",
       read=translating(StorageError, StorageError, Good.read))
broken(check.reading_what_is_not_there_says_so, "BackgroundErrorsAreLost",
       submit_read=lambda s, requests: (ignoring(Good.read)(s, requests), done())[1])
broken(check.synced_bytes_are_readable_while_the_blob_grows, "SyncsNothing",
       writer={"sync": lambda self, length: None})
broken(check.synced_bytes_stay_after_an_abort, "AbortDeletesSyncedBytes", writer={
    "synced": False,
    "sync": lambda w, length: (w.inner.sync(length), setattr(w, "synced", True))[0],
    "abort": lambda w: (w.inner.abort(), w.store.delete([w.name] if w.synced else []))[0]})
broken(check.renamed_blob_has_only_its_new_name, "RenameCopies", rename=lambda s, old, new:
       s.publish(new, s.read_record(old, limit_bytes=1 << 20)))
broken(check.renamed_blob_has_only_its_new_name, "RenameKeepsTheFirst", rename=lambda s, old, new:
       s.delete([old]) if s.list(new) and s.list(old) else s.inner.rename(old, new))
broken(check.renamed_blob_grows_under_its_new_name, "RenameCopiesWhatIsThere",
       rename=lambda s, old, new: (
           s.publish(new, s.read_record(old, limit_bytes=1 << 20)), s.delete([old]))[0])
broken(check.another_instance_sees_sealed_blobs, "ListsOneLevel", list=lambda s, prefix: [
    info for info in s.inner.list(prefix) if "/" not in info.name[len(prefix):]])
broken(check.capabilities_are_sane_and_steady, "AlignmentIsNoPowerOfTwo",
       capabilities=declaring(memory_alignment=48))
broken(check.capabilities_are_sane_and_steady, "NoAlignmentIsZero",
       capabilities=declaring(offset_alignment=0))
broken(check.capabilities_are_sane_and_steady, "CapabilitiesChange", asked=[],
       capabilities=property(lambda s: s.asked.append(1) or replace(
           s.inner.capabilities, preferred_parallel=len(s.asked))))

check = published
broken(check.stat_tells_size_and_the_time_of_the_store, "ForeignError",
       stat=translating(BlobNotFoundError, KeyError, Good.stat))
broken(check.stat_tells_size_and_the_time_of_the_store, "TimesAreOurs",
       stat=lambda s, name: replace(s.inner.stat(name), modified_s=time.time() + 3600),
       store_time_s=lambda s: time.time())
broken(check.a_record_larger_than_allowed_is_refused, "RecordLimitIsIgnored",
       read_record=lambda s, name, limit_bytes: s.inner.read_record(name, limit_bytes=1 << 40))
broken(check.a_record_larger_than_allowed_is_refused, "CutsRecordsAtTheLimit",
       read_record=lambda s, name, limit_bytes:
           s.inner.read_record(name, limit_bytes=1 << 40)[:limit_bytes])
broken(check.exclusive_publish_never_replaces, "ExclusiveIsIgnored",
       publish=lambda s, name, data, exclusive=False: s.inner.publish(name, data))
broken(check.of_publishers_in_a_race_exactly_one_wins, "LooksThenPuts",
       publish=look_then_put(Good.publish))
broken(check.published_records_read_back, "NeverReplaces",
       publish=lambda s, name, data, exclusive=False: s.inner.publish(name, data, exclusive=True))
broken(check.a_reader_never_sees_a_torn_record, "PublishesInHalves", publish=publish_in_halves)
broken(check.list_is_by_prefix_sorted_and_at_any_depth, "TemporariesAreListed",
       publish=lambda s, name, data, exclusive=False: (
           s.inner.publish(name, data, exclusive=exclusive), s.inner.publish(f"{name}.tmp", data)))
broken(check.list_is_by_prefix_sorted_and_at_any_depth, "Unsorted",
       list=lambda s, prefix: s.inner.list(prefix)[::-1])
broken(check.list_is_by_prefix_sorted_and_at_any_depth, "PrefixIsAFolder",
       list=lambda s, prefix: s.inner.list(prefix.rstrip("/") + "/" if prefix else ""))
broken(check.list_is_by_prefix_sorted_and_at_any_depth, "SizesAreRounded", list=lambda s, prefix: [
    replace(i, size_bytes=-(-i.size_bytes // 4) * 4) for i in s.inner.list(prefix)])
for name, now_s in {"HasNoClock": 0.0, "ClockStands": time.time()}.items():
    broken(check.the_clock_of_the_store_goes, name,
           stat=lambda s, name, now_s=now_s: replace(s.inner.stat(name), modified_s=now_s),
           list=lambda s, prefix, now_s=now_s: [
               replace(info, modified_s=now_s) for info in s.inner.list(prefix)],
           store_time_s=lambda s, now_s=now_s: now_s)
broken(check.delete_removes_what_is_named_and_nothing_else, "Forgetful",
       delete=lambda s, names: s.inner.delete(names[:-1]))
broken(check.delete_removes_what_is_named_and_nothing_else, "DeletesByPrefix",
       delete=delete_folders)
broken(check.delete_removes_what_is_named_and_nothing_else, "StopsAtWhatIsMissing",
       delete=lambda s, names: [(s.inner.stat(name), s.inner.delete([name])) for name in names])
broken(check.malformed_names_are_refused_everywhere, "TakesAnyName",
       publish=ignoring(Good.publish))
broken(check.malformed_names_are_refused_everywhere, "TakesAnyPrefix",
       list=lambda s, prefix: ignoring(Good.list)(s, prefix) or [])
broken(check.what_was_stored_outlives_the_instance, "ForgetsOnClose", close=forget)
broken(check.close_may_be_repeated_and_ends_all_use, "WorksAfterClose", close=lambda s: None)
broken(check.close_may_be_repeated_and_ends_all_use, "ClosesOnce", close=close_once)

check = published
broken(check.its_url_shows_where_it_is_and_no_credentials, "ShowsItsPassword",
       url="wrapper://me:hunter2@host/run")
broken(check.its_url_shows_where_it_is_and_no_credentials, "ShowsItsToken",
       url="wrapper://host/run?access_token=hunter2")
broken(check.its_url_shows_where_it_is_and_no_credentials, "ShowsAnotherScheme", Own,
       url="http://host/run")
broken(check.its_url_means_the_same_store, "TakesNoUrl", Own, from_url=classmethod(
    lambda cls, url, options, /: cls.Config.model_validate({"url": url, **options})))
broken(check.its_url_means_the_same_store, "GivesItsOptionsAsADict", Own,
       from_url=classmethod(lambda cls, url, options, /: {"name": url}))
broken(check.free_bytes_is_a_number_of_bytes_or_none, "FreeInHalves", free_bytes=lambda s: 0.5)
broken(check.free_bytes_is_a_number_of_bytes_or_none, "LessThanNothingIsFree",
       free_bytes=lambda s: -1)
broken(check.direct_io_leaves_the_page_cache_alone, "WishesForDirectIo", WishesForDirectIo)
broken(check.sweep_takes_nothing_that_has_a_name_or_is_young, "SweepsEverything",
       sweep=lambda s, before_s: s.inner.delete([info.name for info in s.inner.list("data/")]))
broken(check.sweep_takes_nothing_that_has_a_name_or_is_young, "SweepCounts",
       sweep=lambda s, before_s: 0)
broken(check.what_a_crash_leaves_is_listed_and_can_be_deleted, "HidesWhatIsUnfinished", Files,
       list=lambda s, prefix: [
           i for i in Files.list(s, prefix) if not i.name.endswith("crashed.raw")])
broken(check.it_says_which_version_of_the_contract_it_is_for, "InheritsItsVersion", WrapperBackend)
broken(check.it_says_which_version_of_the_contract_it_is_for, "OtherVersion", api_version=2)
broken(check.its_methods_take_the_arguments_of_the_contract, "TakesNoPrefix",
       list=lambda s: s.inner.list(""))

check = forks
broken(check.what_was_sealed_or_published_outlives_a_killed_process, "RecordsWaitForClose",
       WritesWhenClosed)
broken(check.what_was_sealed_or_published_outlives_a_killed_process, "SealsWaitForClose",
       SealsWhenClosed)
broken(check.what_was_sealed_or_published_outlives_a_killed_process, "LivesInMemoryWithoutAWord",
       capabilities=declaring(outlives_process=True))
broken(check.synced_bytes_outlive_a_killed_process, "SyncsWhenClosed", SyncsWhenClosed)
broken(check.of_processes_in_a_race_exactly_one_wins, "DecidesByALock", DecidesByALock)
broken(check.of_processes_in_a_race_exactly_one_wins, "FailsInARace", Files,
       publish=translating(BlobExistsError, StorageError, Files.publish))
# fmt: on


def test_suite_catches(tmp_path, waits):
    waits(store_tick_s=0.05)  # the timeout of broken ones
    for name, (check, mutant) in MUTANTS.items():
        with pytest.raises(AssertionError, match=r"\S+ \S+ \S+"):  # in words
            check(root_of(mutant, tmp_path / name))


def test_every_check_has_a_defect_only_it_finds():
    assert {check for check, _ in MUTANTS.values()} == set(BACKEND_CHECKS)


def test_failure_names_its_check(tmp_path):
    with pytest.raises(AssertionError, match="the first difference is at 7") as caught:
        check_backend(root_of(MUTANTS["ShortRead"][1], tmp_path))
    note = "while checking that blob of one small request reads back"
    assert caught.value.__notes__ == [note]


# -- undeclared features of an instance ---------------------------------------------------------


class AppendsInOrder(Good):
    """A store that only appends: gaps are filled, earlier offsets are refused."""

    class Writer(Good.Writer):
        lock = threading.Lock()

        def write(self, requests, /):
            with self.lock:
                for request in requests:
                    if request.offset < self.end:
                        raise StorageError("out of order")
                    super().write([request])

    def submit_write(self, writer, requests, /):
        done = Future()
        try:
            done.set_result(writer.write(requests))
        except StorageError as error:
            done.set_exception(error)
        return done


class ModestAndOrdered(AppendsInOrder):
    capabilities = declaring(ordered=True, exclusive_publish=False)
    publish = look_then_put(Good.publish)


def test_undeclared_or_untestable_features_are_skipped_by_name(tmp_path):
    open_root = refuses_forks(tmp_path, ModestAndOrdered)
    left_out = check_backend(open_root)
    crash = published.what_a_crash_leaves_is_listed_and_can_be_deleted
    undeclared = {
        blobs.batches_from_threads_read_back,
        published.of_publishers_in_a_race_exactly_one_wins,
    }
    names = {check.__name__ for check in undeclared}
    assert set(left_out) == {*names, DIRECT, crash.__name__, *OF_PROCESSES}
    for check in undeclared:
        with pytest.raises(NotDeclaredError, match="does not declare"):
            check(open_root)
    with pytest.raises(NotTriedError, match="blob: StorageError: the connection is another pro"):
        crash(open_root)


def test_declarations_are_checked(tmp_path):
    with pytest.raises(AssertionError, match="out of order"):
        blobs.batches_from_threads_read_back(root_of(AppendsInOrder, tmp_path))


@pytest.mark.parametrize(
    "skip", [lambda: pytest.skip("no server"), lambda: unittest.TestCase().skipTest("no server")]
)
def test_skipped_check_is_a_failure(skip, tmp_path):
    def open_root(root):
        if root == "one":
            skip()
        return root_of(Good, tmp_path)(root)

    with pytest.raises(BaseException, match="skipped the") as caught:  # or this would be skipped
        check_backend(open_root)
    assert caught.type is AssertionError
    assert "one small request reads back" in caught.value.__notes__[0]


def refuses_forks(tmp_path, cls):
    """Like one whose connection belongs to the process that opened it."""
    parent = os.getpid()

    def open_root(root):
        if os.getpid() != parent:
            raise StorageError("the connection is another process's")
        return root_of(cls, tmp_path)(root)

    return open_root


def test_crash_of_a_signaled_process_is_not_tried(tmp_path):
    parent = os.getpid()

    def open_root(root):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return root_of(Good, tmp_path)(root)

    with pytest.raises(NotTriedError, match="signal 9 ended it"):
        published.what_a_crash_leaves_is_listed_and_can_be_deleted(open_root)


# -- without pytest -----------------------------------------------------------------------------

ALONE = """
    import sys

    sys.modules["pytest"] = sys.modules["_pytest"] = None  # importing either fails from here on
    from penstock.backends.memory import MemoryBackend, MemoryConfig
    from penstock.codecs.zstd import ZstdCodec, ZstdConfig
    from penstock.core.plugins.registry import default_registry
    from penstock.testing import faults
    from penstock.testing.backends import check_backend
    from penstock.testing.codecs import check_codec
    from penstock.testing.providers import check_provider

    left_out = check_backend(lambda root: MemoryBackend(MemoryConfig(name=root)))
    assert all("process" in name or "direct_io" in name for name in left_out), left_out
    check_codec(ZstdCodec(ZstdConfig(level=1)))

    import numpy

    check_provider(
        lambda: numpy.arange(5.0),
        lambda array: array.fill(7.0),
        lambda a, b: numpy.array_equal(a, b),
        providers=default_registry().providers,
    )
    print("all three passed")
"""


def test_suites_need_no_pytest():
    done = interpreters.run("-W", "error", "-c", textwrap.dedent(ALONE))
    assert done.stdout == "all three passed\n", done.stderr
