"""Rounds of many ranks under faults, on a virtual clock; see `simulation.py` for what must hold."""

import pytest
from tests.core.rounds.simulation import Fault, Plan, World, drawn, explore

from penstock.core.rounds.table import Phase

SEEDS = 300
# These alone must also find a broken guard; see tools/guards.toml.
CHUNKS = 5
FOR_EVER_S = 1e9


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_promise_breaks_in_worlds_drawn_from_seeds(chunk):
    outcomes = explore(range(chunk, SEEDS, CHUNKS), most_ranks=60)
    print(outcomes)
    assert {"committed", "aborted", "unknown"} <= outcomes.keys()


def test_equal_seeds_draw_equal_worlds():
    assert [drawn(seed) for seed in range(20)] == [drawn(seed) for seed in range(20)]


def words_of(world, number=0):
    return {rank.outcomes[number][0] for rank in world.ranks if number in rank.outcomes}


@pytest.mark.parametrize("kind", ["save", "restore"])
def test_healthy_ranks_commit(kind):
    for world_size in (1, 2, 3, 20):
        world = World(Plan(kind=kind, world_size=world_size, rounds=2)).run()
        assert words_of(world, 0) == words_of(world, 1) == {"committed"}


def test_a_slow_rank_with_progress_is_awaited():
    plan = Plan(world_size=3, work_s=(100.0, 200.0), tick_s=4.5)
    assert words_of(World(plan).run()) == {"committed"}


def test_a_briefly_sleeping_rank_is_awaited():
    plan = Plan(world_size=3, faults=[Fault("stop", 1, at_s=0.5, length_s=4.0)])
    assert words_of(World(plan).run()) == {"committed"}


def test_ranks_suspended_together_accuse_none():
    lengths = {0: 100.0, 1: 100.5, 2: 101.0}
    faults = [Fault("stop", rank, at_s=5.0, length_s=length) for rank, length in lengths.items()]
    plan = Plan(world_size=3, work_s=(20.0, 20.0), timeout_s=60.0, faults=faults)
    assert words_of(World(plan).run()) == {"committed"}


@pytest.mark.parametrize("timeout_s", [6.0, pytest.param(60.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["die", "stop", "hang"])
@pytest.mark.parametrize("rank", [0, 7])
def test_all_know_of_a_dead_or_stopped_rank_after_five_quarters_of_the_timeout(
    rank, kind, timeout_s
):
    fault = Fault(kind, rank, at_s=1.7, length_s=1000.0)
    plan = Plan(world_size=8, work_s=(10.0, 12.0), timeout_s=timeout_s, faults=[fault])
    world = World(plan).run()
    # A hung rank still beats, so its last progress counts.
    assert world.known_s() <= 1.25 * timeout_s
    others = {r.outcomes[0] for r in world.ranks if r.rank != rank}
    assert {word for word, _, _ in others} == {"aborted"}
    assert {(error.rank, error.host) for _, _, error in others} == {(rank, "node0")}


@pytest.mark.parametrize("timeout_s", [3.0, 60.0])
@pytest.mark.parametrize("how", ["die", "stop"])
@pytest.mark.parametrize("kind", ["save", "restore"])
def test_all_know_in_time_if_rank_0_dies_with_the_store(kind, how, timeout_s):
    for at_s in (1.7, 1.8, 1.9, 2.0):  # at a poll, at a beat, and between them
        fault = Fault(how, 0, at_s=at_s, length_s=1000.0)
        plan = Plan(
            kind=kind,
            world_size=3,
            work_s=(10.0, 12.0),
            timeout_s=timeout_s,
            call_s=min(10.0, timeout_s / 4),
            hosted=True,
            faults=[fault],
        )
        assert World(plan).run().known_s() <= 1.1 * timeout_s


def test_all_know_in_time_with_a_slower_store():
    for at_s in (0.1, 0.4, 0.5):
        fault = Fault("die", 1, at_s=at_s)
        plan = Plan(world_size=3, work_s=(5.0, 9.0), timeout_s=3.0, latency_s=0.02, faults=[fault])
        assert World(plan).run().known_s() <= 1.25 * plan.timeout_s


@pytest.mark.parametrize(
    ("rounds", "fault"),
    [
        (1, Fault("die", 1, at_s=0.0)),  # before its first save
        (2, Fault("die", 1, phase=Phase.COMMITTED, delay_s=0.05)),  # between two
        (1, Fault("die", 1, at_s=0.2)),  # it has arrived, and rank 0 has not
    ],
)
def test_a_rank_lost_while_rank_0_was_busy_is_detected(rounds, fault):
    plan = Plan(world_size=3, rounds=rounds, late_s=2.0, work_s=(1.0, 1.0), faults=[fault])
    world = World(plan).run()
    assert words_of(world, rounds - 1) == {"aborted"}
    told_s = max(rank.outcomes[rounds - 1][1] for rank in world.ranks if not rank.dead)
    assert told_s - world.ranks[0].called_s[rounds - 1] <= 1.25 * plan.timeout_s


@pytest.mark.parametrize("kind", ["save", "restore"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_closes_instead_is_known_within_a_second(rank, kind):
    """Though ranks wait the whole timeout for a silent one."""
    for at_s in (0.0, 0.9, 1.7):
        plan = Plan(kind=kind, world_size=4, timeout_s=60.0, work_s=(20.0, 20.0))
        plan.absent, plan.faults = rank, [Fault("leave", rank, at_s=at_s)]
        world = World(plan).run()
        assert words_of(world) == {"aborted"}
        assert world.known_s() <= 1.0


@pytest.mark.parametrize("world_size", [2, 64])
def test_a_postable_error_is_known_within_a_second(world_size):
    fault = Fault("fail", world_size - 1, at_s=2.0)
    plan = Plan(world_size=world_size, work_s=(10.0, 12.0), timeout_s=60.0, faults=[fault])
    world = World(plan).run()
    assert words_of(world) == {"aborted"}
    assert world.known_s() <= 1.0


def test_ranks_save_the_next_checkpoint_after_an_abort():
    fault = Fault("fail", 1, phase=Phase.SEALED)
    world = World(Plan(world_size=4, rounds=2, faults=[fault])).run()
    assert words_of(world, 1) == {"committed"}


def test_a_rank_at_another_step_is_named():
    world = World(Plan(world_size=4, differs=2)).run()
    assert words_of(world) == {"aborted"}
    assert "saves step 101" in world.ranks[1].outcomes[0][2].cause


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_restores_while_others_save_fails(rank):
    world = World(Plan(world_size=4, restores=rank)).run()
    assert words_of(world) == {"aborted"}
    causes = {r.outcomes[0][2].cause for r in world.ranks if r.outcomes[0][2] is not None}
    assert len(causes) == 1
    assert " while rank 0 wants to " in causes.pop()


def test_a_sealed_rank_without_network_finds_the_record_of_the_others():
    fault = Fault("cut", 1, phase=Phase.SEALED, delay_s=0.5, length_s=FOR_EVER_S)
    world = World(Plan(world_size=3, work_s=(1.0, 1.0), merge_s=3.0, faults=[fault])).run()
    assert words_of(world) == {"committed"}


def test_a_sealed_rank_without_network_deletes_nothing_while_the_record_may_come():
    fault = Fault("cut", 1, phase=Phase.SEALED, delay_s=0.5, length_s=FOR_EVER_S)
    plan = Plan(world_size=3, work_s=(1.0, 1.0), merge_s=3.0, publish="late", faults=[fault])
    world = World(plan).run()
    assert world.ranks[1].outcomes[0][0] == "unknown"
    assert world.root(0).published_s > world.ranks[1].outcomes[0][1]


def test_an_unsealed_rank_without_network_gives_up_alone():
    fault = Fault("cut", 1, at_s=0.5, length_s=FOR_EVER_S)
    world = World(Plan(world_size=3, work_s=(20.0, 20.0), faults=[fault])).run()
    assert words_of(world) == {"aborted"}
    assert set(world.root(0).data.values()) == {"deleted"}


def test_a_rank_already_in_its_next_save_is_not_awaited():
    faults = [
        Fault("cut", 1, phase=Phase.SEALED, length_s=7.0),
        Fault("stop", 0, at_s=1.05, length_s=8.0),
    ]
    world = World(Plan(world_size=2, rounds=2, work_s=(1.0, 1.0), faults=faults)).run()
    assert [rank.outcomes[0][0] for rank in world.ranks] == ["aborted", "unknown"]
    assert world.register(0).cause == "has moved on from this save"


def test_a_refusal_by_rank_0_leaves_no_data():
    world = World(Plan(world_size=4, refuse=True)).run()
    assert words_of(world) == {"stopped"}


def test_others_find_the_record_of_a_rank_0_that_died_after_publishing():
    fault = Fault("die", 0, phase=Phase.PUBLISHING, delay_s=0.03)
    world = World(Plan(world_size=4, publish_s=0.02, faults=[fault])).run()
    assert words_of(world) == {"committed"}


def test_nothing_is_deleted_if_rank_0_dies_before_publishing():
    fault = Fault("die", 0, phase=Phase.PUBLISHING)
    world = World(Plan(world_size=4, publish="nothing", faults=[fault])).run()
    assert words_of(world) == {"unknown"}
    assert set(world.root(0).data.values()) == {"sealed"}


def test_each_survivor_of_an_abort_deletes_its_sealed_data():
    fault = Fault("fail", 3, phase=Phase.SEALED, delay_s=0.0)
    world = World(Plan(world_size=4, work_s=(1.0, 3.0), faults=[fault])).run()
    assert words_of(world) == {"aborted"}
    assert set(world.root(0).data.values()) == {"deleted"}


@pytest.mark.parametrize("world_size", [2, 64])
def test_a_rank_posts_at_most_six_times_besides_beats(world_size):
    world = World(Plan(world_size=world_size, timeout_s=600.0, work_s=(1.0, 2.0))).run()
    assert max(rank.posts[0] for rank in world.ranks) <= 6
    assert max(map(len, world.values.values())) <= 512


@pytest.mark.parametrize("world_size", [128, pytest.param(1024, marks=pytest.mark.slow)])
def test_from_the_last_seal_to_the_commit_takes_a_second_at_most(world_size):
    plan = Plan(
        world_size=world_size,
        timeout_s=60.0,
        latency_s=0.01,
        server_s=20e-6,
        key_s=14e-6,
        poll_s=0.05,
        work_s=(1.0, 1.5),
        merge_s=0.03,
    )
    world = World(plan).run()
    root = world.root(0)
    assert root.published_s - root.last_seal_s <= 1.0
