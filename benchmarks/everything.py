"""All benchmarks of the page, in one run of one commit; `make bench`.

    python benchmarks/everything.py                     # 24 minutes on two cores, 10 GB of disk
    python benchmarks/everything.py --minutes 40 --scale 2 --folder /data/bench
    python benchmarks/everything.py --trial --only loop s3 --out build/trial-2.json

Writes one JSON file and, unless only parts were measured, the page and its charts. If a run is
interrupted, or a measurement of Penstock fails, the page stays unchanged.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import compare
import deltas
import files
import page
import ranks
import s3
import tiers
from bench import BUILD, Part, failed, measure, write_json

TRIAL = 0.03  # of the sizes, for a run that only checks that everything works
PENSTOCK, KEPT = "Penstock, async", "DCP async_save, kept stager"
FIRST = ("Penstock, lazy", PENSTOCK, KEPT, "TorchSnapshot async_take")
MANY = (PENSTOCK, "safetensors")
SCALED = {"gb", "small", "objects"}


# Each process is a fork of this one, so it need not import these modules again.
for name in ("penstock", "safetensors.torch", "torch.distributed.checkpoint", "torchsnapshot"):
    with suppress(ImportError):
        import_module(name)


def parts_of(scale: float) -> list[Part]:
    """All parts, most important first."""

    def part(title, benchmark, group, rounds, names=(), **options):
        scaled = {k: v * scale if k in SCALED else v for k, v in options.items()}
        whole = {k: type(options[k])(v) for k, v in scaled.items()}
        names = tuple(names or benchmark.groups[group])
        return Part(title, benchmark, group, names, whole, rounds)

    of = compare.BENCHMARK
    return [
        part("state", of, "state", 3, gb=1.0),
        part("limits", of, "limits", 3, gb=1.0),
        part("state of 3 GB", of, "state", 2, FIRST, gb=3.0, saves=1),
        part("staging", of, "staging", 2, gb=1.0),
        part("loop", of, "loop", 2, gb=0.5),
        part("state of 0.1 GB", of, "state", 3, (PENSTOCK, KEPT), gb=0.1),
        part("state of 0.3 GB", of, "state", 3, (PENSTOCK, KEPT), gb=0.3),
        part("5,000 tensors", of, "state", 2, (*MANY, "torch.save", KEPT), small=5_000),
        part("50,000 tensors", of, "state", 2, MANY, small=50_000),  # the others take minutes
        part("one of many", of, "one", 2, objects=300_000),
        *(
            part(f"ranks, {n}", ranks.BENCHMARK, "ranks", 2, (PENSTOCK, KEPT), ranks=n, gb=0.5)
            for n in (1, 2, 4, 8)
        ),
        part("s3", s3.BENCHMARK, "s3", 3, gb=0.25, mb_per_s=500.0),
        part("s3, far", s3.BENCHMARK, "s3", 1, gb=0.25, mb_per_s=250.0, latency_ms=20.0),
        part("tiers", tiers.BENCHMARK, "tiers", 3, gb=0.5),
        part("files", files.BENCHMARK, "files", 2, gb=0.5),
        part("auto, disk", of, "auto, disk", 2, gb=0.2),
        part("auto, 200 MB per s", of, "auto, 200 MB per s", 2, gb=0.2),
        part("frozen", deltas.BENCHMARK, "frozen", 2, shorten=4 if scale >= 1 else 64),
        part("chain", deltas.BENCHMARK, "chain", 2, shorten=2 if scale >= 1 else 64),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=13.5, help="limit for all rounds")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes")
    parser.add_argument("--trial", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--only", nargs="+", default=[], help="parts; then no page is written")
    parser.add_argument("--folder", type=Path, default=BUILD / "bench", help="on the disk to use")
    parser.add_argument("--out", type=Path, default=BUILD / "bench.json", help="JSON file")
    given = parser.parse_args()
    parts = parts_of(TRIAL if given.trial else given.scale)
    chosen = [p for p in parts if not given.only or any(o in p.title for o in given.only)]
    if not chosen:
        sys.exit(f"no such part; there are {', '.join(p.title for p in parts)}")
    if not given.only:
        import_module("matplotlib")  # fails now, not after the run
    measured = measure(chosen, given.folder, seconds=0 if given.trial else given.minutes * 60)
    measured["about"] |= {"trial": given.trial, "scale": TRIAL if given.trial else given.scale}
    write_json(given.out, measured)
    print(f"written: {given.out}")
    if failed(measured):
        sys.exit(f"FAILED: {'; '.join(failed(measured))}. The page is unchanged.")
    if not given.only:
        page.publish([given.out])


if __name__ == "__main__":
    main()
