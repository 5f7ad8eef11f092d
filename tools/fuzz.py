"""Fuzzes what reads stored bytes, outside of the test suite.

    python tools/fuzz.py manifest --seconds 600
    python tools/fuzz.py zstd --cases 1000000 --seconds 3600

A target is a kind of record, or a codec of ours, whose decoder is given frames without a checksum
before it.

With atheris (`pip install atheris`, into an environment of its own that also sees Penstock's)
cases are bred by coverage; without it they are drawn at random. A case that fails is printed as a
line for `tests/corpus/<target>.txt`, which the suite replays.
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "corpus"
LIMIT_BYTES = 8 << 30
MAX_CASE_BYTES = 48
TIMEOUT_S = 30


def main() -> int:
    """Run one target for some time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--cases", type=int, help="end after so many, if not before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collect", type=Path, help="write a case per kind of outcome here")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    try:
        import atheris  # noqa: PLC0415 - not a dependency
    except ImportError:
        print("atheris is not installed: cases are drawn at random")
        return drawn(options)
    return bred(atheris, options)


def bred(atheris: object, options: argparse.Namespace) -> int:
    """Let libFuzzer breed cases; it ends the process itself."""
    with atheris.instrument_imports(include=["penstock"]):  # type: ignore[attr-defined]
        from tests.core.fuzz_targets import TARGETS  # noqa: PLC0415
    seeds = Path(f"/tmp/penstock-fuzz-{options.target}")  # noqa: S108 - libFuzzer's scratch
    seeds.mkdir(exist_ok=True)
    for number, case in enumerate(corpus(options.target)):
        (seeds / f"seed{number}").write_bytes(case)
    arguments = [
        sys.argv[0], str(seeds), f"-max_total_time={options.seconds}", f"-seed={options.seed + 1}",
        f"-max_len={MAX_CASE_BYTES}", f"-timeout={TIMEOUT_S}", "-rss_limit_mb=0",
        f"-runs={options.cases or -1}", "-print_final_stats=1",
        "-artifact_prefix=/tmp/penstock-fuzz-",
    ]  # fmt: skip
    atheris.Setup(arguments, TARGETS[options.target])  # type: ignore[attr-defined]
    atheris.Fuzz()  # type: ignore[attr-defined]
    return 0


def drawn(options: argparse.Namespace) -> int:
    """Draw cases at random, and change those of the corpus."""
    from tests.core.fuzz_targets import TARGETS  # noqa: PLC0415

    run = TARGETS[options.target]
    chance = random.Random(options.seed)  # noqa: S311
    known = corpus(options.target)
    outcomes: dict[object, bytes] = {}
    failed = False
    count, end = 0, time.monotonic() + options.seconds
    while time.monotonic() < end and count != options.cases and not failed:
        case = chance.randbytes(chance.randint(2, MAX_CASE_BYTES))
        if known and chance.random() < 0.3:  # noqa: PLR2004
            case = chance.choice(known)[: chance.randint(1, MAX_CASE_BYTES)] + case[:4]
        count += 1
        try:
            outcome: object = run(case)
        except Exception:  # noqa: BLE001 - to be printed
            print(f"{case.hex()}\n{traceback.format_exc()}", flush=True)
            failed = True
            continue
        outcomes[outcome] = min(outcomes.get(outcome, case), case, key=len)
    print(f"{options.target}: {count} cases, {len(outcomes)} kinds of outcome")
    if options.collect:
        cases = sorted(outcomes.values(), key=lambda case: (len(case), case))
        options.collect.write_text("".join(case.hex() + "\n" for case in cases))
    return int(failed)


def corpus(target: str) -> list[bytes]:
    """The cases that the suite replays."""
    path = CORPUS / f"{target}.txt"
    return [bytes.fromhex(line) for line in path.read_text().split()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
