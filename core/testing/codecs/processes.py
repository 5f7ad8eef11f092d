"""The check that frames mean the same in another process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.abc import CodecContext, Declined
from penstock.core.testing.codecs.calls import (
    ELEMENTS,
    DeclinedChunkError,
    as_given,
    compressible,
    encode,
    expect_decodes,
    expect_unchanged,
    in_words,
    random_bytes,
    rare_floats,
    try_decode,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.abc import Codec

_CHILD = (
    "import sys; from penstock.core.testing.codecs.processes import answer; answer(*sys.argv[1:])"
)
_TIMEOUT_S = 300
_INSIDE = "PENSTOCK_TESTING_CODEC_PROCESS"


@in_words
def check_other_processes(codec: Codec) -> None:
    """Check that a frame decodes to the same in the process that made it and in another one.

    A class that no other process can import, as it stands in a function or a script, is skipped.
    """
    cls = type(codec)
    if _INSIDE in os.environ:
        return  # the module of the codec checks it when it is imported: that would never end
    if _found(cls.__module__, cls.__qualname__) is not cls or cls.__module__ == "__main__":
        return
    cases = list(_cases(codec))
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        asked = {
            "config": codec.config.model_dump(mode="json"),
            "cases": [[*_facts(context), chunk.hex(), own.hex()] for chunk, own, context in cases],
        }
        Path(folder, "asked").write_text(json.dumps(asked), encoding="utf-8")
        # Another seed of hashes, so that nothing hangs on the order of a set.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), _INSIDE: "1"}
        environment["PYTHONHASHSEED"] = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        done = subprocess.run(  # noqa: S603 - Python itself
            [sys.executable, "-c", _CHILD, cls.__module__, cls.__qualname__, folder],
            env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"another process could not use the codec: {done.stderr}"
        answers = json.loads(Path(folder, "answers").read_text(encoding="utf-8"))
    for (chunk, own, context), (decoded, frame) in zip(cases, answers, strict=True):
        here = try_decode(codec, own, len(chunk), context)
        assert isinstance(here, bytes), f"decode refused its own frame: {here}"
        what = f"a frame of {len(chunk)} bytes of {context.dtype}"
        expect_unchanged(bytes.fromhex(decoded), here, f"{what}, decoded in another process,")
        if frame is not None:
            there = try_decode(codec, bytes.fromhex(frame), len(chunk), context)
            assert isinstance(there, bytes), f"decode refused {what} from another process: {there}"
            expect_unchanged(there, here, f"{what}, encoded in another process,")


def _cases(codec: Codec) -> Iterator[tuple[bytes, bytes, CodecContext]]:
    """Yield chunks that the codec takes, each with its frame."""
    for dtype, itemsize in (("uint8", 1), *ELEMENTS):
        length = 40 * 50 * itemsize
        context = as_given(codec, CodecContext(dtype, itemsize, (40, 50), 0, length))
        for chunk in (rare_floats(dtype, length), random_bytes(length), compressible(length)):
            with contextlib.suppress(DeclinedChunkError):
                frame = encode(codec, chunk, context)
                expect_decodes(codec, frame, chunk, context)
                yield chunk, frame, context


def _facts(context: CodecContext) -> list[Any]:
    return [context.dtype, context.itemsize, list(context.shape), context.start, context.raw_length]


def answer(module: str, name: str, folder: str) -> None:
    """Decode and encode what `check_other_processes` asks for, in the other process."""
    asked = json.loads(Path(folder, "asked").read_text(encoding="utf-8"))
    cls = _found(module, name)
    codec = cls(cls.Config.model_validate(asked["config"]))
    answers = []
    for dtype, itemsize, shape, start, length, chunk, frame in asked["cases"]:
        context = as_given(codec, CodecContext(dtype, itemsize, tuple(shape), start, length))
        decoded = bytearray(length)
        codec.decode(memoryview(bytes.fromhex(frame)), memoryview(decoded), context=context)
        out = memoryview(bytearray(codec.max_encoded_size(length)))
        stored = codec.encode(memoryview(bytes.fromhex(chunk)), out, context=context)
        taken = None if isinstance(stored, Declined) else bytes(out[:stored]).hex()
        answers.append([decoded.hex(), taken])
    Path(folder, "answers").write_text(json.dumps(answers), encoding="utf-8")


def _found(module: str, name: str) -> Any:
    """Return the class of that name, or None."""
    try:
        return reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError):
        return None
