"""Kills a process that saves, drains and evicts, again and again, and looks at what is left.

    python tools/kill_drains.py --kills 200

Each child saves small states to a run in tiers: the fast one has room for a few checkpoints only,
so it copies and evicts all the time. It is killed at a random moment. Then each tier is opened by
itself: whatever it lists must be whole, and hold what was saved. What the child was told to be
durable must be in the durable tier; what it was told to be committed must be in one of them. The
next child goes on. With `--drain-in process` half of the kills take the process that copies, too.
In the end everything is drained, pruned, and nothing may be left over.

    python tools/kill_drains.py --s3 --elements 1500000 --drain-in process

does so with an object store (moto's, on loopback) as the durable tier, and states that go there as
multipart uploads.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.backends import s3_server

import penstock
from penstock.core.catalog.survey import survey_records
from penstock.core.storage.open import open_backend
from penstock.core.testing.timing import FAST, timing_in_force

_ELEMENTS = 200_000  # some 1.6 MB in all: several writes, and a copy that takes a while

_elements = _ELEMENTS


@dataclass
class Told:
    """What children were told."""

    committed: set[int] = field(default_factory=set)
    durable: set[int] = field(default_factory=set)


def state_of(step: int) -> dict[str, Any]:
    """What step `step` holds: something new, something that moves a little, something still."""
    made = torch.Generator().manual_seed(step)
    same = torch.Generator().manual_seed(0)
    moving = torch.randint(1 << 30, (_elements,), generator=same, dtype=torch.int32)
    moving[step % 7 :: 7] += step
    return {
        "raw": torch.randn(_elements, generator=made),
        "packed": moving,
        "still": torch.randn(_elements, generator=same),
        "step": step,
    }


def is_same(tree: dict[str, Any], step: int) -> bool:
    """Whether a loaded tree is that of `step`."""
    expected = state_of(step)
    return (
        tree["step"] == step
        and torch.equal(tree["raw"], expected["raw"])
        and torch.equal(tree["packed"], expected["packed"])
        and torch.equal(tree["still"], expected["still"])
    )


def config_of(fast: str, durable: str, drain_in: str) -> dict[str, Any]:
    """The run: a fast tier that keeps one of what the durable one has."""
    return {
        "backend": {
            "type": "tiered",
            "fast": fast,
            "durable": durable,
            "keep_fast": 1,
            "drain_bytes_per_s": "100 MB",
            "drain_in": drain_in,
        },
        "rules": [{"match": "packed", "codecs": ["delta", "lz4"]}],
        "deltas": {"every": 5, "max_chain": 3},
        "share": True,
        "retention": {"keep_last": 4},
        "workers": 1,
        "grace_s": 3600,
    }


def child(config: dict[str, Any], first: int, pipe: int) -> None:
    """Save step after step until the end, which comes from outside."""
    with timing_in_force(FAST), penstock.Checkpointer.from_config(config) as ckpt:
        for step in range(first, first + 10_000):
            handle = ckpt.save(state_of(step), step)
            handle.committed.result()
            os.write(pipe, f"committed {step}\n".encode())

            def told(future: Any, step: int = step) -> None:
                if future.exception() is None and "durable" in future.result().tiers:
                    os.write(pipe, f"durable {step}\n".encode())

            handle.durable.add_done_callback(told)


def kill_one(
    config: dict[str, Any], first: int, told: Told, *, wait_for: int, delay_s: float, node: bool
) -> None:
    """Fork a child, kill it after a while, and take down what it was told.

    Args:
        config: The run.
        first: Its first step.
        told: What children were told.
        wait_for: So many things it is told first.
        delay_s: How long it goes on after that.
        node: Whether the process that copies for it is killed as well.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            child(config, first, writing)
        except BaseException as error:  # noqa: BLE001 - the parent has to hear of it
            os.write(writing, f"error {error!r}\n".encode())
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        heard = [lines.readline() for _ in range(wait_for)]
        time.sleep(delay_s)
        for doomed in [pid, *(children_of(pid) if node else [])]:
            with suppress(ProcessLookupError):
                os.kill(doomed, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        for line in (*heard, *lines):
            word, _, rest = line.strip().partition(" ")
            if word == "error":
                sys.exit(f"the child failed by itself: {rest}")
            getattr(told, word).add(int(rest))
    if os.WTERMSIG(status) != signal.SIGKILL:
        sys.exit("the child ended by itself")


def children_of(pid: int) -> list[int]:
    """Processes that one has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(found) for task in tasks for found in task.read_text().split()]


def problems_of(fast: str, durable: str, told: Told, config: dict[str, Any]) -> list[str]:
    """What is not as promised."""
    found = []
    listed: dict[str, list[int]] = {}
    for name, url in (("fast", fast), ("durable", durable)):
        with penstock.Checkpointer(url) as ckpt:
            listed[name] = ckpt.steps()
            for step in ckpt.steps():
                try:
                    if not is_same(ckpt.load(step), step):
                        found.append(f"step {step} in tier {name} is another's")
                except penstock.PenstockError as error:
                    found.append(f"step {step} is listed in tier {name}, and not whole: {error}")
    keep = config["retention"]["keep_last"]
    newest = sorted({*listed["fast"], *listed["durable"]})[-keep:]
    # A step that was told may be gone only by retention: then `keep` newer ones are there.
    floor = newest[0] if len(newest) == keep else 0
    found += [
        f"step {step} was told durable, and the durable tier lacks it"
        for step in told.durable
        if step >= floor and step not in listed["durable"]
    ]
    found += [
        f"step {step} was told committed, and no tier has it"
        for step in told.committed
        if step >= floor and step not in {*listed["fast"], *listed["durable"]}
    ]
    return found


def rubbish_of(url: str) -> list[str]:
    """Names that no checkpoint needs."""
    backend = open_backend(url)
    needed = survey_records(backend).needed
    names = [info.name for info in backend.list("")]
    backend.close()
    return [n for n in names if n.startswith("data/") and n.split("/")[1] not in needed]


def uploads_of(url: str) -> list[str]:
    """Names of multipart uploads to S3 that nobody has ended."""
    if not url.startswith("s3://"):
        return []
    backend = open_backend(url)
    pages = backend._store()._client.pages("list_multipart_uploads", "sweep")  # type: ignore[attr-defined] # noqa: SLF001 - what no name shows
    names = [upload["Key"] for page in pages for upload in page.get("Uploads", ())]
    backend.close()
    return names


def run(config: dict[str, Any], kills: int, seconds: float, seed: int) -> int:
    """Kill so often, or for so long; returns how many problems there were."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    fast, durable = config["backend"]["fast"], config["backend"]["durable"]
    told, seen = Told(), Counter[str]()
    longest_s = 0.3 if config["backend"]["drain_in"] == "thread" else 1.5  # a process has to start
    problems: list[str] = []
    began = time.monotonic()
    gc.freeze()
    for number in range(kills):
        if time.monotonic() - began > seconds:
            break
        first = max({*told.committed, *_steps(fast), *_steps(durable)}, default=0) + 1
        wait_for, delay_s = chance.randrange(5), chance.random() * longest_s
        node = chance.random() < 0.5  # noqa: PLR2004 - one way or the other
        kill_one(config, first, told, wait_for=wait_for, delay_s=delay_s, node=node)
        with_marks = [i.name for i in _listed(fast) if i.name.endswith("/drain.json")]
        copying = [i.name for i in _listed(durable) if i.name.endswith("/copy.json")]
        seen["kills"] += 1
        seen["with something left to copy"] += bool(with_marks)
        seen["in the middle of a copy"] += bool(copying)
        seen["with an upload under way"] += bool(uploads_of(durable))
        problems += [f"kill {number}: {p}" for p in problems_of(fast, durable, told, config)]
    with penstock.Checkpointer.from_config(config) as ckpt:
        step = max(told.committed, default=0) + 2
        ckpt.save(state_of(step), step).result()
        ckpt.wait()
    with penstock.Checkpointer.from_config({**config, "grace_s": 1e-6}) as ckpt:
        time.sleep(0.05)
        report = ckpt.prune(everything=True)
        problems += [f"prune refused: {why}" for why in report.refused]
    problems += [f"left over: {name}" for url in (fast, durable) for name in rubbish_of(url)]
    problems += [f"an upload is left over: {name}" for name in uploads_of(durable)]
    problems += problems_of(fast, durable, told, config)
    seen["told committed"], seen["told durable"] = len(told.committed), len(told.durable)
    for problem in problems:
        print(problem)
    print(", ".join(f"{count} {what}" for what, count in seen.items()), end="; ")
    print(f"{len(problems)} problems")
    return len(problems)


def _steps(url: str) -> list[int]:
    """Those of one tier: also what nobody was told of."""
    with penstock.Checkpointer(url) as ckpt:
        return ckpt.steps()


def _listed(url: str) -> Any:
    backend = open_backend(url)
    try:
        return backend.list("data/")
    finally:
        backend.close()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--durable", help="URL of the durable tier; default: a folder")
    place.add_argument("--s3", action="store_true", help="the durable tier is S3, on loopback")
    parser.add_argument("--elements", type=int, default=_ELEMENTS, help="of each of two tensors")
    parser.add_argument("--drain-in", default="thread", choices=["thread", "process"])
    parser.add_argument("--root", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    global _elements  # noqa: PLW0603 - one program, and its children
    _elements = arguments.elements
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.root))
        fast, durable = f"posix://{folder}/fast", arguments.durable or f"posix://{folder}/durable"
        if arguments.s3:
            os.environ.update(s3_server.ENVIRONMENT)
            endpoint = stack.enter_context(s3_server.running())
            # The smallest parts that S3 takes.
            durable = f"s3://{s3_server.BUCKET}/run?endpoint_url={endpoint}&part_bytes={5 << 20}"
        config = config_of(fast, durable, arguments.drain_in)
        sys.exit(bool(run(config, arguments.kills, arguments.seconds, arguments.seed)))


if __name__ == "__main__":
    main()
