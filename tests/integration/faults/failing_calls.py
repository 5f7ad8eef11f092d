"""Saves and reads in a process whose C library fails chosen calls (`failing_calls.c`).

Started by `test_failing_calls.py` with a kind of backend, a folder, and the actions; prints the
outcome of each case as one JSON object.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.integration.support import same

from penstock import Checkpointer

OPTIONS = {
    "chunk_bytes": 1 << 16,
    "block_bytes": 1 << 14,
    "workers": 2,
    "rules": [{"match": "encoded", "codecs": ["delta", "zstd"]}],
    "share": True,
}


@dataclass(frozen=True)
class Case:
    """Calls that fail during one action on a run with step 1.

    Attributes:
        does: `save`, or a way of reading or deleting step 1.
        call: Of the C library; `creat` is an open that creates a file.
        part: Of the matching names.
        number: Error number, by name.
        first: The first of the matching calls to fail.
        late: Whether the call is carried out, and only its result is lost.
    """

    does: str
    call: str
    part: str
    number: str
    first: int = 1
    late: bool = False

    def __str__(self) -> str:
        first = f"-{self.first}" if self.first > 1 else ""
        late = "-late" if self.late else ""
        return f"{self.does}-{self.call}{first}{late}-{self.part.strip('/.')}-{self.number}"


BLOBS = (".raw", ".enc")
SAVES = [
    *(Case("save", "pwritev", b, n) for b in BLOBS for n in ("EIO", "EDQUOT", "ESTALE", "ENOSPC")),
    *(Case("save", "fsync", b, n) for b in BLOBS for n in ("EIO", "EDQUOT", "ESTALE", "ENOSPC")),
    *(Case("save", "ftruncate", b, n) for b in BLOBS for n in ("EIO", "ENOSPC")),
    *(Case("save", "creat", b, n) for b in BLOBS for n in ("EIO", "EDQUOT", "ESTALE", "ENOSPC")),
    *(Case("save", "mkdirat", "/data/", n) for n in ("EIO", "EDQUOT", "ENOSPC")),
    *(Case("save", "fsync", "/blobs/", "EIO", first=n) for n in (1, 2, 3)),
    *(
        Case("save", "creat", f"{r}/~", n)
        for r in ("/parts", "/commits")
        for n in ("EIO", "ENOSPC")
    ),
    *(
        Case("save", "write", f"{r}~", n)
        for r in ("/parts/", "/commits/")
        for n in ("EIO", "ENOSPC")
    ),
    *(
        Case("save", "fsync", f"{r}~", n)
        for r in ("/parts/", "/commits/")
        for n in ("EIO", "EDQUOT")
    ),
    Case("save", "renameat", "intent", "EIO"),
    Case("save", "renameat", "/parts/", "ESTALE"),
    Case("save", "renameat", "index", "ENOSPC"),
    *(Case("save", "linkat", "/commits/", n) for n in ("EIO", "ENOSPC", "EDQUOT", "ESTALE")),
    Case("save", "linkat", "/commits/", "EIO", late=True),
    Case("save", "fsync", "/commits/", "EIO", first=2),  # of the folder: the record is in it
]
READS = [
    Case(does, call, part, number)
    for does in ("restore", "load", "verify")
    for call, part in (
        ("preadv", ".raw"), ("preadv", ".enc"), ("preadv", "/parts/"), ("pread", "/commits/"),
        ("openat", ".raw"), ("openat", "/parts/"), ("openat", "/commits/"),
    )
    for number in (("EIO", "ESTALE") if does == "restore" else ("EIO",))
]  # fmt: skip
DELETES = [
    Case("delete", "unlinkat", "/commits/", "EIO"),
    Case("delete", "fsync", "/commits", "EIO"),
    Case("delete", "unlinkat", ".raw", "EIO"),
    Case("prune", "unlinkat", "/rubbish", "EIO"),
    Case("prune", "fsync", "/blobs", "EIO"),
]
CASES = {str(case): case for case in (*SAVES, *READS, *DELETES)}


def cases(kind, what):
    """All for `posix`; for `uring`, with the same calls, one of each error number. A ring moves
    blob bytes without calls of the C library.
    """
    found = {name: case for name, case in CASES.items() if case.does in what}
    if kind == "posix":
        return found
    once = {}
    for name, case in found.items():
        if case.call not in {"pwritev", "preadv"} or case.part not in BLOBS:
            once.setdefault((case.does, case.number), name)
    return {name: CASES[name] for name in once.values()}


def make(number):
    made = torch.Generator().manual_seed(number)
    return {
        "raw": torch.randint(0, 256, (200_000,), dtype=torch.uint8, generator=made),
        "still": torch.arange(60_000.0),
        "encoded": torch.arange(50_000) ** 2 + number,
        "number": number,
    }


def blank():
    return {"raw": torch.zeros(200_000, dtype=torch.uint8), "still": torch.zeros(60_000),
            "encoded": torch.zeros(50_000).long(), "number": 0}  # fmt: skip


def open_files():
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(path.readlink()))
    return sorted(link for link in links if link.startswith("/") and "memfd:" not in link)


def causes_of(error):
    """An error and its causes, as `(names of its classes, message)`."""
    chain = []
    while error is not None:
        chain.append(([c.__name__ for c in type(error).__mro__], str(error)))
        error = error.__cause__
    return chain


def run(case, kind, root):
    """The outcome of one case."""
    library = ctypes.CDLL(None)
    seen = {}
    with Checkpointer(f"{kind}://{root}", **OPTIONS) as ckpt:
        ckpt.save(make(1), 1).result()
        rubbish = root / "data" / ("0" * 32) / "blobs" / "rubbish"
        rubbish.parent.mkdir(parents=True)
        rubbish.touch()
        os.utime(rubbish, (1e9, 1e9))
        work = {
            "save": lambda: ckpt.save(make(2), 2).result(),
            "restore": lambda: ckpt.restore(blank(), 1),
            "load": lambda: ckpt.load(1),
            "verify": lambda: ckpt.verify(1),
            "delete": lambda: ckpt.delete(1),
            "prune": lambda: prune(root),
        }[case.does]
        before = open_files()
        library.fail_calls(
            case.call.encode(), os.fsencode(root), case.part.encode(),
            getattr(errno, case.number), case.first, 1, case.late,
        )  # fmt: skip
        error = None
        try:
            work()
        except Exception as failure:  # noqa: BLE001 - reported to the test
            error = failure
        seen["hits"] = library.failed_calls()
        library.fail_calls(b"", b"", b"", 0, 0, 0, 0)
        seen["error"] = causes_of(error)
        del error
        ckpt.wait()
        seen["files"] = [before, open_files()]
        seen["staging"] = ckpt._saver.memory.staging._used
        seen["steps"] = ckpt.steps()
        seen["whole"] = [s for s in ckpt.steps() if is_whole(ckpt, s)]
        seen["latest"] = ckpt.load()["number"] if ckpt.steps() else None
        ckpt.save(make(3), 3).result()
    for _ in range(100):  # until the file system's clock has ticked
        prune(root)
        if len(list((root / "data").iterdir())) <= len(seen["whole"]) + 1:
            break
    with Checkpointer(f"posix://{root}") as fresh:
        seen["at last"] = [s for s in fresh.steps() if is_whole(fresh, s)]
    seen["data"] = sorted(path.name for path in (root / "data").iterdir())
    return seen


def prune(root):
    with Checkpointer(f"posix://{root}", grace_s=1e-6) as ckpt:
        ckpt.prune()


def is_whole(ckpt, step):
    return ckpt.verify(step, deep=True).ok and same(ckpt.load(step), make(step))


def main(kind, folder, *what):
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    answers = {
        name: run(case, kind, Path(folder) / str(number))
        for number, (name, case) in enumerate(cases(kind, what).items())
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
