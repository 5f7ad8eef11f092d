"""Hosts with memory, and jobs that save on them, on a virtual clock, with faults from a seed.

What to copy, what counts, and what may be deleted are the product's own code. The jobs here only
move files: they save, copy, drain, delete by retention, overwrite, rewind and prune. Hosts lose
their memory, alone or in pairs; they are cut off, slow, full, suspended. Jobs are killed while the
hosts keep their files, and start again on fewer, more or other hosts, some with old files.

`World.check` looks at the hosts as a job that started now on any of them would.

By hand, from the root:

    python -m tests.core.replicas.simulation 0 10000
"""

import heapq
import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from penstock.core.format import records
from penstock.core.replicas.epochs import propose_epoch
from penstock.core.replicas.holdings import Epoch, Holdings, RootListing, is_record
from penstock.core.replicas.placement import group_hosts
from penstock.core.replicas.replication import Replication

RECORD_BYTES = 100  # of each commit record: another one of the same name has the same length
NEVER = Epoch(10**30)
WAIT_S = 8.0  # rank 0 waits this long for the other hosts


class BrokenPromiseError(AssertionError):
    """A promise did not hold in a simulated world."""


@dataclass
class Root:
    """The memory of a host: it outlives jobs."""

    name: str
    epoch: Epoch = field(default_factory=Epoch)
    members: frozenset = frozenset()
    files: dict = field(default_factory=dict)  # name -> (bytes, uid of the save that wrote it)
    room: float = float("inf")
    until_s: float = 0.0  # suspended until then
    slow: float = 1.0

    def listed(self):
        sizes = {name: size for name, (size, _) in self.files.items()}
        return RootListing(self.name, self.epoch, self.members, sizes)

    def write(self, name, size, uid):
        if size > self.room:
            return False
        self.room -= size
        self.files[name] = (size, uid)
        return True

    def delete(self, name):
        self.room += self.files.pop(name, (0, ""))[0]


@dataclass
class Promise:
    """A checkpoint that rank 0 called replicated, and the hosts lost since then."""

    key: tuple
    uid: str
    groups: object
    lost: set = field(default_factory=set)

    def holds(self, absent=frozenset()):
        gone = self.lost | absent
        return all(len(gone.intersection(g)) < self.groups.size for g in self.groups.groups)


class World:
    """All hosts, the durable tier, the jobs one after another, and the clock."""

    def __init__(self, seed, hosts=None):
        self.random = random.Random(seed)
        self.now = 0.0
        self._heap, self._numbers = [], itertools.count()
        self.copies = self.random.choice([1, 1, 1, 2, 3])
        self.roots = {}
        self.size = hosts or self.random.choice([2, 2, 3, 4, 5, self.random.randint(2, 12)])
        self.cut = set()  # hosts, and pairs of hosts, that cannot reach each other
        self.durable = {}  # key -> uid
        self.drains = self.random.random() < 0.3
        self.files = {}  # uid -> the files of the checkpoint
        self.promises = {}
        self.dead = set()  # uids that must not count any more
        self.settled = Epoch()
        self.deletion = None  # what `settled` deleted stays deleted while this promise holds
        self.job = None
        self.counts = Counter()
        self.suspended_s = 0.0
        self.racks = self.random.choice([None, None, 2, 3])

    # -- the clock

    def spawn(self, task, root=None, alive=lambda: True):
        self._push(0.0, (task, root, alive))

    def _push(self, delay_s, what):
        heapq.heappush(self._heap, (self.now + delay_s, next(self._numbers), what))

    def run(self, until_s=100.0):
        self.spawn(self._operator())
        self.spawn(self._faults())
        while self._heap:
            self.now, _, (task, root, alive) = heapq.heappop(self._heap)
            if self.now > until_s:
                break
            if root is not None and root.until_s > self.now:
                self._push(root.until_s - self.now, (task, root, alive))
            elif alive():
                delay_s = next(task, None)
                if delay_s is not None:
                    self._push(delay_s * (root.slow if root else 1.0), (task, root, alive))
        self.check()
        return self

    def some_s(self, most=1.0):
        return self.random.uniform(0.01, most)

    # -- the operator and the faults

    def _operator(self):
        """Start a job, and another one after its death, on some hosts."""
        while True:
            self.job = Job(self, self._hosts())
            self.counts["jobs"] += 1
            self.spawn(self.job.train(), self.roots[self.job.lead], self.job.is_alive)
            while not self.job.is_over:
                yield 1.0
            yield 2.0 + self.some_s(3.0)

    def _hosts(self):
        names = sorted(self.roots)
        number = len(self.roots)
        while len(names) < self.size:
            names.append(f"h{number:04d}")
            number += 1
        hosts = set(names[: self.size])
        how = self.random.random()
        if self.job is not None:
            hosts = {h for h in self.job.hosts if h in self.roots}
            hosts |= set(names) if how < 0.3 else set()
            if 0.3 < how < 0.5:  # some are replaced by others
                for host in self.random.sample(sorted(hosts), min(len(hosts), 1 + self.copies)):
                    hosts.discard(host)
                    names = [name for name in names if name != host]
                hosts.add(f"h{number:04d}")
            elif 0.5 < how < 0.55:  # all are
                hosts = {f"h{number + i:04d}" for i in range(self.size)}
            elif how > 0.9 and len(names) > 2:
                hosts = set(self.random.sample(names, self.random.randint(2, len(names))))
        while len(hosts) < 2:
            hosts.add(f"h{number + len(hosts):04d}")
        for host in hosts:
            self.roots.setdefault(host, Root(host))
        return sorted(hosts)

    def _faults(self):
        kinds = ["kill", "lose", "lose", "pair", "many", "cut", "cut pair", "slow", "full"]
        kinds += ["suspend", "suspend", "short"]
        pace_s = self.random.choice([4.0, 10.0, 25.0])
        while True:
            yield self.random.expovariate(1 / pace_s)
            self._strike(self.random.choice(kinds))
            if self.random.random() < 0.5:
                self.check()

    def _strike(self, kind):
        self.counts[kind] += 1
        host = self.random.choice(self.job.hosts)
        length_s = self.random.choice([1.0, 5.0, 20.0])
        groups = [g for g in self.job.groups.groups if host in g]
        pair = [host, self.random.choice([h for h in groups[0] if h != host] or [host])]
        many = self.random.sample(self.job.hosts, self.random.randint(1, len(self.job.hosts)))
        if kind == "kill":
            self.job.kill()
        elif kind in {"lose", "pair", "many"}:
            self._lose({"lose": [host], "pair": pair, "many": many}[kind])
        elif kind == "short":
            self._shorten(host)
        elif kind in {"cut", "cut pair"}:
            key = host if kind == "cut" else frozenset(pair)
            self.cut.add(key)
            self.spawn(self._later(length_s, lambda: self.cut.discard(key)))
        elif kind == "slow":
            self.roots[host].slow = 10.0
            self.spawn(
                self._later(length_s, lambda root=self.roots[host]: setattr(root, "slow", 1.0))
            )
        elif kind == "full":
            room, self.roots[host].room = self.roots[host].room, 20.0
            self.spawn(
                self._later(length_s, lambda root=self.roots[host]: setattr(root, "room", room))
            )
        else:
            self.roots[host].until_s = self.now + length_s
            self.suspended_s = max(self.suspended_s, self.now + length_s)

    def _shorten(self, host):
        """Cut a file, as after a power cut, which counts as the loss of the host."""
        files = self.roots[host].files
        if names := sorted(name for name in files if not is_record(name)):
            name = self.random.choice(names)
            files[name] = (files[name][0] - 1, files[name][1])
            for promise in self.promises.values():
                promise.lost.add(host)

    @staticmethod
    def _later(delay_s, act):
        yield delay_s
        act()

    def _lose(self, hosts):
        for host in hosts:
            self.roots[host] = Root(host)
            for promise in self.all_promises():
                promise.lost.add(host)
        self.job.kill()

    def reaches(self, one, other):
        if one == other:
            return True
        suspended = self.roots[other].until_s > self.now
        return not (suspended or {one, other, frozenset([one, other])} & self.cut)

    # -- what must hold

    def all_promises(self):
        return [*self.promises.values(), *([self.deletion] if self.deletion else [])]

    def newest_promise(self):
        return max(self.promises.values(), key=lambda p: p.key, default=None)

    def checkpoints(self, view):
        """The checkpoints that count in `view`: key -> uid; and that are whole."""
        named = {}
        for name in view.records():
            uids = {self.roots[h].files[name][1] for h in view.holders(name, RECORD_BYTES)}
            if len(uids) != 1:
                raise BrokenPromiseError(f"{name} is two checkpoints: {uids}")
            named[records.parse_commit_name(name)] = uids.pop()
        return named, {k: uid for k, uid in named.items() if not view.missing(self.files[uid])}

    def check(self, view=None):
        """Check what a job would find on the hosts of `view`, or on any of those that are left."""
        if view is None:
            names = set(self.roots)
            most = self.random.randint(0, min(len(names) - 1, 20))
            for host in self.random.sample(sorted(names), most):
                promise = self.newest_promise()
                gone = set(self.roots) - names | {host}
                if promise is None or promise.holds(gone) or self.random.random() < 0.02:
                    names.discard(host)
            view = Holdings(self.roots[name].listed() for name in sorted(names))
        self.counts["checks"] += 1
        named, whole = self.checkpoints(view)
        absent = set(self.roots) - set(view.roots)
        is_newest = view.epoch >= self.settled or (self.deletion and self.deletion.holds(absent))
        if is_newest and (back := self.dead.intersection(named.values())):
            raise BrokenPromiseError(f"came back: {back}")
        for uid in whole.values():
            for name, size in self.files[uid].items():
                held = {h: self.roots[h].files.get(name) for h in view.roots}
                owners = {h: entry[1] for h, entry in held.items() if entry and entry[0] == size}
                if not owners:
                    raise BrokenPromiseError(f"{name} is nowhere, but its checkpoint counts")
                for host in view.holders(name, size):
                    owner = owners.get(host)
                    if owner != (records.data_uid(name) or uid):
                        raise BrokenPromiseError(f"{name} at {host} is of {owner}")
        promise = self.newest_promise()
        if promise is not None and promise.holds(absent):
            best = max([*whole, *self.durable], default=None)
            if best is None or best < promise.key:
                msg = f"{promise} is given up; {best} is left of {named}, in {sorted(view.roots)}"
                raise BrokenPromiseError(msg)
            self.counts["kept"] += 1
        return whole

    def before_deletion(self, name, uid):
        """Check a deletion that no user asked for."""
        promise = self.newest_promise()
        if promise is None or not promise.holds():
            return
        if max(self.durable, default=promise.key) > promise.key:
            return
        if uid == promise.uid or name in self.files[promise.uid]:
            raise BrokenPromiseError(f"{name} of the newest replicated checkpoint is deleted")

    def settle(self, proposal, groups):
        """Note that only these records count, on the hosts that have joined."""
        self.settled = proposal.epoch
        self.deletion = Promise((), "", groups)
        joined = {h for h, root in self.roots.items() if root.epoch == proposal.epoch}
        files = self.roots[min(joined)].files
        self.dead = set(self.files) - {files[n][1] for n in proposal.records if n in files}
        for key, promise in list(self.promises.items()):
            if promise.uid in self.dead and self.durable.get(key) != promise.uid:
                del self.promises[key]

    def leave_out(self, hosts):
        """Note that the other hosts do not count any more, whatever they have."""
        for promise in self.all_promises():
            promise.lost |= {h for g in promise.groups.groups for h in g} - hosts


class Job:
    """One job: a rank on each host, and rank 0 on one of them."""

    def __init__(self, world, hosts):
        self.world, self.random = world, world.random
        self.hosts = hosts
        self.name = f"{self.random.getrandbits(64):016x}"
        racks = world.racks
        domains = {h: h if racks is None else f"r{i % racks}" for i, h in enumerate(hosts)}
        self.groups = group_hosts(domains, world.copies)
        self.lead = self.random.choice(hosts)
        self.is_over = False
        self.skew_s = self.random.uniform(-0.5, 0.5)
        self.epoch = None
        self.dead_s = float("inf")
        self.lingers = self.random.random() < 0.2
        self.keep_last = self.random.choice([1, 1, 2, 4])
        self.stale_s = max(self.random.choice([0.0, 0.5, 2.0]), len(hosts) / 100)
        self.views = {}
        self.failed = set()

    def kill(self):
        if not self.is_over:
            self.is_over, self.dead_s = True, self.world.now

    def is_alive(self):
        return not self.is_over

    def lingers_on(self, root):
        """Whether the process of a host runs; sometimes it ends after the next job has begun."""
        world = self.world
        if world.roots[root.name] is not root:
            return False
        return not self.is_over or (self.lingers and world.now < self.dead_s + 10.0)

    def at(self, host, task):
        root = self.world.roots[host]
        self.world.spawn(task, root, lambda: self.lingers_on(root))

    def view(self, host, stale_s=0.0):
        """What a host sees of all hosts of the job, maybe some time ago."""
        reached = tuple(self.hosts)
        if self.world.cut or self.world.now < self.world.suspended_s:
            reached = tuple(h for h in self.hosts if self.world.reaches(host, h))
        made_s, view, _ = self.views.get(reached, (-1e9, None, None))
        if self.world.now - made_s > stale_s:
            view = Holdings(self.world.roots[h].listed() for h in reached)
            self.views[reached] = (self.world.now, view, {})
        return view

    def pulls(self, host, uid):
        """What a host has to copy of a checkpoint, as it sees it."""
        view = self.view(host, self.stale_s)
        known = self.views[tuple(view.roots)][2]
        if uid not in known:
            known[uid] = view.pulls(self.world.files[uid], self.groups)
        return known[uid].get(host, ())

    def train(self):
        world = self.world
        while len(self.view(self.lead).roots) < len(self.hosts):
            yield 1.0
        view = self.view(self.lead)
        whole = world.check(view)
        if view.epoch < world.settled:
            # No host of the newest epoch is here: this job continues an earlier one, and the next
            # epoch is the newest.
            world.settled, world.deletion = NEVER, None
        safe = {key for key, uid in whole.items() if self.is_safe(view, key, uid)}
        for key in safe:
            self.promise(key, whole[key])
        self.uids = world.durable | whole
        self.step = max([step for step, _ in self.uids], default=0)
        self.replication = Replication(safe, set(whole) - safe)
        world.spawn(self.replicate(), world.roots[self.lead], self.is_alive)
        pace_s = self.random.choice([0.2, 2.0, 6.0])
        acts, weights = [self.save, self.overwrite, self.rewind, self.prune], [12, 2, 1, 1]
        while True:
            yield world.some_s(pace_s)
            view = self.view(self.lead)
            # All hosts have to answer the first proposal of a job: none of their records is given
            # up because one did not answer for a moment.
            may_propose = self.epoch is not None or set(view.roots) == set(self.hosts)
            if may_propose and (self.epoch is None or view.counting < set(view.roots)):
                yield from self.propose()
            if self.epoch is not None:
                yield from self.random.choices(acts, weights)[0]()
            if self.random.random() < 0.1:
                world.check()

    def is_safe(self, view, key, uid):
        if self.world.durable.get(key) == uid:
            return True
        return not view.unsafe(self.world.files[uid], self.groups)

    def promise(self, key, uid):
        if self.world.durable.get(key) != uid:
            self.world.promises[key] = Promise(key, uid, self.groups)

    # -- epochs

    def propose(self, without=()):
        """Raise the epoch; return whether enough hosts join to keep what it deletes deleted."""
        world, lead = self.world, self.world.roots[self.lead]
        now_s = 1e6 + world.now + self.skew_s
        proposal = propose_epoch(self.view(self.lead), job=self.name, now_s=now_s, without=without)
        yield from self.join(self.lead, proposal)
        if lead.epoch != proposal.epoch:
            return False
        self.epoch = proposal.epoch
        world.leave_out(set(self.hosts))
        for host in sorted(proposal.members - {self.lead}):
            self.at(host, self.join(host, proposal))
        end_s = world.now + WAIT_S
        while True:
            yield 0.2
            joined = {
                h for h, root in self.view(self.lead).roots.items() if root.epoch == self.epoch
            }
            if joined == proposal.members or world.now > end_s:
                break
        world.counts["proposed"] += 1
        if not self.groups.is_safe(joined):
            world.counts["unconfirmed"] += 1
            return False
        world.settle(proposal, self.groups)
        return True

    def join(self, host, proposal):
        world, root = self.world, self.world.roots[host]
        if proposal.is_late(root.listed()):
            return
        root.epoch = proposal.resets(root.listed())
        for name in proposal.copied(root.listed()):
            entry = self.read(host, name, RECORD_BYTES, {proposal.before, proposal.epoch})
            yield world.some_s(0.3)
            if entry is None or proposal.is_late(root.listed()) or not root.write(name, *entry):
                return
        yield world.some_s(0.3)
        if proposal.is_late(root.listed()):
            return
        for name in proposal.deleted(root.listed()):  # under the lock of the host
            root.delete(name)
            if self.random.random() < 0.03:
                self.kill()
                return
        root.epoch, root.members = proposal.epoch, proposal.members

    def read(self, host, name, size, epochs=None):
        """Read a file at any host that has it; a record only in roots of these epochs."""
        for other in self.random.sample(self.hosts, len(self.hosts)):
            root = self.world.roots[other]
            if self.world.reaches(host, other) and (epochs is None or root.epoch in epochs):
                entry = root.files.get(name)
                if entry is not None and entry[0] == size:
                    return entry
        return None

    # -- saves

    def save(self, step=None, generation=0):
        world = self.world
        if step is None:
            self.step += self.random.randint(1, 3)
            step = self.step
        uid = f"{self.random.getrandbits(128):032x}"
        name = records.commit_name(step, generation)
        files, written = {}, set()
        for rank, host in enumerate(self.hosts):
            size = self.random.randint(1, 9)
            own = {records.blob_name(uid, rank, 0, "raw"): size, records.part_name(uid, rank): 1}
            if host == self.lead:
                own[records.index_name(uid)] = 2
            files |= own
            self.at(host, self.write(host, own, uid, written))
        newest = max(self.uids, default=None)
        if newest is not None and self.random.random() < 0.3:
            lent = [n for n in world.files[self.uids[newest]] if records.blob_uid(n)]
            held = self.view(self.lead)
            sizes = {n: world.files[self.uids[newest]][n] for n in lent[:2]}
            files |= {} if held.missing(sizes) else sizes  # borrowed blobs
        end_s = world.now + WAIT_S
        while len(written) < len(self.hosts) and world.now < end_s:
            yield 0.2
        lead = world.roots[self.lead]
        is_free = name not in lead.files and lead.epoch == self.epoch
        if len(written) < len(self.hosts) or not is_free:
            world.counts["aborted"] += 1
            return
        if not lead.write(name, RECORD_BYTES, uid):
            return
        files[name] = RECORD_BYTES
        world.files[uid] = files
        self.uids[step, generation] = uid
        self.replication.committed((step, generation))
        world.counts["committed"] += 1
        yield world.some_s(0.1)
        if self.random.random() < 0.5:
            yield from self.retain()

    def write(self, host, own, uid, written):
        for name, size in own.items():
            yield self.world.some_s(0.3)
            if not self.world.roots[host].write(name, size, uid):
                return
        written.add(host)

    def overwrite(self):
        named, whole = self.world.checkpoints(self.view(self.lead))
        if whole:
            newest = max(whole)
            names = [records.commit_name(*key) for key in named if key[0] == newest[0]]
            yield from self.save(newest[0], records.generation_above(names))

    # -- copies

    def replicate(self):
        """Let all hosts copy the target until the listings show that it is replicated."""
        world = self.world
        while True:
            yield world.some_s(0.5)
            target = self.replication.target
            if target is None or target not in self.uids:
                continue
            uid = self.uids[target]
            self.failed = set()
            if world.drains and self.random.random() < 0.3:
                yield from self.drain(target, uid)
            for host in self.hosts:
                self.at(host, self.pull(host, target, uid))
            end_s = world.now + 5 * WAIT_S
            while self.replication.target == target:
                yield world.some_s(0.5)
                view = self.view(self.lead)
                if self.replication.target != target:
                    break
                if self.is_safe(view, target, uid):
                    self.replication.secured(target)
                    self.promise(target, uid)
                    world.counts["replicated"] += 1
                elif uid in self.failed or world.now > end_s:
                    self.replication.failed(target)
                    world.counts["failed"] += 1
                    break

    def pull(self, host, target, uid):
        """Copy what this host lacks of the target."""
        root, files = self.world.roots[host], self.world.files[uid]
        for _ in range(20):
            if self.replication.target != target:
                return
            names = self.pulls(host, uid)
            if not names:
                yield self.world.some_s(2.0)
            for name in names:
                epoch = root.epoch
                entry = self.read(host, name, files[name], {epoch} if is_record(name) else None)
                yield self.world.some_s(0.5)
                if entry is None or (is_record(name) and root.epoch != epoch):
                    continue
                if entry[0] > root.room:
                    self.failed.add(uid)
                    return
                root.write(name, *entry)

    def drain(self, key, uid):
        """Copy a checkpoint to the durable tier, through rank 0."""
        yield self.world.some_s(3.0)
        view = self.view(self.lead)
        if self.world.checkpoints(view)[1].get(key) == uid and key in self.uids:
            self.world.durable[key] = uid
            self.replication.secured(key)
            self.world.counts["drained"] += 1

    # -- deletions

    def retain(self):
        whole = self.world.checkpoints(self.view(self.lead))[1]
        newest = sorted(whole)[-self.keep_last :]
        old = [key for key in whole if key not in newest]
        # Of one step only the newest generation is kept.
        old += [k for k in newest if any(k[0] == other[0] and k < other for other in whole)]
        gone = {key: whole[key] for key in self.replication.deletable(old)}
        for key, uid in gone.items():
            self.world.before_deletion(records.commit_name(*key), uid)
        if gone:
            yield from self.delete(gone)

    def rewind(self):
        world = self.world
        named, whole = world.checkpoints(self.view(self.lead))
        steps = sorted({key[0] for key in whole})
        to = steps[-2:][0] if steps else 0
        later = {k: u for k, u in (world.durable | named).items() if k[0] > to}
        if later and (yield from self.delete(later)):
            self.step = to
            world.counts["rewound"] += 1

    def delete(self, uids):
        """Delete the records of checkpoints, then their data; return whether that holds."""
        world = self.world
        if not self.groups.is_safe(set(self.view(self.lead).roots)):
            world.counts["postponed"] += 1
            return False
        self.replication.deleted(uids)
        for key in uids:
            world.promises.pop(key, None)
            world.durable.pop(key, None)
            self.uids.pop(key, None)
        if not (yield from self.propose([records.commit_name(*key) for key in uids])):
            return False
        needed, gone = self.needed(), set(uids.values())
        for host in self.hosts:
            yield world.some_s(0.05)
            if world.reaches(self.lead, host):
                self.sweep(host, lambda n: records.data_uid(n) in gone and n not in needed)
        world.counts["deleted"] += len(uids)
        return True

    def needed(self):
        named, _ = self.world.checkpoints(self.view(self.lead))
        return {name for uid in named.values() for name in self.world.files[uid]}

    def sweep(self, host, is_garbage):
        root = self.world.roots[host]
        garbage = [name for name in root.files if is_garbage(name)]
        for name in garbage:
            self.world.before_deletion(name, records.data_uid(name))
            root.delete(name)

    def prune(self):
        """Delete data that no commit record needs; no save is under way."""
        yield self.world.some_s(0.1)
        view = self.view(self.lead)
        if view.epoch == self.epoch and self.groups.is_safe(view.counting):
            needed = self.needed()
            for host in view.roots:
                self.sweep(host, lambda n: records.data_uid(n) and n not in needed)
            self.world.counts["pruned"] += 1


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
    began_s = time.perf_counter()
    print(explore(range(int(sys.argv[1]), int(sys.argv[2]))))
    print(f"{time.perf_counter() - began_s:.1f} s")
