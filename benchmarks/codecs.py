"""Compares `floatsplit` with zipnn, blosc2 and zstd on the state of a small GPT in training.

One thread, GB of raw bytes per second of CPU time of the process. In each round every codec encodes
and decodes all tensors of a kind, chunk by chunk as a checkpoint does, and what comes back is
compared. The medians go into docs/codecs.md, with a chart. Codecs that are not installed are left
out with a line that says so:

    .venv/bin/python -m pip install -c constraints.txt blosc2 zipnn numba
    .venv/bin/python benchmarks/codecs.py --snapshots /tmp/snapshots
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import make_state
import matplotlib as mpl
import numpy as np
import torch
import typer
from matplotlib import pyplot as plt
from matplotlib.transforms import Bbox
from tables import insert, markdown_table

from penstock.codecs.floatsplit import FloatsplitCodec, FloatsplitConfig, entropy, planes
from penstock.codecs.floatsplit import codec as floatsplit
from penstock.codecs.zstd import ZstdCodec, ZstdConfig
from penstock.core.abc import DECLINED, Codec, CodecContext

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "codecs.md"
CHART = ROOT / "docs" / "assets" / "codecs.svg"
RESULTS = ROOT / "build" / "codecs.json"
CHUNK, SLAB, PIECE = 16 << 20, 1 << 20, 1 << 20
KINDS = ("w bf16", "w fp32", "m fp32", "v fp32", "m bf16", "v bf16")
# 14 bytes for each parameter: what mixed-precision training with Adam keeps.
STATE = ("w bf16", "w fp32", "m fp32", "v fp32")
TITLES = {"w": "weights", "m": "first moments", "v": "second moments"}
# Where a label may stand: in points from its dot, the best place first.
PLACES = tuple(
    (side * across, up)
    for up, across in ((0, 7), (7, 5), (-7, 5), (12, 0), (-12, 0), (17, 0), (-17, 0))
    for side in ((1, -1) if across else (1,))
)
OUR_COLOUR, PEER_COLOUR = "#00897b", "#90a4ae"


@dataclass(frozen=True)
class Chunk:
    """Bytes that are encoded in one go, and what a codec may know of them."""

    data: np.ndarray
    context: CodecContext


class Contender(ABC):
    """A codec as its users would call it, one thread."""

    name: str

    @abstractmethod
    def prepare(self, chunk: Chunk) -> list[Any]:
        """Return what is encoded: not timed."""

    @abstractmethod
    def encode(self, pieces: list[Any], chunk: Chunk) -> list[Any]:
        """Return frames."""

    @abstractmethod
    def decode(self, frames: list[Any], chunk: Chunk) -> Any:
        """Return what compares equal to the chunk's bytes."""

    def joined(self, decoded: Any) -> np.ndarray:
        """Return the decoded bytes: not timed."""
        return np.frombuffer(decoded, np.uint8)


class Penstock(Contender):
    """A codec of ours, into and out of memory that is used again."""

    def __init__(self, name: str, codec: Codec, *, fused: bool = True) -> None:
        self.name, self.codec, self.fused = name, codec, fused
        self.out = np.zeros(codec.max_encoded_size(CHUNK), np.uint8)
        self.back = np.zeros(CHUNK, np.uint8)

    def prepare(self, chunk: Chunk) -> list[Any]:
        self._choose()
        return [chunk.data]

    def encode(self, pieces: list[Any], chunk: Chunk) -> list[Any]:
        length = self.codec.encode(pieces[0].data, self.out.data, context=chunk.context)
        return pieces if length is DECLINED else [self.out[:length]]

    def decode(self, frames: list[Any], chunk: Chunk) -> Any:
        back = self.back[: chunk.data.size]
        if frames[0] is chunk.data:
            return chunk.data
        self.codec.decode(frames[0].data, back.data, context=chunk.context)
        return back

    def _choose(self) -> None:
        if isinstance(self.codec, FloatsplitCodec):
            floatsplit._splitter = SPLITTER if self.fused else lambda: planes  # noqa: SLF001
            entropy._pair_coder = PAIR_CODER if self.fused else lambda: None  # noqa: SLF001


class Zipnn(Contender):
    """It overwrites what it compresses, so it gets copies; on pieces of 1 MiB it is fastest."""

    name = "zipnn"

    def __init__(self) -> None:
        import zipnn  # noqa: PLC0415 - may be missing

        self.of = {
            dtype: zipnn.ZipNN(bytearray_dtype=dtype, threads=1)
            for dtype in ("bfloat16", "float32")
        }

    def prepare(self, chunk: Chunk) -> list[Any]:
        return [bytearray(chunk.data[s : s + PIECE]) for s in range(0, chunk.data.size, PIECE)]

    def encode(self, pieces: list[Any], chunk: Chunk) -> list[Any]:
        codec = self.of[chunk.context.dtype]
        return [codec.compress(piece) for piece in pieces]

    def decode(self, frames: list[Any], chunk: Chunk) -> Any:
        codec = self.of[chunk.context.dtype]
        return [codec.decompress(frame) for frame in frames]

    def joined(self, decoded: Any) -> np.ndarray:
        return np.concatenate([np.frombuffer(piece, np.uint8) for piece in decoded])


class Blosc(Contender):
    """blosc2 at its first level, into memory that is used again where it can."""

    def __init__(self, name: str, codec: str, filter_: str) -> None:
        import blosc2  # noqa: PLC0415 - may be missing

        self.name, self.blosc2 = name, blosc2
        self.options = {
            "codec": blosc2.Codec[codec],
            "filters": [blosc2.Filter[filter_]],
            "filters_meta": [0],
            "clevel": 1,
            "nthreads": 1,
        }
        self.back = np.zeros(CHUNK, np.uint8)

    def prepare(self, chunk: Chunk) -> list[Any]:
        return [chunk.data]

    def encode(self, pieces: list[Any], chunk: Chunk) -> list[Any]:
        return [self.blosc2.compress2(pieces[0], typesize=chunk.context.itemsize, **self.options)]

    def decode(self, frames: list[Any], chunk: Chunk) -> Any:
        back = self.back[: chunk.data.size]
        self.blosc2.decompress2(frames[0], dst=back, nthreads=1)
        return back


SPLITTER = floatsplit._splitter  # noqa: SLF001
PAIR_CODER = entropy._pair_coder  # noqa: SLF001


def main(
    snapshots: Annotated[Path, typer.Option(help="What make_state.py wrote.")] = Path(
        "/tmp/snapshots"
    ),
    rounds: Annotated[int, typer.Option(help="Rounds; every codec once in each.", min=1)] = 7,
    step: Annotated[int, typer.Option(help="The snapshot to encode.")] = 200,
    page: Annotated[Path, typer.Option(help="The page with the markers.")] = PAGE,
    chart: Annotated[Path, typer.Option(help="SVG to write.")] = CHART,
) -> None:
    """Measure, print, and update the page."""
    torch.set_num_threads(1)
    if not (snapshots / f"step{step}.pt").exists():
        typer.echo(f"No snapshot in {snapshots}: training one, some 20 minutes")
        make_state.main(snapshots)
    everyone = contenders()
    data = load(snapshots / f"step{step}.pt")
    before = os.getloadavg()[0]
    results = measure(everyone, data, rounds)
    found = {
        "results": results,
        "setting": setting(rounds, before),
        "raw": {kind: sum(c.data.size for c in chunks) for kind, chunks in data.items()},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1))
    tables = {"codecs": table(found), "state": state_table(found), "run": found["setting"]}
    text = page.read_text()
    for name, body in tables.items():
        print(f"\n{body}")
        text = insert(text, name, body)
    page.write_text(text)
    draw(found, chart)
    typer.echo(f"\nUpdated {page} and {chart}")


def contenders() -> list[Contender]:
    """Return all codecs that are there, and say which are not."""
    found: list[Contender] = []
    try:
        import numba  # noqa: F401, PLC0415 - may be missing
    except ImportError as error:
        print(f"Left out: floatsplit with numba ({error})")
    else:
        found.append(Penstock("floatsplit, numba", FloatsplitCodec(FloatsplitConfig())))
    found.append(Penstock("floatsplit", FloatsplitCodec(FloatsplitConfig()), fused=False))
    for make in (
        Zipnn,
        lambda: Blosc("blosc2 zstd", "ZSTD", "SHUFFLE"),
        lambda: Blosc("blosc2 lz4", "LZ4", "BITSHUFFLE"),
    ):
        try:
            found.append(make())
        except ImportError as error:
            print(f"Left out: {error}")
    found.append(Penstock("zstd 1", ZstdCodec(ZstdConfig(level=1))))
    return found


def load(path: Path) -> dict[str, list[Chunk]]:
    """Return the chunks of each kind, cut as a checkpoint cuts them."""
    state = torch.load(path)
    data = {}
    for kind in KINDS:
        which, dtype = kind.split()
        tensors = [values[which] for values in state.values()]
        data[kind] = cut([t.bfloat16() if dtype == "bf16" else t for t in tensors])
    return data


def cut(tensors: list[torch.Tensor]) -> list[Chunk]:
    """Return chunks of 16 MiB of each tensor; tensors below 1 MiB share chunks of 1 MiB."""
    chunks, small = [], []
    dtype, size = str(tensors[0].dtype).removeprefix("torch."), tensors[0].element_size()
    for tensor in tensors:
        raw = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        if raw.size < SLAB:
            small.append(np.pad(raw, (0, -raw.size % 64)))
            continue
        for start in range(0, raw.size, CHUNK):
            part = raw[start : start + CHUNK].copy()
            context = CodecContext(dtype, size, tuple(tensor.shape), start, part.size)
            chunks.append(Chunk(part, context))
    while small:
        slab = [small.pop(0)]
        while small and sum(part.size for part in slab) + small[0].size <= SLAB:
            slab.append(small.pop(0))
        raw = np.concatenate(slab)
        chunks.append(Chunk(raw, CodecContext(dtype, size, (raw.size // size,), 0, raw.size)))
    return chunks


def measure(
    everyone: list[Contender], data: dict[str, list[Chunk]], rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return stored bytes and median rates, by codec and kind."""
    taken: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for turn in range(rounds + 1):  # the first one compiles, and touches memory
        for kind, chunks in data.items():
            shift = turn % len(everyone)
            for contender in everyone[shift:] + everyone[:shift]:
                once = one_round(contender, chunks)
                if turn:
                    taken.setdefault((contender.name, kind), []).append(once)
        print(f"round {turn} of {rounds}", flush=True)
    results: dict[str, dict[str, dict[str, float]]] = {c.name: {} for c in everyone}
    for (name, kind), times in taken.items():
        raw = sum(chunk.data.size for chunk in data[kind])
        stored, encode, decode = zip(*times, strict=True)
        results[name][kind] = {
            "stored": stored[0],
            "encode_s": statistics.median(encode),
            "decode_s": statistics.median(decode),
            "ratio": raw / stored[0],
            "encode": raw / statistics.median(encode) / 1e9,
            "decode": raw / statistics.median(decode) / 1e9,
        }
    return results


def one_round(contender: Contender, chunks: list[Chunk]) -> tuple[int, float, float]:
    """Encode and decode all chunks once; return stored bytes, and seconds of CPU for each."""
    stored, encode_s, decode_s = 0, 0.0, 0.0
    for chunk in chunks:
        pieces = contender.prepare(chunk)
        begun = time.process_time()
        frames = contender.encode(pieces, chunk)
        encode_s += time.process_time() - begun
        stored += sum(memoryview(frame).nbytes for frame in frames)
        begun = time.process_time()
        decoded = contender.decode(frames, chunk)
        decode_s += time.process_time() - begun
        if not np.array_equal(contender.joined(decoded), chunk.data):
            message = f"{contender.name} changed a chunk of {chunk.context}"
            raise SystemExit(message)
    return stored, encode_s, decode_s


def table(found: dict[str, Any]) -> str:
    """Return ratio and rates of each codec and kind."""
    columns = ("smaller by, encoded, decoded", *KINDS)
    cells = []
    for name, kinds in found["results"].items():
        row = [f"**{name}**" if name.startswith("floatsplit") else name]
        for kind in KINDS:
            of = kinds[kind]
            row.append(f"{of['ratio']:.3f}x, {of['encode']:.2f}, {of['decode']:.2f}")
        cells.append(row)
    return markdown_table(columns, cells)


def state_table(found: dict[str, Any]) -> str:
    """Return what becomes of a whole state of 14 bytes for each parameter."""
    raw = sum(found["raw"][kind] for kind in STATE)
    cells = []
    for name, kinds in found["results"].items():
        stored = sum(kinds[kind]["stored"] for kind in STATE)
        derived = stored - kinds["w bf16"]["stored"]
        seconds = [sum(kinds[kind][way] for kind in STATE) for way in ("encode_s", "decode_s")]
        cells.append(
            [
                f"**{name}**" if name.startswith("floatsplit") else name,
                f"{raw / stored:.3f}x",
                f"{raw / derived:.3f}x",
                *(f"{raw / s / 1e9:.2f}" for s in seconds),
            ]
        )
    columns = ("14 bytes per parameter", "smaller by", "... bf16 derived", "encoded", "decoded")
    return markdown_table(columns, cells)


def setting(rounds: int, load_before: float) -> str:
    """Return where and how it was measured."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
    names = ("numpy", "backports.zstd", "zstandard", "numba", "zipnn", "blosc2")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return (
        f"- {os.cpu_count()} cores ({model}), Python {platform.python_version()}, "
        f"{', '.join(versions)}.\n"
        f"- {rounds} rounds, {time.strftime('%Y-%m-%d')}. Load average {load_before:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after (this run alone: 1)."
    )


def draw(found: dict[str, Any], chart: Path) -> None:
    """Draw ratio against rate for each kind, of encoding and of decoding."""
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "penstock", "font.family": "sans-serif"})
    kinds = ("w bf16", "w fp32", "v fp32", "v bf16")
    figure, axes = plt.subplots(2, 4, figsize=(12, 5.6), layout="constrained", sharex="col")
    panels = []
    for column, kind in enumerate(kinds):
        which, dtype = kind.split()
        for row, way in enumerate(("encode", "decode")):
            axis = axes[row][column]
            dots = {
                name: (of[kind]["ratio"], of[kind][way]) for name, of in found["results"].items()
            }
            for name, (x, y) in dots.items():
                ours = name.startswith("floatsplit")
                axis.scatter(x, y, s=36, color=OUR_COLOUR if ours else PEER_COLOUR, zorder=3)
            panels.append((axis, dots))
            axis.set_ylim(bottom=0, top=1.25 * max(r[kind][way] for r in found["results"].values()))
            axis.margins(x=0.45)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(color="#eceff1")
            axis.set_axisbelow(True)
            if not row:
                axis.set_title(f"{TITLES[which]}, {dtype}", loc="left", fontweight="bold")
            else:
                axis.set_xlabel("times smaller")
            if not column:
                axis.set_ylabel(f"{way}: GB/s of one core")
    figure.canvas.draw()  # only now is known where the dots stand on the page, and there they stay
    figure.set_layout_engine("none")
    for axis, dots in panels:
        label(axis, dots)
    chart.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(chart, facecolor="white", metadata={"Date": None})


def label(axis: plt.Axes, dots: dict[str, tuple[float, float]]) -> None:
    """Write the name of each dot beside it, where it covers no dot and no other name."""
    radius = 6 * axis.figure.dpi / 72  # in pixels: the dot, and some room around it
    places = axis.transData.transform(list(dots.values()))
    taken = [Bbox.from_extents(*(place - radius), *(place + radius)) for place in places]
    for name, dot in dots.items():
        names = []
        for across, up in PLACES:
            side = "center" if not across else "left" if across > 0 else "right"
            names.append(
                axis.annotate(
                    name, dot, xytext=(across, up), textcoords="offset points",
                    fontsize=7, ha=side, va="center", zorder=4,
                )
            )  # fmt: skip
        boxes = [text.get_window_extent() for text in names]
        costs = [
            sum(overlap(box, other) for other in taken)
            + box.width * box.height
            - overlap(box, axis.bbox)
            for box in boxes
        ]
        best = costs.index(min(costs))
        for text in names[:best] + names[best + 1 :]:
            text.remove()
        taken.append(boxes[best])


def overlap(one: Bbox, other: Bbox) -> float:
    """Return the area that two boxes have in common, in square pixels."""
    both = Bbox.intersection(one, other)
    return 0.0 if both is None else both.width * both.height


if __name__ == "__main__":
    typer.run(main)
