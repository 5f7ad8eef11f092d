"""Fuzz the readers of stored bytes, outside the test suite.

    python -m tests.core.fuzz manifest --seconds 600

A target is a kind of record, or one of our codecs, whose decoder gets frames without a checksum
check. With atheris (`pip install atheris`, into an environment that also sees Penstock's) coverage
guides the cases, otherwise they are random. A failing case is printed as a line for
`tests/corpus/<target>.txt`, which the suite replays.
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
from typing import Any

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
LIMIT_BYTES = 8 << 30
MAX_CASE_BYTES = 48


def bred(atheris: Any, options: argparse.Namespace, known: list[bytes]) -> None:
    """Let libFuzzer generate cases; it ends the process."""
    with atheris.instrument_imports(include=["penstock"]):
        from tests.core.fuzz_targets import TARGETS
    seeds = Path(f"/tmp/penstock-fuzz-{options.target}")  # libFuzzer's scratch
    seeds.mkdir(exist_ok=True)
    for number, case in enumerate(known):
        (seeds / f"seed{number}").write_bytes(case)
    arguments = [
        sys.argv[0], str(seeds), f"-max_total_time={options.seconds}", f"-seed={options.seed + 1}",
        f"-max_len={MAX_CASE_BYTES}", "-timeout=30", "-rss_limit_mb=0", "-print_final_stats=1",
        "-artifact_prefix=/tmp/penstock-fuzz-",
    ]  # fmt: skip
    atheris.Setup(arguments, TARGETS[options.target])
    atheris.Fuzz()


def drawn(options: argparse.Namespace, known: list[bytes]) -> None:
    """Draw random cases and mutate those of the corpus until one fails."""
    from tests.core.fuzz_targets import TARGETS

    chance = random.Random(options.seed)
    outcomes: dict[object, bytes] = {}
    count, end_s = 0, time.monotonic() + options.seconds
    while time.monotonic() < end_s:
        case = chance.randbytes(chance.randint(2, MAX_CASE_BYTES))
        if known and chance.random() < 0.3:
            case = chance.choice(known)[: chance.randint(1, MAX_CASE_BYTES)] + case[:4]
        count += 1
        try:
            outcome: object = TARGETS[options.target](case)
        except Exception:  # noqa: BLE001 - to be printed
            sys.exit(f"{case.hex()}\n{traceback.format_exc()}")
        outcomes[outcome] = min(outcomes.get(outcome, case), case, key=len)
    print(f"{options.target}: {count} cases, {len(outcomes)} kinds of outcome")
    if options.collect:
        cases = sorted(outcomes.values(), key=lambda case: (len(case), case))
        options.collect.write_text("".join(case.hex() + "\n" for case in cases))


def main() -> None:
    """Run one target for some time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collect", type=Path, help="write a case per kind of outcome here")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    corpus = CORPUS / f"{options.target}.txt"
    known = [bytes.fromhex(case) for case in corpus.read_text().split()] if corpus.exists() else []
    try:
        import atheris  # not a dependency
    except ImportError:
        print("atheris is not installed: cases are drawn at random")
        drawn(options, known)
    else:
        bred(atheris, options, known)


if __name__ == "__main__":
    main()
