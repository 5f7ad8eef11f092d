"""Metrics of checkpoints, as columns of a table: the numbers in their metadata."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from penstock.core.cli.output.render import value_text, visible
from penstock.core.errors import ConfigError
from penstock.core.suggest import nearest
from penstock.core.types import show_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Metadata = Mapping[str, Any]

_SHOWN = 3  # the columns that fit a terminal of 80 cells beside step, age, sizes and state
_LONGEST = 14  # cells of a title; a longer key stays in the text of all metadata


def usual_metrics(metadata: Sequence[Metadata]) -> list[str]:
    """Return the few keys that are worth a column: numbers that most of the checkpoints have.

    A number that never changes, such as a seed, is worth none.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for one in metadata:
        for key, value in one.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[key].append(value)
    usual = [
        key
        for key, values in found.items()
        if 2 * len(values) > len(metadata) and len(visible(key)) <= _LONGEST
        if len(values) == 1 or len(set(values)) > 1
    ]
    return usual[:_SHOWN]


def check_metrics(wanted: Sequence[str], metadata: Sequence[Metadata]) -> None:
    """Refuse a metric that none of the checkpoints has; a run without checkpoints has no metrics.

    Raises:
        ConfigError: One is in no metadata.
    """
    for name in wanted:
        if metadata and all(metric_of(one, name) is None for one in metadata):
            keys = sorted({key for one in metadata for key in one})
            msg = f"no checkpoint shown has {show_value(name)} in its metadata{nearest(name, keys)}"
            raise ConfigError(msg)


def metric_of(metadata: Metadata, name: str) -> Any:
    """Return the value of a metric; None if it is not there.

    `eval.mmlu` is a key of that name, else the key `mmlu` of the mapping `eval`.
    """
    if name in metadata:
        return metadata[name]
    outer, dot, inner = name.partition(".")
    below = metadata.get(outer)
    return metric_of(below, inner) if dot and isinstance(below, dict) else None


def metric_text(metadata: Metadata, name: str) -> str:
    """Return the cell of a metric; `-` where there is none."""
    value = metric_of(metadata, name)
    return "-" if value is None else visible(value_text(value))
