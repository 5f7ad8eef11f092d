"""Hosts with memory, and jobs that save on them, on a virtual clock, with faults from a seed.

The roots of the hosts are joined by the product's `HostsBackend`; its `HostCopies` chooses what is
copied and what stays; its `Catalog` finds, deletes, rewinds and prunes. The jobs here only write
files, and copy those that rank 0 orders. Each operation on a root takes time, during which other
tasks go on, and may be the last of the job. Hosts lose their memory, alone or in pairs; they are
cut off, slow or full, lose answers, or have a truncated file. Jobs are killed while the hosts keep
their files, and start again on fewer, more or other hosts, some with old files.

`World.check` looks at the hosts as a job that started now on any of them would.

By hand, from the root:

    python -m tests.core.replicas.simulation 0 10000
"""

import heapq
import itertools
import json
import logging
import random
import sys
import time
from collections import Counter, namedtuple
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

from penstock.backends.hosts import HostsBackend, HostsConfig
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.abc import HOST_NAME, DelegatingBackend, HostRoot, read_host
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.retention import clean_up_after
from penstock.core.catalog.survey import read_commit
from penstock.core.concurrency.timing import Clock, Timing, timing_in_force
from penstock.core.config.model import Retention
from penstock.core.errors import PenstockError, StorageError, StorageFullError
from penstock.core.format import records
from penstock.core.format.commit_record import encode_commit, encode_intent
from penstock.core.replicas.placement import group_hosts
from penstock.core.reporting.events import EventStream
from penstock.core.rounds.round import RankPlace
from penstock.core.tiers.host_copies import HostCopies
from penstock.core.types import ReadRequest

READS = {"read", "read_record", "list", "stat"}
WRITES = {"publish", "delete"}
WAIT_S = 8.0  # rank 0 waits this long for the other hosts
DIGEST = "ab" * 32
DURABLE = "durable"

Report = namedtuple("Report", "step generation uid")


class BrokenPromiseError(BaseException):
    """A promise did not hold in a simulated world. No handler of the product catches it."""


class KilledError(BaseException):
    """The process that made a call is dead."""


def memory():
    return MemoryBackend(MemoryConfig())


class Joined(HostsBackend):
    """Calls the hosts one after another, in an order from the seed, instead of on threads."""

    world = None

    def _called(self, roots, call):
        outcomes = {}
        for root in self.world.random.sample(roots, len(roots)):
            try:
                outcomes[root] = call(root.backend)
            except StorageError as error:
                outcomes[root] = error
        return [(root, outcomes[root]) for root in roots]


class Link(DelegatingBackend):
    """The root of a host, as the processes of a job reach it."""

    def __init__(self, job, host, inner):
        super().__init__(inner)
        self._job, self._host = job, host

    def around(self, operation, names, call, /):
        if operation not in READS | WRITES:
            return call()
        return self._job.world.reach(self._job, self._host, operation, names, call)


@dataclass
class Promise:
    """A checkpoint that is replicated, and the hosts lost since then; or one that is durable."""

    key: tuple
    uid: str
    groups: object = None
    lost: set = field(default_factory=set)

    def holds(self, absent=frozenset()):
        if self.groups is None:
            return True
        gone = self.lost | absent
        return all(len(gone.intersection(g)) < self.groups.size for g in self.groups.groups)


class World(Clock):
    """All hosts, the durable tier, the jobs one after another, and the clock."""

    def __init__(self, seed, hosts=None):
        self.random = random.Random(seed)
        self.now = self.skew_s = 0.0
        # Within an operation, other hosts and the thread that copies continue.
        self._tasks, self._threads, self._numbers = [], [], itertools.count()
        self._depth, self._is_main = 0, False
        self.at = None  # the host whose process runs
        self.copies = self.random.choice([1, 1, 1, 2, 3])
        self.size = hosts or self.random.choice([2, 2, 3, 4, 5, self.random.randint(2, 12)])
        self.pace = max(1.0, self.size / 12)  # calls of many hosts are made at once
        self.racks = self.random.choice([None, None, 2, 3])
        self.memories = {}
        self.durable = memory() if self.random.random() < 0.3 else None
        self.cut, self.lossy, self.full, self.slow = set(), set(), set(), set()
        self.hits = []  # when a host lost files
        self.files = {}  # uid -> the bytes of each file of the checkpoint
        self.uids, self.steps = {}, {}  # the bytes of a commit record -> uid -> step
        self.promises = {}
        self.deleting, self.gone = set(), set()  # uids
        self.highest = 0  # step of all jobs
        self.dead, self.settled = set(), 0  # uids that must not count any more, and since when
        self.job = None
        self.counts = Counter()

    # -- the clock

    def monotonic_s(self):
        return self.now

    def wall_s(self):
        return 1.7e9 + self.now + self.skew_s

    def spawn(self, task, host=None, job=None, *, nests=True, delay_s=0.0):
        heap = self._threads if nests else self._tasks
        entry = self.now + delay_s, next(self._numbers), task, host, job, nests
        heapq.heappush(heap, entry)

    def _step(self, heap):
        due_s, _, task, host, job, nests = heapq.heappop(heap)
        self.now = max(self.now, due_s)
        if job is not None and not job.runs_on(host):
            return
        if job is not None and job.place._deleting.locked() and host == job.lead:
            self.spawn(task, host, job, nests=nests, delay_s=0.01)  # may wait for the lock
            return
        outer, self.at = (self.at, self._is_main), host
        self._is_main |= not nests
        try:
            delay_s = next(task, None)
        except KilledError:
            return
        finally:
            self.at, self._is_main = outer
        if delay_s is not None:
            delay_s *= 10 if host in self.slow else 1
            self.spawn(task, host, job, nests=nests, delay_s=delay_s)

    def run(self, until_s=40.0):
        with timing_in_force(Timing(clock=self)):
            self.spawn(self._operator(), nests=False)
            self.spawn(self._faults())
            self._run(lambda: self.now > until_s)
            self.check()
            self._end()
        return self

    def _run(self, is_over):
        while not is_over():
            self._step(min(self._tasks, self._threads, key=lambda heap: heap[0][:2] or (1e9,)))

    def pass_time(self, host):
        self.now += self.random.expovariate(self.pace * (20 if host in self.slow else 200))
        if self._depth < 3:
            self._depth += 1
            for heap in [self._threads] if self._is_main else [self._threads, self._tasks]:
                while heap and heap[0][0] <= self.now:
                    self._step(heap)
            self._depth -= 1

    def some_s(self, most=1.0):
        return self.random.uniform(0.01, most)

    def reach(self, job, host, operation, names, call):
        """Call an operation on the root of a host, for the process that runs."""
        self.pass_time(host)
        if not job.runs_on(self.at):
            raise KilledError
        is_lost = False
        if host != self.at:
            pair = frozenset([host, self.at])
            if host in job.down or {host, self.at, pair} & self.cut:
                raise StorageError(f"{host} does not answer")
            is_lost = {host, self.at} & self.lossy and self.random.random() < 0.3
            if is_lost and self.random.random() < 0.5:
                raise StorageError(f"{host} has lost a request")
        if operation == "publish" and host in self.full:
            raise StorageFullError(f"{host} is full")
        if operation == "delete":
            self.before_deletion(host, names)
        if HOST_NAME in names and operation == "publish":
            self.begun(job)
        job.fuse -= self.at == job.lead
        if not job.fuse:
            job.kill()
            if self.random.random() < 0.5:
                raise KilledError
        result = call()
        if job.is_over:
            raise KilledError
        if is_lost:
            raise StorageError(f"the answer of {host} is lost")
        return result

    # -- the operator and the faults

    def _operator(self):
        """Start a job, and another one after its death, on some hosts."""
        while True:
            self.start(self._hosts())
            while not self.job.is_over:
                yield 1.0
            yield 2.0 + self.some_s(3.0)

    def start(self, hosts):
        for host in hosts:
            self.memories.setdefault(host, memory())
        self.skew_s = self.random.uniform(-0.5, 0.5)
        self.job = Job(self, hosts)
        self.counts["jobs"] += 1
        self.spawn(self.job.train(), self.job.lead, self.job, nests=False)

    def _hosts(self):
        names, number = sorted(self.memories), len(self.memories)
        new = (f"h{number + i:04d}" for i in itertools.count())
        names += itertools.islice(new, max(0, self.size - number))
        hosts, how = set(names[: self.size]), self.random.random()
        if self.job is not None:
            hosts = set(self.job.hosts)
            if how < 0.2:
                hosts |= set(names)
            elif how < 0.4:  # some are replaced by others
                some = min(len(hosts), self.random.randint(1, 1 + self.copies))
                hosts -= set(self.random.sample(sorted(hosts), some))
                hosts |= set(itertools.islice(new, some))
            elif how < 0.45:  # all are
                hosts = set(itertools.islice(new, self.size))
            elif how > 0.85 and len(names) > 2:
                hosts = set(self.random.sample(names, self.random.randint(2, len(names))))
        hosts |= set(itertools.islice(new, max(0, 2 - len(hosts))))
        return sorted(hosts)

    def _faults(self):
        kinds = ["kill", "stop", "lose", "lose", "pair", "many", "cut", "cut pair", "lossy"]
        kinds += ["slow", "full", "short"]
        pace_s = self.random.choice([4.0, 10.0, 25.0])
        while True:
            yield self.random.expovariate(1 / pace_s)
            if self.job.is_over:
                continue
            self._strike(self.random.choice(kinds))
            if self.random.random() < 0.5:
                self.check()

    def _strike(self, kind):
        self.counts[kind] += 1
        job, host = self.job, self.random.choice(self.job.hosts)
        group = next(g for g in job.groups().groups if host in g)
        pair = [host, self.random.choice(group)]
        many = self.random.sample(job.hosts, self.random.randint(1, len(job.hosts)))
        struck = {"pair": pair, "many": many}.get(kind, [host])
        states = {"cut": self.cut, "cut pair": self.cut, "lossy": self.lossy}
        states |= {"slow": self.slow, "full": self.full}
        if kind == "kill":
            job.kill()
        elif kind in states:
            what = frozenset(pair) if kind == "cut pair" else host
            states[kind].add(what)
            length_s = self.random.choice([1.0, 5.0, 20.0])
            self.spawn(self._later(lambda: states[kind].discard(what)), delay_s=length_s)
        elif kind == "short":
            self._shorten(host)
        else:
            if kind != "stop":
                self._lose(struck)
            job.down |= {*struck}
            if job.lead in struck:
                job.kill()
            else:  # the other processes find out later
                self.spawn(self._later(job.kill), delay_s=self.some_s(3.0))

    def _shorten(self, host):
        """Truncate a file, as after a power cut, which counts as the loss of the host."""
        root = self.memories[host]
        if infos := root.list("data/"):
            info = self.random.choice(infos)
            data = root.read_record(info.name, limit_bytes=info.size_bytes)
            root.publish(info.name, data[:-1])
            self._hit([host])

    @staticmethod
    def _later(act):
        act()
        yield from ()

    def _lose(self, hosts):
        for host in hosts:
            self.memories[host] = memory()
        self._hit(hosts)

    def _hit(self, hosts):
        self.hits += [(self.now, host) for host in hosts]
        for promise in self.promises.values():
            promise.lost |= {*hosts}

    # -- what must hold

    def newest_promise(self):
        return max(self.promises.values(), key=lambda p: p.key, default=None)

    def promise(self, key, uid, groups=None, since_s=0.0):
        """Note that the product calls a checkpoint replicated, or that it is durable."""
        held = self.promises.get(uid)
        if uid in self.deleting | self.gone or (held and held.groups is None):
            return
        promise = Promise(key, uid, groups)
        if groups is not None:
            others = [m for host, m in self.memories.items() if host not in self.job.hosts]
            if max(map(epoch_of, others), default=0) > self.job.place._newest:
                return  # does not count beside these hosts, before the job begins its epoch
            promise.lost = {host for at_s, host in self.hits if at_s >= since_s}
            for name, data in self.files[uid].items():
                holders = {h for h in self.job.hosts if content(self.memories[h], name) == data}
                if not groups.is_safe(holders | promise.lost):
                    raise BrokenPromiseError(f"{name} of {key} is only at {holders}")
        self.promises[uid] = promise

    def begun(self, job):
        """Note that the files of hosts outside a job do not count any more, whatever they have."""
        if job.newest < self.settled:  # no host of that epoch is in the job
            self.dead, self.settled = set(), 0
        for promise in self.promises.values():
            if promise.groups is not None:
                promise.lost |= {h for g in promise.groups.groups for h in g} - {*job.hosts}

    def before_delete(self, job, uids):
        """Note that checkpoints are about to be deleted, and check those that nobody named."""
        promise = self.newest_promise()
        if not job.is_asked and promise and promise.uid in uids and promise.holds():
            raise BrokenPromiseError(f"{promise} is deleted")
        self.deleting |= {*uids}
        steps = {self.steps[uid] for uid in uids if job.is_asked}  # `prune` deletes generations
        for uid, promise in [*self.promises.items()]:
            if uid in uids or promise.key[0] in steps:
                del self.promises[uid]

    def delete_failed(self, job, uids):
        self.deleting -= {*uids}
        if job.is_asked:  # what is left may count as the newest, so that older ones may go
            self.promises.clear()

    def before_deletion(self, host, names):
        promise = self.newest_promise()
        if promise is None or (promise.groups is None) != (host == DURABLE) or not promise.holds():
            return
        root = self.durable if host == DURABLE else self.memories[host]
        files = self.files[promise.uid]
        if any(name in files and content(root, name) == files[name] for name in names):
            raise BrokenPromiseError(f"{names} of {promise} are deleted")

    def deleted(self, job):
        """Note that the deletions so far are confirmed."""
        left = set() if self.durable is None else {*self.named([self.durable]).values()}
        if gone := self.deleting - left:
            self.dead |= gone
            self.gone |= gone
            self.settled = job.place._newest
            self.counts["deleted"] += len(gone)
        self.deleting.clear()

    def named(self, roots):
        """The uids of the commit records in some roots, by name."""
        found = {}
        for root in roots:
            for info in root.list(records.COMMIT_PREFIX):
                uid = self.uids[content(root, info.name)]
                if found.setdefault(info.name, uid) != uid:
                    raise BrokenPromiseError(f"{info.name} is {found[info.name]} and {uid}")
        return found

    def store(self, place, durable):
        if durable is None:
            return place
        return TieredBackend(
            TieredConfig(fast="memory://", durable="memory://"), fast=place, durable=durable
        )

    def joined(self, own, others, *, leads):
        config = HostsConfig(path="", copies=self.copies)
        place = Joined(config, root=own.backend)
        place.world = self
        place.join(own, others, leads=leads)
        return place

    def check(self, hosts=None):
        """Check what a job would find on some hosts, or on any of those that are left."""
        promise = self.newest_promise()
        if hosts is None:
            hosts = sorted(self.memories)
            for host in self.random.sample(hosts, self.random.randint(0, min(len(hosts) - 1, 20))):
                gone = {*self.memories}.difference(hosts) | {host}
                if promise is None or promise.holds(gone) or self.random.random() < 0.02:
                    hosts.remove(host)
        self.counts["checks"] += 1
        roots = [HostRoot(h, epoch_of(self.memories[h]), self.memories[h]) for h in hosts]
        newest = max(root.epoch for root in roots)
        counting = [root.backend for root in roots if root.epoch == newest]
        named = {*self.named(counting).values()}
        if newest >= self.settled and (back := self.dead & named):
            raise BrokenPromiseError(f"came back: {back}")
        own = self.random.randrange(len(roots))
        view = self.joined(roots[own], roots[:own] + roots[own + 1 :], leads=False)
        found = Catalog(self.store(view, self.durable)).newest()
        if found is not None:
            places = [root.backend for root in roots] + [self.durable] * bool(self.durable)
            for name, data in self.files[found.uid].items():
                if not any(content(place, name) == data for place in places):
                    raise BrokenPromiseError(f"{name} is nowhere, but its checkpoint counts")
        if promise is not None and promise.holds({*self.memories}.difference(hosts)):
            if found is None or (found.step, found.generation) < promise.key:
                raise BrokenPromiseError(
                    f"{promise} is given up on {hosts} for {found and found.step}"
                )
            self.counts["kept"] += 1

    def _end(self):
        """Check that a job on all hosts can save and replicate, whatever happened before."""
        for states in (self.cut, self.lossy, self.full, self.slow, self._tasks, self._threads):
            states.clear()
        self.job.kill()
        self.start(sorted(self.memories))
        job, end_s = self.job, self.now + 300.0
        job.acts = {job.save: 1}
        self.spawn(itertools.repeat(10.0))  # both heaps have a task
        self.spawn(itertools.repeat(10.0), nests=False)
        self._run(lambda: self.now > end_s or (job.saved & job.replicated))
        if self.now > end_s:
            raise BrokenPromiseError(f"nothing is replicated in the end: {job.error} {job.errors}")


def epoch_of(root):
    record = read_host(root)
    return 0 if record is None else record.epoch


def content(root, name):
    """The bytes of a file; None if there is none."""
    blob = root._store.blobs.get(name)
    return None if blob is None else bytes(blob.data)


def read(place, name, size):
    data = bytearray(size)
    place.read([ReadRequest(name, 0, memoryview(data))])
    return bytes(data)


class Job:
    """One job: a rank on each host, and rank 0 on one of them."""

    def __init__(self, world, hosts):
        self.world, self.random, self.hosts = world, world.random, hosts
        self.lead = self.random.choice(hosts)
        self.is_over = self.is_asked = False
        self.down = set()  # hosts whose processes are dead
        self.fuse = -1  # the number of operations of rank 0 before it is killed
        self.error, self.errors, self.pulling = None, {}, set()
        roots = {}
        for number, host in enumerate(hosts):
            domain = host if world.racks is None else f"r{number % world.racks}"
            root = world.memories[host]
            link, ask = Link(self, host, root), partial(self.ask, host)
            roots[host] = HostRoot(host, epoch_of(root), link, domain, ask)
        self.newest = max(root.epoch for root in roots.values())
        self.places = {}
        for host in hosts:
            others = [root for other, root in roots.items() if other != host]
            own = roots[host]._replace(ask=None)
            self.places[host] = world.joined(own, others, leads=host == self.lead)
        self.place = self.places[self.lead]
        self.durable = world.durable and Link(self, DURABLE, world.durable)
        self.store = world.store(self.place, self.durable)
        self.catalog = Catalog(
            self.store,
            before_delete=partial(world.before_delete, self),
            delete_failed=partial(world.delete_failed, self),
        )
        board = SimpleNamespace(post=lambda *_: None)
        group = SimpleNamespace(place=RankPlace(0, len(hosts)), timeout_s=20.0, coordination=board)
        self.copier = HostCopies(
            self.store,
            self.catalog,
            SimpleNamespace(execute=lambda _, kind, body: self.pull_at(self.lead, body)),
            SimpleNamespace(of_restore=lambda: group),
            SimpleNamespace(timing=Timing(clock=world), spawn=self.spawn),
        )
        self.retention = Retention(keep_last=self.random.choice([1, 1, 2, 4]))
        self.acts = {self.save: 12, self.overwrite: 2, self.rewind: 1, self.prune: 1}
        if self.durable:
            # Retention may delete the only durable generation of a step that was overwritten.
            self.acts |= {self.overwrite: 0, self.drain: 4}
        self.kept = []  # the steps that were restored and committed
        self.saved, self.replicated = set(), set()  # uids

    def kill(self):
        self.is_over = True
        if lead := self.copier._lead:
            lead._told.close()

    def runs_on(self, host):
        return not self.is_over and host not in self.down

    def groups(self):
        numbered = {str(n): root for n, root in enumerate(self.place.roots)}
        groups = group_hosts({n: root.domain for n, root in numbered.items()}, self.world.copies)
        named = tuple(tuple(numbered[n].host for n in group) for group in groups.groups)
        return type(groups)(named, groups.size)

    def spawn(self, name, task):
        """Run a task that the product wants to run on a thread of rank 0."""
        if name == "replicate":
            self.world.spawn(self.replicate(), self.lead, self)
        else:
            self.world.spawn(self.world._later(task), self.lead, self, nests=False)
        return SimpleNamespace(is_alive=lambda: False)

    def train(self):
        world, newest = self.world, None
        while newest is None:
            try:
                newest = self.catalog.newest() or False
            except StorageError:  # a host is cut off
                yield 1.0
        world.check(self.hosts)
        self.step = 0
        if newest:
            self.step = newest.step
            self.kept = [newest.step]
        roots = [world.memories[host] for host in self.hosts]
        named = world.named([root for root in roots if epoch_of(root) == self.newest])
        self.uids = {records.parse_commit_name(name): uid for name, uid in named.items()}
        self.copier.begin()
        pace_s = self.random.choice([0.2, 2.0, 6.0])
        while True:
            yield world.some_s(pace_s)
            if len(self.acts) > 1 and self.random.random() < (0.1 if self.saved else 0.3):
                self.fuse = self.random.randint(1, 30 + 10 * len(self.hosts))
            acts = [*self.acts]
            try:
                yield from self.random.choices(acts, [self.acts[act] for act in acts])[0]()
            except PenstockError as error:
                world.counts["errors"] += 1
                self.error = error

    # -- saves

    def save(self, step=None):
        world, place = self.world, self.place
        if step is None:
            if self.durable:  # two tiers with different checkpoints at one step are for users
                self.step = max(self.step, world.highest)
            self.step += self.random.randint(1, 3)
            world.highest = max(world.highest, self.step)
            step = self.step
        generation = self.catalog.next_generation(step)
        uid = f"{self.random.getrandbits(128):032x}"
        borrowed = self.borrowed()
        uids = sorted({records.blob_uid(blob.name) for blob in borrowed})
        begun = world.now_iso()
        intent = records.IntentRecord(uid, step, tuple(uids), started=begun, refreshed=begun)
        place.publish(records.intent_name(uid), encode_intent(intent))
        files, written = {}, set()
        for rank, host in enumerate(self.hosts):
            names = records.blob_name(uid, rank, 0, "raw"), records.part_name(uid, rank)
            files |= {name: name[: self.random.randint(40, 60)].encode() for name in names}
            own = {name: files[name] for name in names}
            world.spawn(self.write(host, own, written), host, self)
        index = records.index_name(uid)
        files[index] = index.encode()
        end_s = world.now + WAIT_S
        while len(written) < len(self.hosts):
            if world.now > end_s:
                world.counts["aborted"] += 1
                return
            yield 0.2
        if borrowed and uids[-1] not in {r.uid for _, r in self.catalog.records()} | {*uids[:-1]}:
            return
        place.publish(index, files[index])
        if self.durable:
            place.publish(records.mark_name(uid), b"{}")
        parts = [records.PartEntry(n, len(files[n]), 1, DIGEST) for n in files if "/parts/" in n]
        many = records.ManyParts(len(parts), sum(part.length for part in parts))
        record = records.CommitRecord(
            uid,
            step,
            generation,
            begun,
            len(self.hosts),
            records.IndexEntry(index, len(files[index]), 1, DIGEST),
            () if len(parts) > 16 else tuple(parts),
            1,
            1,
            sum(len(data) for name, data in files.items() if "/blobs/" in name),
            borrowed=tuple(borrowed),
            many_parts=many if len(parts) > 16 else None,
        )
        name, data = records.commit_name(step, generation), encode_commit(record)
        for blob in borrowed:
            files[blob.name] = world.files[records.blob_uid(blob.name)][blob.name]
        world.files[uid], world.uids[data] = {**files, name: data}, uid
        world.steps[uid] = step
        try:
            place.publish(name, data, exclusive=True)
        except StorageError:
            if read_commit(place, name).uid != uid:
                raise
        world.counts["committed"] += 1
        self.uids[step, generation] = uid
        self.saved.add(uid)
        self.kept[1:] = [step]
        report = Report(step, generation, uid)
        self.copier.replicate(report, partial(self.copied, report))
        self.clean_up(report, overwrite=False)

    def borrowed(self):
        """Some blobs of an earlier checkpoint that the next one needs, too."""
        base = self.catalog.newest()
        if base is None or self.random.random() < 0.7:
            return []
        blobs = {n: d for n, d in self.world.files[base.uid].items() if records.blob_uid(n)}
        names = sorted(self.random.sample(sorted(blobs), min(2, len(blobs))))
        return [records.BlobRecord(name, len(blobs[name])) for name in names]

    def write(self, host, own, written):
        for name, data in own.items():
            yield self.world.some_s(0.3)
            try:
                self.places[host].own.publish(name, data)
            except StorageError:
                return
        written.add(host)

    def overwrite(self):
        if (newest := self.catalog.newest()) is not None:
            yield from self.save(newest.step)

    def copied(self, report, done):
        if done:
            self.world.counts["replicated"] += 1
            self.clean_up(report, overwrite=report.generation > 0)

    def clean_up(self, report, *, overwrite):
        """Delete what `Saver` deletes after a commit, and after the copies."""
        options = {"overwrite": overwrite, "retention": self.retention}
        protect = {*self.kept, *self.copier.kept()}
        clean_up_after(report, self.catalog, **options, protect=protect, events=EventStream(None))
        self.world.deleted(self)

    # -- copies

    def replicate(self):
        lead = self.copier._lead
        while True:
            began_s = self.world.now
            goes_on = lead._look()
            for key in lead._replication._safe:
                if (uid := self.uids[key]) not in self.replicated:
                    self.replicated.add(uid)
                    self.world.promise(key, uid, self.groups(), began_s)
            if not goes_on:
                return
            yield lead._pause_s

    def ask(self, host, kind, body):
        return self.world.reach(self, host, "order", (), lambda: self.pull_at(host, body))

    def pull_at(self, host, body):
        """Begin to copy, as `Puller` does."""
        if error := self.errors.pop(host, None):
            raise StorageError(str(error))
        if host not in self.pulling:
            self.pulling.add(host)
            order = json.loads(body)
            self.world.spawn(self.pull(host, order["record"], order["files"]), host, self)

    def pull(self, host, record, files):
        place = self.places[host]
        try:
            expected = self.world.files[read_commit(place, record).uid]
            for name in [name for name in files if name in expected]:
                yield self.world.some_s(0.5)
                data = read(place, name, files[name])
                if data != expected[name]:
                    raise StorageError(f"{name} does not match its checksum")
                place.own.publish(name, data)
        except PenstockError as error:
            self.errors[host] = error
        self.pulling.remove(host)

    def drain(self):
        """Copy the newest checkpoint to the durable tier, through rank 0."""
        newest = Catalog(self.place).newest()
        if newest is None:
            return
        files = self.world.files[newest.uid]
        name = records.commit_name(newest.step, newest.generation)
        for file, data in files.items():
            if file != name:
                self.durable.publish(file, read(self.place, file, len(data)))
        yield self.world.some_s(0.5)
        if read_commit(self.place, name).uid == newest.uid:
            self.durable.publish(name, files[name])
            self.world.promise((newest.step, newest.generation), newest.uid)
            self.world.counts["drained"] += 1
            self.place.delete([records.mark_name(newest.uid)])

    # -- deletions

    def rewind(self):
        if steps := self.catalog.steps():
            self.is_asked = True
            try:
                self.step = steps[-2:][0]
                self.catalog.rewind(self.step)
            finally:
                self.is_asked = False
            self.kept = [self.step]
            self.world.deleted(self)
            self.world.counts["rewound"] += 1
        yield 0.0

    def prune(self):
        self.catalog.prune(grace_s=0.0)
        self.world.counts["pruned"] += 1
        yield 0.0


def explore(seeds):
    """Run one world per seed; return how often what happened."""
    counts = Counter()
    for seed in seeds:
        try:
            counts += World(seed).run().counts
        except BrokenPromiseError as error:
            raise BrokenPromiseError(f"seed {seed}: {error}") from error
    return counts


if __name__ == "__main__":
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    began_s = time.perf_counter()
    print(explore(range(int(sys.argv[1]), int(sys.argv[2]))))
    print(f"{time.perf_counter() - began_s:.1f} s")
