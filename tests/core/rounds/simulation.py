"""Many ranks, a store and a root on a virtual clock, with faults drawn from a seed.

The rounds are the product's own code: a model of a store carries out what they yield, and loses or
delays requests and answers. A small engine models the save of each rank: it writes for a while,
seals, merges, publishes. Ranks die, stop (SIGSTOP), wake up later, hang, fail, come late, lose the
network. `World` checks the invariants at each publish and each deletion.

By hand, from the root:

    python -m tests.core.rounds.simulation seeds 0 10000     # these worlds
    python -m tests.core.rounds.simulation ranks 1024 10000  # how long these ranks take
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import time
from dataclasses import dataclass, field

from penstock.core.catalog.commit_table import Action, Commit, Event, State
from penstock.core.errors import CoordinationError
from penstock.core.rounds import posts
from penstock.core.rounds.posts import At, Result, SlotPost, encode, slot_key
from penstock.core.rounds.round import (
    Answer,
    Post,
    RankPlace,
    Read,
    Rest,
    RestoreRound,
    SaveRound,
    WaitFor,
)
from penstock.core.rounds.table import Phase, Step

TOLD = {
    Step.DONE: "committed",
    Step.CLEAN_UP: "aborted",
    Step.KEEP: "aborted",
    Step.REPORT_UNKNOWN: "unknown",
    Step.REPORT_STOPPED: "stopped",
}


class BrokenPromiseError(AssertionError):
    """A promise did not hold in a simulated world."""


@dataclass
class Fault:
    """The fault of one rank: at a time, or soon after it reaches a phase."""

    kind: str  # die, stop, fail, hang, cut, leave
    rank: int
    at_s: float | None = None
    phase: Phase | None = None
    delay_s: float = 0.0
    length_s: float = 0.0
    came_s: float | None = None


@dataclass
class Plan:
    """One world before its start."""

    seed: int = 0
    world_size: int = 2
    kind: str = "save"
    rounds: int = 1
    timeout_s: float = 6.0
    call_s: float = 1.0
    latency_s: float = 0.01
    jitter_s: float = 0.0  # up to this much more, per request
    key_s: float = 0.0
    server_s: float = 0.0
    poll_s: float = 0.0  # a wait polls this often; 0: the store notifies
    lost: float = 0.0  # the share of requests that get no answer in time
    work_s: tuple[float, float] = (1.0, 5.0)
    tick_s: float = 0.5  # between two signs of progress
    arrive_s: float = 0.0
    merge_s: float = 0.05
    publish_s: float = 0.02
    publish: str = "ok"
    refuse: bool = False
    gathers: bool = False  # rank 0 waits for all ranks before it starts them, as saves do
    hosted: bool = False  # the store is in the process of rank 0, as without torchrun
    late_s: float = 0.0  # from the call to the round of rank 0, which cleans up meanwhile
    differs: int | None = None  # the rank that is at another step
    restores: int | None = None  # the rank that restores while the others save
    absent: int | None = None  # the rank that never comes
    faults: list[Fault] = field(default_factory=list)


class World:
    """All ranks, the store of the job, the root, and the clock."""

    def __init__(self, plan):
        self.plan = plan
        self.random = random.Random(plan.seed)
        self.now = 0.0
        self._heap = []
        self._numbers = itertools.count()
        self.values = {}
        self._waiters = {}
        self._server_free_s = 0.0
        self.rounds = {}  # number -> its outcome in the root
        self.ranks = [Rank(self, rank) for rank in range(plan.world_size)]
        self.requests = 0

    def run(self, horizon_s=10_000.0):
        for fault in self.plan.faults:
            if fault.at_s is not None:
                self.after(fault.at_s, lambda fault=fault: self.strike(fault))
        for rank in self.ranks:
            arrives_s = self.random.uniform(0.0, self.plan.arrive_s)
            if rank.rank != self.plan.absent:
                rank.deliver(arrives_s, rank.call)
        while self._heap:
            at, _, event = heapq.heappop(self._heap)
            if at > horizon_s:
                break
            self.now = at
            event()
        self._check_end()
        return self

    def after(self, delay_s, event):
        heapq.heappush(self._heap, (self.now + delay_s, next(self._numbers), event))

    def strike(self, fault):
        if fault.came_s is None:
            fault.came_s = self.now
            self.ranks[fault.rank].suffer(fault)

    def root(self, number):
        return self.rounds.setdefault(number, Root())

    # -- the store -----------------------------------------------------------------------------

    def request(self, rank, operation, answer):
        """Carry out an operation; the rank gets `answer(value, error)`."""
        plan, self.requests = self.plan, self.requests + 1
        if isinstance(operation, WaitFor):
            self._wait_for(rank, operation, answer)
            return
        keys = len(operation.keys) if isinstance(operation, Read) else 1
        begins_s = max(self.now + plan.latency_s / 2, self._server_free_s)
        works_s = plan.server_s + keys * plan.key_s
        self._server_free_s = begins_s + works_s
        lands_s = begins_s + works_s - self.now + plan.jitter_s * self.random.random()
        fate = "answered"
        if self._is_refused():
            rank.deliver(plan.latency_s, lambda: answer(None, CoordinationError("reset")))
            return
        if rank.is_cut() or self.random.random() < plan.lost:
            fate = self.random.choice(["lost", "unanswered", "late"])
            if rank.is_cut():
                fate = "lost"
        if fate == "late":
            lands_s += self.random.uniform(0, 3 * plan.timeout_s)
        if fate == "answered" and lands_s + plan.latency_s / 2 > plan.call_s:
            fate = "unanswered"
        if fate != "answered":
            rank.deliver(plan.call_s, lambda: answer(None, CoordinationError("no answer")))
        if fate == "lost":
            return

        def land():
            value = self._apply(operation)
            if fate == "answered":
                rank.deliver(plan.latency_s / 2, lambda: answer(value, None))

        self.after(lands_s, land)

    def _apply(self, operation):
        if isinstance(operation, Read):
            return [self.values.get(key) for key in operation.keys]
        if isinstance(operation, Post):
            self._set(operation.key, operation.value)
            return None
        if operation.key not in self.values:
            self._set(operation.key, operation.value)
        return self.values[operation.key]

    def _set(self, key, value):
        self.values[key] = value
        for wake in self._waiters.pop(key, ()):
            wake()

    def _wait_for(self, rank, operation, answer):
        done = []

        poll_s = self.plan.poll_s
        if poll_s:
            polls = operation.timeout_s / poll_s
            busy_s = self._server_free_s
            self._server_free_s = max(self.now, busy_s) + polls * self.plan.server_s

        def wake(found=True):
            if not done:
                done.append(True)
                if rank.is_cut():  # meanwhile
                    late_s = 0.0 if self._is_refused() else self.plan.call_s
                    rank.deliver(late_s, lambda: answer(None, CoordinationError("no answer")))
                    return
                late_s = self.plan.latency_s / 2 + self.random.random() * poll_s
                rank.deliver(late_s, lambda: answer(found, None))

        if self._is_refused():
            rank.deliver(self.plan.latency_s, lambda: answer(None, CoordinationError("reset")))
        elif rank.is_cut():
            late_s = operation.timeout_s + self.plan.call_s
            rank.deliver(late_s, lambda: answer(None, CoordinationError("no answer")))
        elif operation.key in self.values:
            wake()
        else:
            self._waiters.setdefault(operation.key, []).append(wake)
            self.after(operation.timeout_s, lambda: wake(False))

    def _is_refused(self):
        """Whether the store's process has ended, so calls end at once; if not, they hang."""
        return self.plan.hosted and self.ranks[0].dead

    def register(self, number):
        value = self.values.get(posts.end_key(number))
        return None if value is None else posts.decode(posts.Verdict, value)

    # -- what must hold ------------------------------------------------------------------------

    def publish(self, number):
        root = self.root(number)
        verdict = self.register(number)
        self.hold(verdict is not None and verdict.commit, "published without a decision to commit")
        missing = [r for r in range(self.plan.world_size) if root.data.get(r) != "sealed"]
        self.hold(not missing, f"published without the data of ranks {missing[:9]}")
        root.published_s = self.now

    def delete(self, number, rank):
        root = self.root(number)
        self.hold(root.published_s is None, f"rank {rank} deleted what is published")
        root.data[rank] = "deleted"

    def hold(self, promise, text):
        if not promise:
            raise BrokenPromiseError(
                f"seed {self.plan.seed} at {self.now:.3f} s: {text}\n{self.plan}"
            )

    def _check_end(self):
        for number in range(self.plan.rounds):
            outcomes = {r.rank: r.outcomes[number] for r in self.ranks if number in r.outcomes}
            words = {word for word, _, _ in outcomes.values()}
            for rank in self.ranks:
                ended = rank.rank in outcomes or rank.dead or rank.hangs
                self.hold(ended, f"rank {rank.rank} never ends")
            self.hold(not {"committed", "aborted"} <= words, f"told {words} of one checkpoint")
            self.hold("stopped" not in words or words <= {"stopped", "aborted"}, f"told {words}")
            self._check_root(number, words)
            self._check_blame(number, outcomes)
            self._check_known(number, outcomes)
        if not self.plan.faults and self.plan.lost == 0.0 and self.plan.publish == "ok":
            self._check_sound()

    def _check_root(self, number, words):
        root = self.root(number)
        if self.plan.kind == "restore":
            whole = len(root.data) == self.plan.world_size and len(root.uids) == 1
            self.hold("committed" not in words or whole, "restored by some ranks only")
            return
        published = root.published_s is not None
        self.hold("committed" not in words or published, "told committed, and not published")
        self.hold("aborted" not in words or not published, "told aborted, and published")
        self.hold("stopped" not in words or not root.data, "told stopped, and something written")

    def _check_blame(self, number, outcomes):
        """Only the causing rank is accused while the store answers."""
        verdict = self.register(number)
        if verdict is None or verdict.commit or self.plan.lost:
            return
        guilty = {fault.rank for fault in self.plan.faults if fault.came_s is not None}
        if self.plan.hosted and 0 in guilty:  # the others could not report that they gave up
            return
        guilty |= {self.plan.differs, self.plan.restores}
        if self.plan.restores == 0:  # then each of the others sees that it does something else
            guilty |= set(range(self.plan.world_size))
        self.hold(verdict.rank in guilty, f"rank {verdict.rank} is accused: {verdict.cause}")
        for word, _, error in outcomes.values():
            if word == "aborted" and error is not None:
                self.hold(error.rank == verdict.rank, "another rank is named than was decided on")

    def _check_known(self, number, outcomes):
        """All know of the lost rank in time, if nothing else is wrong."""
        plan = self.plan
        alone = len(plan.faults) == 1 and (plan.differs, plan.restores) == (None, None)
        swift = plan.lost == 0.0 and plan.latency_s + plan.jitter_s <= plan.timeout_s / 100
        if not (alone and swift) or plan.refuse or plan.publish != "ok":
            return
        fault = plan.faults[0]
        if fault.came_s is None or fault.kind not in {"die", "stop"}:
            return
        others = [rank for rank in self.ranks if rank.rank != fault.rank]
        since_s = max([fault.came_s, *(rank.called_s[number] for rank in others)])
        since_s += max(0.0, plan.late_s - plan.timeout_s / 4)
        for rank in others:
            word, told_s, _ = outcomes[rank.rank]
            in_time = word == "committed" or told_s - since_s <= 1.25 * plan.timeout_s
            self.hold(in_time, f"rank {rank.rank} knew after {told_s - since_s:.2f} s: {word}")

    def _check_sound(self):
        sound = self.plan.differs is None and self.plan.restores is None
        for rank in self.ranks:
            for number in range(self.plan.rounds):
                word = rank.outcomes[number][0]
                expected = "stopped" if self.plan.refuse else "committed"
                self.hold(
                    not sound or word == expected, f"all was well, and rank {rank.rank}: {word}"
                )

    def known_s(self):
        """Seconds from the first fault to the end of the last faultless rank."""
        began_s = min(f.came_s for f in self.plan.faults if f.came_s is not None)
        struck = {f.rank for f in self.plan.faults}
        ends = [r.outcomes[0][1] for r in self.ranks if r.rank not in struck and 0 in r.outcomes]
        return max(ends) - began_s


@dataclass
class Root:
    """The root's data of one round."""

    data: dict = field(default_factory=dict)
    uids: set = field(default_factory=set)
    published_s: float | None = None
    last_seal_s: float = 0.0


class Rank:
    """One rank: its round, its engine, and what happens to it."""

    def __init__(self, world, rank):
        self.world = world
        self.rank = rank
        self.number = -1
        self.outcomes = {}
        self.called_s = []  # by round
        self.dead = False
        self.hangs = False
        self.stopped_until_s = 0.0
        self.cut_until_s = -1.0
        self.posts = {}
        self._resting = None
        self.round = self.commit = self._operations = None

    # -- faults --------------------------------------------------------------------------------

    def suffer(self, fault):
        now = self.world.now
        if fault.kind == "die":
            self.dead = True
        elif fault.kind == "stop":
            self.stopped_until_s = now + fault.length_s
        elif fault.kind == "hang":
            self.hangs = True
        elif fault.kind == "cut":
            self.cut_until_s = now + fault.length_s
        elif fault.kind == "leave":  # it closes its checkpointer, before it comes
            left = SlotPost(0, "save", At.CLOSED, part={"cause": "closed its checkpointer"})
            self.dead = True
            self.world._set(slot_key(self.rank), encode(left))
        elif fault.kind == "fail" and self.round is not None:
            self.deliver(0.0, lambda: self._engine(lambda: self.round.fail("No space left")))

    def is_cut(self):
        host = self.world.ranks[0]
        if self.world.plan.hosted and (host.dead or self.world.now < host.stopped_until_s):
            return True
        return self.world.now < self.cut_until_s

    def deliver(self, delay_s, event):
        """Schedule an action of this rank: when it wakes up, if it is stopped."""

        def come():
            if self.dead:
                return
            if self.world.now < self.stopped_until_s:
                self.world.after(self.stopped_until_s - self.world.now, come)
                return
            event()

        self.world.after(delay_s, come)

    # -- the conductor -------------------------------------------------------------------------

    def call(self):
        self.called_s.append(self.world.now)
        self.deliver(0.0 if self.rank else self.world.plan.late_s, self.begin)

    def begin(self):
        plan = self.world.plan
        self.number += 1
        member = RankPlace(self.rank, plan.world_size, f"node{self.rank // 8}")
        times = {"timeout_s": plan.timeout_s, "called_s": self.called_s[self.number]}
        step = 101 if self.rank == plan.differs else 100

        def expects(terms):
            return "" if terms["step"] == step else f"saves step {step}, and rank 0 another"

        if plan.kind == "save" and self.rank != plan.restores:
            self.commit = Commit()
            self.round = SaveRound(
                member, self.number, commit=self.commit, expects=expects, **times
            )
        else:
            self.round = RestoreRound(member, self.number, expects=expects, **times)
        self._phase = None
        self.posts[self.number] = 0
        self._gathers = plan.gathers and isinstance(self.round, SaveRound)
        if self._gathers:
            self.round.arrive({"structure": "0" * 32})
        self._operations = self.round.operations(self.world.now)
        if self.rank == 0 and not self._gathers:
            number = self.number
            self.deliver(2 * plan.latency_s, lambda: self._begin_all(number))
        self._go_on(None)

    def _begin_all(self, number):
        if number != self.number:
            return
        if self.world.plan.refuse:
            self._engine(lambda: self.round.refuse("busy"))
        else:
            terms = {"step": 100, "uid": f"uid-{number}", "tier": "", "generation": 0}
            self._engine(lambda: self.round.go(terms))

    def _go_on(self, answer):
        operations = self._operations
        try:
            operation = next(operations) if answer is None else operations.send(answer)
        except StopIteration:
            operation = None
        self._after_a_change()
        if operation is None:
            if self.number + 1 < self.world.plan.rounds:
                self.deliver(0.1, self.call)
            return
        self.posts[self.number] += isinstance(operation, Post)
        if isinstance(operation, Rest):
            token = self._resting = object()
            self.deliver(operation.timeout_s, lambda: self._wake(token))
            return

        def back(value, error):
            self._go_on(Answer(self.world.now, value, error))

        self.world.request(self, operation, back)

    def _wake(self, token):
        if token is self._resting:
            self._resting = None
            self._go_on(Answer(self.world.now))

    # -- the engine ----------------------------------------------------------------------------

    def _engine(self, tell):
        tell()
        self._after_a_change()
        if self._resting is not None:
            token = self._resting
            self.deliver(0.0, lambda: self._wake(token))

    def _after_a_change(self):
        while self.round.steps:
            self._carry_out(self.round.steps.popleft())
        if self.rank == 0 and self._gathers and self.round.others.all_here:
            self._gathers, number = False, self.number
            self.deliver(2 * self.world.plan.latency_s, lambda: self._begin_all(number))
        if self.round.phase is not self._phase:
            self._phase = self.round.phase
            for fault in self.world.plan.faults:
                if fault.rank == self.rank and fault.phase is self._phase:
                    self.world.after(fault.delay_s, lambda fault=fault: self.world.strike(fault))

    def _carry_out(self, step):
        world, plan, number = self.world, self.world.plan, self.number
        root = world.root(number)
        if step is Step.WORK:
            root.data[self.rank] = "writing"
            self._work(number, world.random.uniform(*plan.work_s))
        elif step is Step.MERGE:
            self.deliver(plan.merge_s, lambda: self._if_still(number, self.round.merged))
        elif step is Step.PUBLISH:
            self._publish(number)
        elif step is Step.RESOLVE:
            self.deliver(plan.latency_s, lambda: self._resolve(number))
        elif step in TOLD:
            cleans = self.commit is not None and step is Step.CLEAN_UP and self.rank in root.data
            if cleans and self.commit.may_delete_own_data:
                world.delete(number, self.rank)
            word = TOLD[step]
            self.outcomes[number] = (word, world.now, self.round.error("step 100 was not saved"))
            if self.commit is not None and word == "committed":
                world.hold(
                    self.commit.state is State.COMMITTED, "told committed, the table says no"
                )

    def _if_still(self, number, tell):
        if number == self.number and not self.hangs and not self.round.over:
            self._engine(tell)

    def _work(self, number, left_s):
        if number != self.number or self.round.over or self.hangs:
            return
        step_s = min(left_s, self.world.plan.tick_s)
        if left_s <= 0.0:
            root = self.world.root(number)
            root.data[self.rank] = "sealed"
            root.uids.add(self.round.terms["uid"])
            root.last_seal_s = self.world.now
            self._engine(
                lambda: self.round.seal({"bytes": 1, "head": "0" * 64, "hashes": "0" * 64})
            )
            return
        self.round.moved(1, 2)
        self.deliver(step_s, lambda: self._work(number, left_s - step_s))

    def _publish(self, number):
        world, plan = self.world, self.world.plan
        action = self.commit.feed(Event.PUBLISH_STARTED)
        world.hold(action is Action.PUBLISH, f"rank 0 was told to {action}")
        fate = plan.publish
        if fate in {"ok", "unanswered", "late"}:
            delay_s = plan.publish_s + (20.0 if fate == "late" else 0.0)
            world.after(delay_s, lambda: world.publish(number))
        if fate == "never":  # the race is lost for good
            answers = [Event.PUBLISH_LOST, Event.RECORD_IS_OTHER_FOR_GOOD]
            self.deliver(plan.publish_s, lambda: self._published(number, Result.NEVER, answers))
        elif fate == "ok":
            answers = [Event.PUBLISH_OK]
            self.deliver(
                2 * plan.publish_s, lambda: self._published(number, Result.COMMITTED, answers)
            )
        else:
            self.deliver(plan.call_s, lambda: self._look_back(number))

    def _look_back(self, number):
        found = self.world.root(number).published_s is not None
        answers = [Event.PUBLISH_ANSWER_LOST]
        answers.append(Event.RECORD_IS_OURS if found else Event.RECORD_ABSENT)
        self._published(number, Result.COMMITTED if found else Result.UNKNOWN, answers)

    def _published(self, number, result, events):
        if self.hangs or number != self.number:
            return
        for event in events:
            self.commit.feed(event)
        self._engine(lambda: self.round.published(result))

    def _resolve(self, number):
        if number != self.number:
            return
        found = self.world.root(number).published_s is not None
        event = Event.RECORD_IS_OURS if found else Event.RECORD_ABSENT
        self._engine(lambda: self.round.resolved(event))


PHASES = [
    p for p in Phase if p not in {Phase.COMMITTED, Phase.STOPPED, Phase.ABORTED, Phase.UNKNOWN}
]


def drawn(seed, *, most_ranks=200):
    """Draw a world from a seed: usually few ranks, one or two faults, a mediocre store."""
    pick = random.Random(seed * 7919 + 1)
    share = pick.random()
    high = 5 if share < 0.85 else 20 if share < 0.99 else most_ranks
    plan = Plan(
        seed=seed,
        world_size=pick.randint(2, high),
        kind="save" if pick.random() < 0.75 else "restore",
        rounds=pick.choice([1, 1, 2]),
        latency_s=pick.choice([0.001, 0.01, 0.1, 0.3]),
        jitter_s=pick.choice([0.0, 0.01, 0.3]),
        lost=pick.choice([0.0, 0.0, 0.0, 0.02, 0.2]),
        work_s=pick.choice([(0.0, 0.0), (0.0, 0.2), (0.1, 5.0), (6.0, 12.0)]),
        tick_s=pick.choice([0.05, 0.5, 3.0]),
        arrive_s=pick.choice([0.0, 0.1, 2.0]),
        merge_s=pick.choice([0.0, 0.05, 1.0]),
        publish_s=pick.choice([0.0, 0.02, 1.0]),
        publish=pick.choice(["ok", "ok", "ok", "unanswered", "late", "never", "nothing"]),
        refuse=pick.random() < 0.03,
    )
    if pick.random() < 0.05 and plan.world_size > 1:
        plan.differs = pick.randrange(1, plan.world_size)
    for _ in range(pick.choice([0, 1, 1, 1, 2, 3])):
        plan.faults.append(_fault(pick, plan))
    plan.gathers = random.Random(seed * 7919 + 2).random() < 0.5
    plan.hosted = random.Random(seed * 7919 + 3).random() < 0.4
    plan.late_s = random.Random(seed * 7919 + 4).choice([0.0, 0.0, 1.4, 3.0])
    return plan


def _fault(pick, plan):
    kind = pick.choice(["die", "stop", "stop", "fail", "hang", "cut"])
    rank = pick.choice([0, pick.randrange(plan.world_size)])
    fault = Fault(kind, rank, length_s=pick.choice([0.1, 2.0, 7.0, 15.0, 40.0]))
    if pick.random() < 0.6:
        fault.phase = pick.choice(PHASES)
        fault.delay_s = pick.choice([0.0, plan.latency_s * pick.random() * 2, pick.random()])
    else:
        fault.at_s = pick.uniform(0.0, 1.0 + plan.work_s[1])
    return fault


def explore(seeds, **options):
    """Run the worlds of many seeds; return the count of each outcome."""
    outcomes = {}
    for seed in seeds:
        world = World(drawn(seed, **options)).run()
        for rank in world.ranks:
            for word, _, _ in rank.outcomes.values():
                outcomes[word] = outcomes.get(word, 0) + 1
    return outcomes


def measured(world_size, merge_s=0.03):
    """The duration of a save of many ranks that all seal at the same moment.

    The store takes 10 ms for each request, its one thread 20 us, and 14 us for each key of a read;
    ranks that wait ask as often as `TorchCoordination` does.
    """
    plan = Plan(
        world_size=world_size,
        timeout_s=60.0,
        call_s=10.0,
        latency_s=0.01,
        server_s=20e-6,
        key_s=14e-6,
        poll_s=max(0.05, world_size / 20_000),
        work_s=(3.0, 3.0),
        merge_s=merge_s,
    )
    world = World(plan).run()
    root = world.root(0)
    known_s = max(rank.outcomes[0][1] for rank in world.ranks) - root.last_seal_s
    commit_s = root.published_s - root.last_seal_s
    posts_most = max(rank.posts[0] for rank in world.ranks)
    bytes_most = max(map(len, world.values.values()))
    return (
        f"{world_size} ranks, {merge_s} s to merge: {commit_s:.2f} s from the last seal to the "
        f"commit, {known_s:.2f} s until all know; per rank at most {posts_most} posts of at most "
        f"{bytes_most} bytes, {world.requests / world_size:.0f} requests"
    )


def main():
    what, *numbers = sys.argv[1:]
    began_s = time.monotonic()
    if what == "ranks":
        for number in numbers:
            print(measured(int(number)), flush=True)
            print(measured(int(number), merge_s=4.2), flush=True)
        return
    first, last = map(int, numbers)
    outcomes = explore(range(first, last))
    print(f"seeds {first} to {last - 1}: no promise broken; ranks were told {outcomes}; ", end="")
    print(f"{time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
