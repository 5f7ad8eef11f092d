"""Draws docs/assets/floatsplit.svg: the planes of a bfloat16, and exponents with and without terms.

.venv/bin/python benchmarks/codecs_picture.py /tmp/snapshots/step200.pt
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import numpy as np
import torch
import typer
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from penstock.codecs.floatsplit.entropy import entropy_bits
from penstock.codecs.floatsplit.planes import BLOCK_ELEMENTS
from penstock.codecs.floatsplit.prediction import as_matrix, estimate

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "assets" / "floatsplit.svg"
TENSOR = "blocks.2.up.weight"
SIGN, EXPONENT, MANTISSA = "#ef9a9a", "#00897b", "#cfd8dc"


def main(
    snapshot: Annotated[Path, typer.Argument(help="What make_state.py wrote.")],
    picture: Annotated[Path, typer.Argument(help="SVG to write.")] = PICTURE,
) -> None:
    """Draw the picture."""
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "penstock", "font.family": "sans-serif"})
    figure, axes = plt.subplots(
        1, 3, figsize=(12, 3.4), width_ratios=(5, 3.5, 3.5), layout="constrained"
    )
    draw_planes(axes[0])
    state = torch.load(snapshot)[TENSOR]
    top = state["v"].bfloat16().view(torch.int16).numpy().view(np.uint16)
    matrix = as_matrix(top.reshape(-1), top.shape, 0)
    assert matrix is not None
    terms = estimate(matrix).grid()
    left = (top - terms.rows[:, None] - terms.columns).view(np.int16)
    octaves = (top >> 7).astype(np.int64) - 127
    draw_histogram(axes[1], octaves, (top >> 7).astype(np.uint8), "Exponents of second moments")
    draw_histogram(
        axes[2], left >> 7, (left >> 7).astype(np.uint8), "... less row and column terms"
    )
    assert left.size > BLOCK_ELEMENTS
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, facecolor="white", metadata={"Date": None})
    typer.echo(f"Wrote {picture}")


def draw_planes(axis: plt.Axes) -> None:
    """Draw three elements, and the two planes that they become."""
    axis.set_title("Three bfloat16 become two planes", loc="left", fontweight="bold")
    colours = [SIGN, *[EXPONENT] * 8, *[MANTISSA] * 7]
    names = ["s", *["e"] * 8, *["m"] * 7]
    for row in range(3):
        for bit in range(16):
            box(axis, bit, 6 - row, colours[bit], names[bit])
    axis.annotate("", (4, 2.6), (4, 3.8), arrowprops={"arrowstyle": "->"})
    axis.annotate("", (13, 2.6), (13, 3.8), arrowprops={"arrowstyle": "->"})
    for row in range(3):
        for bit in range(8):
            box(axis, bit, 1.5 - row, EXPONENT, "e")
            box(axis, bit + 9, 1.5 - row, (SIGN, *[MANTISSA] * 7)[bit], "s" if not bit else "m")
    axis.text(4, -1.3, "few distinct bytes:\nHuffman codes", ha="center", va="top")
    axis.text(13, -1.3, "noise:\nstored as it is", ha="center", va="top")
    axis.set_xlim(-0.3, 17.3)
    axis.set_ylim(-3.2, 7.2)
    axis.axis("off")


def box(axis: plt.Axes, x: float, y: float, colour: str, name: str) -> None:
    """Draw one bit."""
    axis.add_patch(Rectangle((x, y), 0.92, 0.86, color=colour))
    dark = colour == EXPONENT
    axis.text(
        x + 0.46, y + 0.4, name, ha="center", va="center", fontsize=7,
        color="white" if dark else "black",
    )  # fmt: skip


def draw_histogram(axis: plt.Axes, values: np.ndarray, plane: np.ndarray, title: str) -> None:
    """Draw how often each exponent occurs."""
    numbers, counts = np.unique(values, return_counts=True)
    axis.bar(numbers, counts / values.size * 100, color=EXPONENT, width=0.85)
    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_ylabel("% of the elements")
    bits = entropy_bits(plane.reshape(-1))
    axis.set_xlabel(f"power of two; {bits:.2f} bits each")
    centre = int(np.median(values))
    axis.set_xlim(centre - 12, centre + 12)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    typer.run(main)
