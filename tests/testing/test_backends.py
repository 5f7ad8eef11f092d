"""The suite for backends catches every way that we know of to break the contract."""

from __future__ import annotations

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
    FormatError,
    StorageError,
)
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.backends import BACKEND_CHECKS, check_backend
from penstock.testing.backends.blobs import (
    a_finished_writer_takes_no_more,
    an_abort_leaves_a_later_blob_of_its_name_alone,
    an_aborted_blob_can_be_deleted_and_made_again,
    another_instance_sees_sealed_blobs,
    batches_from_threads_read_back,
    batches_in_the_background_read_back,
    blob_of_one_small_request_reads_back,
    buffers_are_free_after_write_returns,
    buffers_are_only_lent,
    capabilities_are_sane_and_steady,
    create_never_takes_an_existing_name,
    empty_blob_can_be_sealed,
    gaps_read_as_zero,
    gathered_buffers_read_back,
    many_small_requests_read_back,
    more_buffers_than_a_system_call_takes_read_back,
    odd_offsets_lengths_and_addresses_read_back,
    one_large_request_reads_back,
    other_threads_run_during_writes_and_reads,
    reading_what_is_not_there_says_so,
    reads_fill_many_targets_from_several_blobs,
    reads_touch_nothing_around_the_target,
    seal_cuts_to_length,
    writing_does_not_change_the_source,
)
from penstock.testing.backends.forks import (
    of_processes_in_a_race_exactly_one_wins,
    what_was_sealed_or_published_outlives_a_killed_process,
)
from penstock.testing.backends.published import (
    a_reader_never_sees_a_torn_record,
    a_record_larger_than_allowed_is_refused,
    close_may_be_repeated_and_ends_all_use,
    delete_removes_what_is_named_and_nothing_else,
    direct_io_leaves_the_page_cache_alone,
    exclusive_publish_never_replaces,
    free_bytes_is_a_number_of_bytes_or_none,
    it_says_which_version_of_the_contract_it_is_for,
    its_methods_take_the_arguments_of_the_contract,
    its_url_means_the_same_store,
    its_url_shows_where_it_is_and_no_credentials,
    list_is_by_prefix_sorted_and_at_any_depth,
    malformed_names_are_refused_everywhere,
    of_publishers_in_a_race_exactly_one_wins,
    published_records_read_back,
    stat_tells_size_and_the_time_of_the_store,
    sweep_takes_nothing_that_has_a_name_or_is_young,
    the_clock_of_the_store_goes,
    what_a_crash_leaves_is_listed_and_can_be_deleted,
    what_was_stored_outlives_the_instance,
)
from penstock.testing.expectations import NotDeclaredError, NotTriedError
from penstock.testing.faults import WrapperBackend


class Good(WrapperBackend):
    """As a third party's, around a store that keeps the contract."""

    api_version = 1

    def create(self, name, /, *, size_hint=None):
        return self.Writer(self.inner.create(name, size_hint=size_hint))

    class Writer(BlobWriter):
        def __init__(self, inner):
            self.inner = inner

        def write(self, requests, /):
            self.inner.write(requests)

        def seal(self, length, /):
            self.inner.seal(length)

        def abort(self):
            self.inner.abort()


MUTANTS = {}


def caught_by(check):
    def add(mutant):
        MUTANTS[mutant] = check
        return mutant

    return add


def root_of(cls, tmp_path):
    return lambda root: cls(MemoryBackend(MemoryConfig(name=f"{tmp_path}/{root}")))


DIRECT = "direct_io_leaves_the_page_cache_alone"
# Memory of this process tells no other process anything, and says so.
OF_PROCESSES = (
    "what_was_sealed_or_published_outlives_a_killed_process",
    "of_processes_in_a_race_exactly_one_wins",
)


# -- blobs --------------------------------------------------------------------------------------


@caught_by(buffers_are_free_after_write_returns)
class KeepsBuffers(Good):
    class Writer(Good.Writer):
        def __init__(self, inner):
            super().__init__(inner)
            self.kept = []

        def write(self, requests, /):
            self.kept += requests

        def seal(self, length, /):
            self.inner.write(self.kept)
            self.inner.seal(length)


@caught_by(buffers_are_only_lent)
class KeepsWhatItWrote(Good):
    """For a retry that never comes: the memory cannot be given back."""

    class Writer(Good.Writer):
        def write(self, requests, /):
            self.inner.write(requests)
            self.last = requests


@caught_by(buffers_are_only_lent)
class KeepsTargets(Good):
    def read(self, requests, /):
        self.inner.read(requests)
        self.last = [request.target for request in requests]


@caught_by(other_threads_run_during_writes_and_reads)
class HoldsTheGil(Good):
    class Writer(Good.Writer):
        def write(self, requests, /):
            ctypes.PyDLL(None).usleep(40_000)
            self.inner.write(requests)


@caught_by(writing_does_not_change_the_source)
class ChangesSource(Good):
    class Writer(Good.Writer):
        def write(self, requests, /):
            self.inner.write(requests)
            for request in requests:
                for buffer in request.buffers:
                    if buffer.nbytes and not buffer.readonly:
                        buffer[0] ^= 1


@caught_by(gathered_buffers_read_back)
class FirstBufferOnly(Good):
    class Writer(Good.Writer):
        def write(self, requests, /):
            self.inner.write([WriteRequest(r.offset, r.buffers[:1]) for r in requests])


@caught_by(more_buffers_than_a_system_call_takes_read_back)
class LimitedVector(Good):
    class Writer(Good.Writer):
        def write(self, requests, /):
            self.inner.write([WriteRequest(r.offset, r.buffers[:1024]) for r in requests])


@caught_by(batches_in_the_background_read_back)
class BackgroundWritesAreLost(Good):
    def submit_write(self, writer, requests, /):
        done = Future()
        done.set_result(None)
        return done


@caught_by(many_small_requests_read_back)
class LastRequestLost(Good):
    class Writer(Good.Writer):
        def write(self, requests, /):
            self.inner.write(requests[:-1] if len(requests) > 1000 else requests)


@caught_by(odd_offsets_lengths_and_addresses_read_back)
class AppendsOnly(Good):
    class Writer(Good.Writer):
        end = 0

        def write(self, requests, /):
            for request in requests:
                self.inner.write([WriteRequest(self.end, request.buffers)])
                self.end += request.length


@caught_by(gaps_read_as_zero)
class GapsAreNotZero(Good):
    class Writer(Good.Writer):
        end = 0

        def write(self, requests, /):
            for request in requests:
                gap = request.offset - self.end
                if gap > 0:
                    self.inner.write([WriteRequest(self.end, (memoryview(b"\xff" * gap),))])
                self.inner.write([request])
                self.end = request.offset + request.length


@caught_by(gaps_read_as_zero)
class TailIsNotZero(Good):
    class Writer(Good.Writer):
        end = 0

        def write(self, requests, /):
            self.inner.write(requests)
            self.end = max([self.end, *(r.offset + r.length for r in requests)])

        def seal(self, length, /):
            if length > self.end:
                junk = memoryview(b"\xff" * (length - self.end))
                self.inner.write([WriteRequest(self.end, (junk,))])
            self.inner.seal(length)


@caught_by(seal_cuts_to_length)
class SealIgnoresLength(Good):
    class Writer(Good.Writer):
        end = 0

        def write(self, requests, /):
            self.inner.write(requests)
            self.end = max([self.end, *(r.offset + r.length for r in requests)])

        def seal(self, length, /):
            self.inner.seal(max(length, self.end))


@caught_by(empty_blob_can_be_sealed)
class EmptyBlobsVanish(Good):
    class Writer(Good.Writer):
        def seal(self, length, /):
            if length:
                self.inner.seal(length)
            else:
                self.inner.abort()


@caught_by(batches_from_threads_read_back)
class NotThreadSafe(Good):
    class Writer(Good.Writer):
        busy = False

        def write(self, requests, /):
            if self.busy:
                return
            self.busy = True
            time.sleep(0.001)
            self.inner.write(requests)
            self.busy = False


@caught_by(a_finished_writer_takes_no_more)
class WritesAfterSeal(Good):
    class Writer(Good.Writer):
        def write(self, requests, /):
            with suppress(StorageError):
                self.inner.write(requests)


@caught_by(a_finished_writer_takes_no_more)
class SealsTwice(Good):
    class Writer(Good.Writer):
        def seal(self, length, /):
            with suppress(StorageError):
                self.inner.seal(length)


@caught_by(a_finished_writer_takes_no_more)
class AbortDeletesSealed(Good):
    def create(self, name, /, *, size_hint=None):
        made = super().create(name, size_hint=size_hint)
        abort = made.abort
        made.abort = lambda: (abort(), self.inner.delete([name]))
        return made


@caught_by(an_aborted_blob_can_be_deleted_and_made_again)
class AbortRaisesAgain(Good):
    class Writer(Good.Writer):
        aborted = False

        def abort(self):
            if self.aborted:
                raise StorageError("aborted already")
            self.aborted = True
            self.inner.abort()


@caught_by(an_abort_leaves_a_later_blob_of_its_name_alone)
class AbortDeletesByName(Good):
    class Writer(Good.Writer):
        name, store = "", None

        def abort(self):
            self.inner.abort()
            self.store.delete([self.name])

    def create(self, name, /, *, size_hint=None):
        made = super().create(name, size_hint=size_hint)
        made.name, made.store = name, self.inner
        return made


@caught_by(create_never_takes_an_existing_name)
class CreatesOverOthers(Good):
    def create(self, name, /, *, size_hint=None):
        with suppress(StorageError):
            self.inner.delete([name])
        return super().create(name, size_hint=size_hint)


@caught_by(create_never_takes_an_existing_name)
class NameIsFreeUntilSealed(Good):
    def create(self, name, /, *, size_hint=None):
        try:
            return super().create(name, size_hint=size_hint)
        except BlobExistsError:
            with suppress(BlobNotFoundError):
                self.inner.stat(name)
                raise
            return super().create(name + ".again", size_hint=size_hint)


# -- reads --------------------------------------------------------------------------------------


@caught_by(blob_of_one_small_request_reads_back)
class ShortRead(Good):
    def read(self, requests, /):
        self.inner.read([ReadRequest(r.name, r.offset, r.target[:-1]) for r in requests])


@caught_by(one_large_request_reads_back)
class LimitedRead(Good):
    """As `preadv` does it: one call moves 2 GiB at most, here less."""

    def read(self, requests, /):
        limit = 8 << 20
        self.inner.read([ReadRequest(r.name, r.offset, r.target[:limit]) for r in requests])


@caught_by(reads_fill_many_targets_from_several_blobs)
class OneBlobPerBatch(Good):
    def read(self, requests, /):
        self.inner.read([ReadRequest(requests[0].name, r.offset, r.target) for r in requests])


@caught_by(reads_touch_nothing_around_the_target)
class ReadsOneTooMany(Good):
    def read(self, requests, /):
        self.inner.read(requests)
        for request in requests:
            memory, view = request.target.obj, request.target
            if isinstance(memory, bytearray) and len(memory) > view.nbytes + 200:
                whole = memoryview(memory)
                at = bytes(whole).find(bytes(view)) + view.nbytes
                if 0 < at < len(whole):
                    whole[at] ^= 1


@caught_by(reading_what_is_not_there_says_so)
class PadsBehindTheEnd(Good):
    def read(self, requests, /):
        for request in requests:
            try:
                self.inner.read([request])
            except BlobTruncatedError:
                request.target[:] = bytes(request.target.nbytes)


@caught_by(reading_what_is_not_there_says_so)
class OneErrorForAll(Good):
    def read(self, requests, /):
        try:
            self.inner.read(requests)
        except StorageError as error:
            raise StorageError(str(error)) from error


@caught_by(stat_tells_size_and_the_time_of_the_store)
class ForeignError(Good):
    def stat(self, name, /):
        try:
            return self.inner.stat(name)
        except BlobNotFoundError as error:
            raise KeyError(name) from error


@caught_by(reading_what_is_not_there_says_so)
class BackgroundErrorsAreLost(Good):
    def submit_read(self, requests, /):
        done = Future()
        with suppress(StorageError):
            self.read(requests)
        done.set_result(None)
        return done


@caught_by(a_record_larger_than_allowed_is_refused)
class RecordLimitIsIgnored(Good):
    def read_record(self, name, /, *, limit_bytes):
        return self.inner.read_record(name, limit_bytes=1 << 40)


@caught_by(a_record_larger_than_allowed_is_refused)
class CutsRecordsAtTheLimit(Good):
    def read_record(self, name, /, *, limit_bytes):
        try:
            return self.inner.read_record(name, limit_bytes=limit_bytes)
        except FormatError:
            return self.inner.read_record(name, limit_bytes=1 << 40)[:limit_bytes]


# -- records ------------------------------------------------------------------------------------


@caught_by(exclusive_publish_never_replaces)
class ExclusiveIsIgnored(Good):
    def publish(self, name, data, /, *, exclusive=False):
        self.inner.publish(name, data)


@caught_by(of_publishers_in_a_race_exactly_one_wins)
class LooksThenPuts(Good):
    def publish(self, name, data, /, *, exclusive=False):
        if exclusive:
            with suppress(BlobNotFoundError):
                self.inner.stat(name)
                raise BlobExistsError(name)
            time.sleep(0.001)
        self.inner.publish(name, data)


@caught_by(published_records_read_back)
class NeverReplaces(Good):
    def publish(self, name, data, /, *, exclusive=False):
        self.inner.publish(name, data, exclusive=True)


@caught_by(a_reader_never_sees_a_torn_record)
class PublishesInHalves(Good):
    def publish(self, name, data, /, *, exclusive=False):
        if not exclusive:
            self.inner.publish(name, data[: len(data) // 2])
        self.inner.publish(name, data, exclusive=exclusive)


@caught_by(list_is_by_prefix_sorted_and_at_any_depth)
class TemporariesAreListed(Good):
    def publish(self, name, data, /, *, exclusive=False):
        self.inner.publish(name, data, exclusive=exclusive)
        self.inner.publish(f"{name}.tmp", data)


# -- names --------------------------------------------------------------------------------------


@caught_by(list_is_by_prefix_sorted_and_at_any_depth)
class Unsorted(Good):
    def list(self, prefix, /):
        return list(reversed(self.inner.list(prefix)))


@caught_by(list_is_by_prefix_sorted_and_at_any_depth)
class PrefixIsAFolder(Good):
    def list(self, prefix, /):
        folder = prefix if prefix.endswith("/") or not prefix else prefix + "/"
        return self.inner.list(folder)


@caught_by(another_instance_sees_sealed_blobs)
class ListsOneLevel(Good):
    def list(self, prefix, /):
        return [i for i in self.inner.list(prefix) if "/" not in i.name[len(prefix) :]]


@caught_by(list_is_by_prefix_sorted_and_at_any_depth)
class SizesAreRounded(Good):
    def list(self, prefix, /):
        return [replace(i, size_bytes=-(-i.size_bytes // 4) * 4) for i in self.inner.list(prefix)]


@caught_by(stat_tells_size_and_the_time_of_the_store)
class TimesAreOurs(Good):
    def stat(self, name, /):
        return replace(self.inner.stat(name), modified_s=time.time() + 3600)

    def store_time_s(self):
        return time.time()


@caught_by(the_clock_of_the_store_goes)
class HasNoClock(Good):
    def stat(self, name, /):
        return replace(self.inner.stat(name), modified_s=0.0)

    def list(self, prefix, /):
        return [replace(info, modified_s=0.0) for info in self.inner.list(prefix)]

    def store_time_s(self):
        return 0.0


@caught_by(the_clock_of_the_store_goes)
class ClockStands(Good):
    """As one that keeps the time of when it was opened."""

    now_s = time.time()

    def stat(self, name, /):
        return replace(self.inner.stat(name), modified_s=self.now_s)

    def store_time_s(self):
        return self.now_s


@caught_by(delete_removes_what_is_named_and_nothing_else)
class Forgetful(Good):
    def delete(self, names, /):
        self.inner.delete(names[:-1])


@caught_by(delete_removes_what_is_named_and_nothing_else)
class DeletesByPrefix(Good):
    def delete(self, names, /):
        for name in names:
            self.inner.delete([i.name for i in self.inner.list(name.rpartition("/")[0])])


@caught_by(delete_removes_what_is_named_and_nothing_else)
class StopsAtWhatIsMissing(Good):
    def delete(self, names, /):
        for name in names:
            self.inner.stat(name)
            self.inner.delete([name])


@caught_by(malformed_names_are_refused_everywhere)
class TakesAnyName(Good):
    def publish(self, name, data, /, *, exclusive=False):
        with suppress(StorageError):
            self.inner.publish(name, data, exclusive=exclusive)


@caught_by(malformed_names_are_refused_everywhere)
class TakesAnyPrefix(Good):
    def list(self, prefix, /):
        try:
            return self.inner.list(prefix)
        except StorageError:
            return []


# -- the instance -------------------------------------------------------------------------------


@caught_by(what_was_stored_outlives_the_instance)
class ForgetsOnClose(Good):
    def close(self):
        self.inner.delete([i.name for i in self.inner.list("")] if not self.inner._closed else [])
        super().close()


@caught_by(close_may_be_repeated_and_ends_all_use)
class WorksAfterClose(Good):
    def close(self):
        """Nothing is given back."""


@caught_by(close_may_be_repeated_and_ends_all_use)
class ClosesOnce(Good):
    closed = False

    def close(self):
        if self.closed:
            raise StorageError("closed already")
        self.closed = True
        super().close()


@caught_by(capabilities_are_sane_and_steady)
class AlignmentIsNoPowerOfTwo(Good):
    @property
    def capabilities(self):
        return replace(self.inner.capabilities, memory_alignment=48)


@caught_by(capabilities_are_sane_and_steady)
class CapabilitiesChange(Good):
    asked = 0

    @property
    def capabilities(self):
        self.asked += 1
        return replace(self.inner.capabilities, preferred_parallel=self.asked)


@caught_by(its_url_shows_where_it_is_and_no_credentials)
class ShowsItsPassword(Good):
    url = "wrapper://me:hunter2@host/run"


@caught_by(its_url_shows_where_it_is_and_no_credentials)
class ShowsItsToken(Good):
    url = "wrapper://host/run?access_token=hunter2"


class Own(MemoryBackend):
    """Opened by its URL, as one that is installed."""

    api_version = 1

    def __init__(self, inner):
        super().__init__(inner if isinstance(inner, MemoryConfig) else MemoryConfig(name=inner.url))


@caught_by(its_url_shows_where_it_is_and_no_credentials)
class ShowsAnotherScheme(Own):
    url = "http://host/run"


@caught_by(its_url_means_the_same_store)
class TakesNoUrl(Own):
    @classmethod
    def from_url(cls, url, options, /):
        return cls.Config.model_validate({"url": url, **options})


@caught_by(its_url_means_the_same_store)
class GivesItsOptionsAsADict(Own):
    @classmethod
    def from_url(cls, url, options, /):
        return {"name": url}


@caught_by(free_bytes_is_a_number_of_bytes_or_none)
class FreeInHalves(Good):
    def free_bytes(self):
        return 0.5


@caught_by(free_bytes_is_a_number_of_bytes_or_none)
class LessThanNothingIsFree(Good):
    def free_bytes(self):
        return -1


@caught_by(direct_io_leaves_the_page_cache_alone)
class WishesForDirectIo(PosixBackend):
    """Says what it was told to say, and opens its files as anybody does."""

    api_version = 1

    def __init__(self, inner):
        path = "/" + inner.url.partition("://")[2].strip("/")
        super().__init__(PosixConfig(path=path, direct_io="off"))

    @property
    def capabilities(self):
        return replace(super().capabilities, direct_io=True)


@caught_by(sweep_takes_nothing_that_has_a_name_or_is_young)
class SweepsEverything(Good):
    def sweep(self, before_s, /):
        self.inner.delete([info.name for info in self.inner.list("data/")])


@caught_by(sweep_takes_nothing_that_has_a_name_or_is_young)
class SweepCounts(Good):
    def sweep(self, before_s, /):
        return 0


class Files(PosixBackend):
    """As a third party's, in files: other processes see what is in them."""

    api_version = 1

    def __init__(self, inner):
        super().__init__(PosixConfig(path="/" + inner.url.partition("://")[2].strip("/")))


@caught_by(what_a_crash_leaves_is_listed_and_can_be_deleted)
class HidesWhatIsUnfinished(Files):
    def list(self, prefix, /):
        return [i for i in super().list(prefix) if not i.name.endswith("crashed.raw")]


@caught_by(capabilities_are_sane_and_steady)
class NoAlignmentIsZero(Good):
    @property
    def capabilities(self):
        return replace(self.inner.capabilities, offset_alignment=0)


@caught_by(it_says_which_version_of_the_contract_it_is_for)
class InheritsItsVersion(WrapperBackend):
    """Says nothing of the contract that it was written for."""


@caught_by(it_says_which_version_of_the_contract_it_is_for)
class OtherVersion(Good):
    api_version = 2


@caught_by(its_methods_take_the_arguments_of_the_contract)
class TakesNoPrefix(Good):
    def list(self):
        return self.inner.list("")


# -- other processes ----------------------------------------------------------------------------


class WritesBack(Files):
    """Answers at once, from memory of its own."""

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


@caught_by(what_was_sealed_or_published_outlives_a_killed_process)
class WritesRecordsWhenClosed(WritesBack):
    """Keeps records that may be replaced."""


@caught_by(what_was_sealed_or_published_outlives_a_killed_process)
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


@caught_by(what_was_sealed_or_published_outlives_a_killed_process)
class LivesInMemoryWithoutAWord(Good):
    @property
    def capabilities(self):
        return replace(self.inner.capabilities, outlives_process=True)


@caught_by(of_processes_in_a_race_exactly_one_wins)
class DecidesByALock(Files):
    """Right among threads, which is all that it was tried with."""

    lock = threading.Lock()

    def publish(self, name, data, /, *, exclusive=False):
        with self.lock:
            if exclusive:
                with suppress(BlobNotFoundError):
                    self.stat(name)
                    raise BlobExistsError(name)
            super().publish(name, data)


@caught_by(of_processes_in_a_race_exactly_one_wins)
class FailsInARace(Files):
    def publish(self, name, data, /, *, exclusive=False):
        try:
            super().publish(name, data, exclusive=exclusive)
        except BlobExistsError as error:
            raise StorageError("it was taken meanwhile") from error


def test_suite_catches(tmp_path, waits):
    waits(store_tick_s=0.05)  # how long broken ones get
    for mutant, check in MUTANTS.items():
        with pytest.raises(AssertionError, match=r"\S+ \S+ \S+"):  # in words
            check(root_of(mutant, tmp_path / mutant.__name__))


def test_no_check_is_without_a_defect_that_only_it_is_for():
    assert set(MUTANTS.values()) == set(BACKEND_CHECKS)


def test_failure_says_what_was_checked(tmp_path):
    with pytest.raises(AssertionError, match="the first difference is at 7") as caught:
        check_backend(root_of(ShortRead, tmp_path))
    note = "while checking that blob of one small request reads back"
    assert caught.value.__notes__ == [note]


# -- what an instance does not declare ----------------------------------------------------------


class Modest(LooksThenPuts):
    @property
    def capabilities(self):
        return replace(self.inner.capabilities, exclusive_publish=False)


class Ordered(Good):
    """A store that only appends: gaps are filled, what lies behind is refused."""

    @property
    def capabilities(self):
        return replace(self.inner.capabilities, ordered=True)

    class Writer(Good.Writer):
        end = 0

        def __init__(self, inner):
            super().__init__(inner)
            self.lock = threading.Lock()

        def write(self, requests, /):
            with self.lock:
                for request in requests:
                    if request.offset < self.end:
                        raise StorageError("out of order")
                    self.inner.write([request])
                    self.end = request.offset + request.length

    def submit_write(self, writer, requests, /):
        done = Future()
        try:
            done.set_result(writer.write(requests))
        except StorageError as error:
            done.set_exception(error)
        return done


class ModestAndOrdered(Ordered, Modest):
    @property
    def capabilities(self):
        return replace(self.inner.capabilities, ordered=True, exclusive_publish=False)


def test_what_is_not_declared_or_cannot_be_tried_is_left_out_by_name(tmp_path):
    open_root = refuses_forks(tmp_path, ModestAndOrdered)
    left_out = check_backend(open_root)
    crash = what_a_crash_leaves_is_listed_and_can_be_deleted
    undeclared = {batches_from_threads_read_back, of_publishers_in_a_race_exactly_one_wins}
    names = {check.__name__ for check in undeclared}
    assert set(left_out) == {*names, DIRECT, crash.__name__, *OF_PROCESSES}
    for check in undeclared:
        with pytest.raises(NotDeclaredError, match="does not declare"):
            check(open_root)
    with pytest.raises(NotTriedError, match="blob: StorageError: the connection is another pro"):
        crash(open_root)


class UndeclaredOrder(Ordered):
    @property
    def capabilities(self):
        return self.inner.capabilities


def test_what_is_declared_is_checked(tmp_path):
    with pytest.raises(AssertionError, match="out of order"):
        batches_from_threads_read_back(root_of(UndeclaredOrder, tmp_path))


@pytest.mark.parametrize(
    "skip", [lambda: pytest.skip("no server"), lambda: unittest.TestCase().skipTest("no server")]
)
def test_skipped_check_is_a_failure(skip, tmp_path):
    def open_root(root):
        if root == "one":
            skip()
        return root_of(Good, tmp_path)(root)

    with pytest.raises(BaseException, match="was skipped") as caught:  # else this were skipped
        check_backend(open_root)
    assert caught.type is AssertionError
    assert "one small request reads back" in caught.value.__notes__[0]


def refuses_forks(tmp_path, cls):
    """As one whose connection belongs to the process that made it."""
    parent = os.getpid()

    def open_root(root):
        if os.getpid() != parent:
            raise StorageError("the connection is another process's")
        return root_of(cls, tmp_path)(root)

    return open_root


def test_crash_of_a_process_that_a_signal_ends_is_not_tried(tmp_path):
    parent = os.getpid()

    def open_root(root):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return root_of(Good, tmp_path)(root)

    with pytest.raises(NotTriedError, match="signal 9 ended it"):
        what_a_crash_leaves_is_listed_and_can_be_deleted(open_root)


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
