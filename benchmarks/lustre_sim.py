"""Compares layouts on a simulated Lustre, from 1 to 10,000 ranks, and writes the result down.

    .venv/bin/python benchmarks/lustre_sim.py            # prints the tables
    .venv/bin/python benchmarks/lustre_sim.py --write    # also into docs/lustre.md

It runs in about two minutes on two idle cores. Everything here is simulated: `lustre_model.py`
says how, and from where its numbers come. Nothing was measured on a Lustre.
"""

from __future__ import annotations

import argparse
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lustre_model import MIB, File, Job, Simulation, System, ideal_s

from penstock.backends.lustre.policy import Demand, plan_striping
from penstock.backends.lustre.policy import Ost as KnownOst

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).resolve().parent.parent / "docs" / "lustre.md"
GIB = 1 << 30
REQUEST = 16 * MIB
WINDOW = 16
RANKS = (1, 2, 4, 13, 64, 100, 150, 1000, 10_000)
OTHERS = (1, 4, 13, 100, 150, 1000)
GOAL = 0.9

DISK = System()
SYSTEMS = {
    "disks, 8 ranks on a node": DISK,
    "disks, 1 rank on a node": replace(DISK, ranks_per_node=1),
    "flash, 8 ranks on a node": replace(DISK, switch_s=0.02e-3),
    "disks, 1 rank on a node, four times the switch cost": replace(
        DISK, ranks_per_node=1, switch_s=2e-3
    ),
    "1 GB/s per OST, 1 rank on a node": replace(DISK, ranks_per_node=1, ost_bytes_s=1e9),
    "0.5 GB/s per OST, 1 rank on a node": replace(DISK, ranks_per_node=1, ost_bytes_s=0.5e9),
}
FIRST, SECOND = list(SYSTEMS)[:2]

# A rank's calls to the metadata server besides those that make the blob itself: folders that are
# there already are made and opened, the blob is linked and loses its first name; then its part is
# published (made, linked, its first name removed). As `tests/backends/lustre/test_metadata.py`
# counts them.
BEFORE = ("change",) * 10
AFTER = ("change",) * 11 + ("create",)


def bytes_per_rank(ranks: int) -> int:
    """Its share of 1.5 TiB in whole requests, but 16 GiB at most and 1 GiB at least."""
    share = 1536 * GIB // ranks // REQUEST * REQUEST
    return min(16 * GIB, max(GIB, share))


def operations(system: System, names: tuple[str, ...]) -> tuple[float, ...]:
    cost = {"change": system.change_s, "create": system.create_s}
    return tuple(cost[name] for name in names)


class Server:
    """Chooses OSTs as the metadata server does: in turn, or, if free space differs, at random."""

    def __init__(self, system: System, *, even: bool) -> None:
        self._osts = system.osts
        self._even = even
        self._next = 0
        self._rng = random.Random(7)

    def choose(self, stripes: int) -> tuple[int, ...]:
        if not self._even:
            return tuple(self._rng.sample(range(self._osts), stripes))
        start, self._next = self._next, self._next + stripes
        return tuple((start + n) % self._osts for n in range(stripes))


def file_per_tensor(system: System, ranks: int) -> list[Job]:
    server = Server(system, even=True)
    count = bytes_per_rank(ranks) // REQUEST
    return [
        Job([File(server.choose(1), REQUEST, REQUEST) for _ in range(count)]) for _ in range(ranks)
    ]


def _file_per_rank(system: System, ranks: int, stripes: int, *, even: bool) -> list[Job]:
    server = Server(system, even=even)
    size = bytes_per_rank(ranks)
    return [Job([File(server.choose(stripes), size, REQUEST)]) for _ in range(ranks)]


def one_stripe(system: System, ranks: int) -> list[Job]:
    return _file_per_rank(system, ranks, 1, even=True)


def one_stripe_uneven(system: System, ranks: int) -> list[Job]:
    return _file_per_rank(system, ranks, 1, even=False)


def all_stripes(system: System, ranks: int) -> list[Job]:
    return _file_per_rank(system, ranks, system.osts, even=True)


def one_shared_file(system: System, ranks: int) -> list[Job]:
    osts, size = tuple(range(system.osts)), bytes_per_rank(ranks)
    return [Job([File(osts, size, REQUEST, shared=True)]) for _ in range(ranks)]


def chosen(system: System, ranks: int) -> list[Job]:
    return _penstock(system, ranks, known=True)


def chosen_blindly(system: System, ranks: int) -> list[Job]:
    """As chosen, but where `lfs df` is not to be had, and free space differs."""
    return _penstock(system, ranks, known=False)


def _penstock(system: System, ranks: int, *, known: bool, stripes: int | None = None) -> list[Job]:
    server = Server(system, even=False)
    osts = tuple(KnownOst(n, 1 << 60) for n in range(system.osts)) if known else ()
    size = bytes_per_rank(ranks)
    jobs = []
    for rank in range(ranks):
        demand = Demand(size, ranks, rank, REQUEST, WINDOW, salt=41)
        plan = plan_striping(demand, osts)
        places = plan.osts or server.choose(plan.stripe_count)
        if stripes is not None:
            places = tuple((rank * stripes + n) % system.osts for n in range(stripes))
        jobs.append(
            Job(
                [File(places, size, plan.stripe_bytes)],
                operations(system, BEFORE),
                operations(system, AFTER),
            )
        )
    return jobs


LAYOUTS: dict[str, Callable[[System, int], list[Job]]] = {
    "file per tensor, 1 stripe": file_per_tensor,
    "file per rank, 1 stripe": one_stripe,
    "the same, free space uneven": one_stripe_uneven,
    "file per rank, all stripes": all_stripes,
    "one shared file, all stripes": one_shared_file,
    "Penstock, OSTs unknown": chosen_blindly,
    "**Penstock**": chosen,
}
OURS = "**Penstock**"


@dataclass(frozen=True, slots=True)
class Outcome:
    seconds: float
    ideal: float
    operations: int
    objects: int
    stripes: str

    @property
    def efficiency(self) -> float:
        return self.ideal / self.seconds


def simulate(system: System, ranks: int, jobs: list[Job]) -> Outcome:
    world = Simulation(system, jobs, request_bytes=REQUEST, window=WINDOW)
    seconds = world.run()
    return Outcome(
        seconds,
        ideal_s(system, ranks, bytes_per_rank(ranks)),
        world.metadata_operations,
        sum(len(f.osts) for job in jobs for f in job.files),
        " or ".join(map(str, sorted({len(f.osts) for job in jobs for f in job.files}))),
    )


def compare(task: tuple[str, str, int]) -> Outcome:
    system, layout, ranks = task
    return simulate(SYSTEMS[system], ranks, LAYOUTS[layout](SYSTEMS[system], ranks))


def force(task: tuple[int, int]) -> Outcome:
    ranks, stripes = task
    system = SYSTEMS[SECOND]
    return simulate(system, ranks, _penstock(system, ranks, known=True, stripes=stripes))


FORCED = (1, 2, 4, 8, 16, 32, 96)
FORCED_RANKS = (1, 4, 13, 64, 100, 150)


def run() -> tuple[dict[tuple[str, str, int], Outcome], dict[tuple[int, int], Outcome]]:
    tasks = [(FIRST, layout, ranks) for layout in LAYOUTS for ranks in RANKS]
    tasks += [(SECOND, layout, ranks) for layout in LAYOUTS for ranks in RANKS if ranks <= 1000]
    tasks += [(SECOND, OURS, RANKS[-1])]
    tasks += [(name, OURS, ranks) for name in list(SYSTEMS)[2:] for ranks in OTHERS]
    tasks.sort(key=lambda task: -task[2])
    forced = [(ranks, stripes) for ranks in FORCED_RANKS for stripes in FORCED]
    with ProcessPoolExecutor(2) as pool:
        results = dict(zip(tasks, pool.map(compare, tasks), strict=True))
        forced_results = dict(zip(forced, pool.map(force, forced), strict=True))
    return results, forced_results


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def sections(
    results: dict[tuple[str, str, int], Outcome], forced: dict[tuple[int, int], Outcome]
) -> list[tuple[str, str]]:
    ranks = [f"{n:,}" for n in RANKS]
    header = ["ranks", *ranks]

    def rows(system: str, show: Callable[[Outcome], str]) -> list[list[str]]:
        return [
            [name, *(show(results[key]) if key in results else "" for key in keys)]
            for name in LAYOUTS
            for keys in [[(system, name, n) for n in RANKS]]
        ]

    def shares(system: str) -> str:
        ideal = [f"{results[system, OURS, n].ideal:,.1f}" for n in RANKS]
        return table(
            header,
            [*rows(system, lambda o: f"{o.efficiency:.2f}"), ["seconds at the peak", *ideal]],
        )

    ours = [results[FIRST, OURS, n] for n in RANKS]
    return [
        (f"Share of the simulated peak: {FIRST}", shares(FIRST)),
        (f"Share of the simulated peak: {SECOND}", shares(SECOND)),
        (
            "Operations of the metadata server, objects on OSTs",
            table(
                header,
                [
                    *rows(FIRST, lambda o: f"{o.operations:,}"),
                    [
                        "objects, one stripe per tensor",
                        *_objects(results, "file per tensor, 1 stripe"),
                    ],
                    ["objects, all stripes", *_objects(results, "file per rank, all stripes")],
                    ["objects, Penstock", *(f"{o.objects:,}" for o in ours)],
                    ["stripes per blob, Penstock", *(o.stripes for o in ours)],
                ],
            ),
        ),
        (
            "The same choice on other systems",
            table(
                ["ranks", *(f"{n:,}" for n in OTHERS)],
                [
                    [name, *(f"{results[name, OURS, n].efficiency:.2f}" for n in OTHERS)]
                    for name in SYSTEMS
                ],
            ),
        ),
        (
            f"Other stripe counts, the OSTs taken in turn: {SECOND}",
            table(
                ["stripes", *(f"{n:,} ranks" for n in FORCED_RANKS)],
                [
                    [str(s), *(f"{forced[n, s].efficiency:.2f}" for n in FORCED_RANKS)]
                    for s in FORCED
                ]
                + [
                    [
                        "chosen",
                        *(
                            f"{results[SECOND, OURS, n].efficiency:.2f} "
                            f"({results[SECOND, OURS, n].stripes})"
                            for n in FORCED_RANKS
                        ),
                    ]
                ],
            ),
        ),
    ]


def _objects(results: dict[tuple[str, str, int], Outcome], layout: str) -> list[str]:
    return [f"{results[FIRST, layout, n].objects:,}" for n in RANKS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    arguments = parser.parse_args()
    results, forced = run()
    shown = sections(results, forced)
    for title, text in shown:
        print(f"\n{title} (simulated)\n\n{text}")
    for name in SYSTEMS:
        shares = {
            n: o.efficiency
            for (where, layout, n), o in results.items()
            if (where, layout) == (name, OURS)
        }
        worst = min(shares, key=lambda n: shares[n])
        verdict = "met" if shares[worst] >= GOAL else "MISSED"
        print(f"{name}: at least {shares[worst]:.2f} ({worst} ranks); goal of {GOAL} {verdict}")
    if arguments.write:
        text = PAGE.read_text(encoding="utf-8")
        for number, (_, body) in enumerate(shown, start=1):
            begin, end = f"<!-- begin {number} -->", f"<!-- end {number} -->"
            head, rest = text.split(begin)
            text = f"{head}{begin}\n\n{body}\n{end}{rest.split(end)[1]}"
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
