"""Compares layouts on a simulated Lustre, from 1 to 10,000 ranks, and writes the result down.

    .venv/bin/python benchmarks/lustre_sim.py            # prints the tables
    .venv/bin/python benchmarks/lustre_sim.py --write    # also into docs/lustre.md

It takes some six minutes on two idle cores. Everything here is simulated: `lustre_system.py`
says how, and from where its numbers come. Nothing was measured on a Lustre.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lustre_layouts import LAYOUTS, OURS, bytes_per_rank, penstock
from lustre_model import Simulation
from lustre_system import System, ideal_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lustre_system import Job

PAGE = Path(__file__).resolve().parent.parent / "docs" / "lustre.md"
RANKS = (1, 2, 4, 13, 64, 100, 150, 1000, 10_000)
BETWEEN = (6, 11, 20, 29, 37, 50, 70, 89, 117, 180, 256, 512)
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
    "0.5 GB/s per OST, 8 ranks on a node": replace(DISK, ost_bytes_s=0.5e9),
}
FIRST, SECOND = list(SYSTEMS)[:2]


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


def simulate(system: System, ranks: int, jobs: Sequence[Job]) -> Outcome:
    world = Simulation(system, jobs)
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
    return simulate(system, ranks, penstock(system, ranks, known=True, stripes=stripes))


FORCED = (1, 2, 4, 8, 16, 32, 96)
FORCED_RANKS = (1, 4, 13, 64, 100, 150)


def run() -> tuple[dict[tuple[str, str, int], Outcome], dict[tuple[int, int], Outcome]]:
    tasks = [(FIRST, layout, ranks) for layout in LAYOUTS for ranks in RANKS]
    tasks += [(SECOND, layout, ranks) for layout in LAYOUTS for ranks in RANKS if ranks <= 1000]
    tasks += [(name, OURS, ranks) for name in list(SYSTEMS)[1:] for ranks in (*RANKS, *BETWEEN)]
    tasks += [(FIRST, OURS, ranks) for ranks in BETWEEN]
    tasks = sorted(set(tasks), key=lambda task: -task[2])
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
            _ours_everywhere(results, RANKS),
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
        ("The same choice for awkward numbers of ranks", _ours_everywhere(results, BETWEEN)),
    ]


def _ours_everywhere(results: dict[tuple[str, str, int], Outcome], ranks: Sequence[int]) -> str:
    return table(
        ["ranks", *(f"{n:,}" for n in ranks)],
        [[name, *(f"{results[name, OURS, n].efficiency:.2f}" for n in ranks)] for name in SYSTEMS],
    )


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
        for kind, ranks in (("as tabled", RANKS), ("awkward", BETWEEN)):
            shares = {n: results[name, OURS, n].efficiency for n in ranks}
            worst = min(shares, key=lambda n: shares[n])
            verdict = "met" if shares[worst] >= GOAL else "MISSED"
            print(
                f"{name}, {kind}: at least {shares[worst]:.3f} ({worst} ranks); "
                f"goal of {GOAL} {verdict}"
            )
    if arguments.write:
        text = PAGE.read_text(encoding="utf-8")
        for number, (_, body) in enumerate(shown, start=1):
            begin, end = f"<!-- begin {number} -->", f"<!-- end {number} -->"
            head, rest = text.split(begin)
            text = f"{head}{begin}\n\n{body}\n{end}{rest.split(end)[1]}"
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
