"""A planned restore against what is stored: what fits, what is missing, what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.abc import Target
from penstock.core.types import Kind, show_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from penstock.core.abc import ByteSink, MemoryKey, Placement, StoredObject
    from penstock.core.types import ObjectPath


def compare(
    placement: Placement,
    chosen: Mapping[ObjectPath, StoredObject],
    aliases: Mapping[ObjectPath, ObjectPath],
    containers: AbstractSet[ObjectPath],
) -> Placement:
    """Leave only targets that fit what is stored; list the rest in `missing` and `problems`.

    Args:
        placement: Changed in place, and returned.
        chosen: Selected stored objects.
        aliases: Path of a tied object -> path of the one whose bytes it shares.
        containers: Paths that have something stored below them.
    """
    fitting: list[Target] = []
    for target in placement.targets:
        stored = chosen.get(target.path)
        if stored is not None:
            problem = _difference(target, stored)
            if problem is None:
                fitting.append(target)
            else:
                placement.problems.append(problem)
        elif target.path in containers:
            placement.problems.append(
                f"{show_path(target.path)} is stored as a container, but is a tensor in the "
                "template"
            )
        else:
            placement.missing.append(target.path)
    placement.targets = _tied(fitting, aliases, placement.problems)
    placement.missing = list(dict.fromkeys(placement.missing))
    return placement


def _tied(
    targets: list[Target], aliases: Mapping[ObjectPath, ObjectPath], problems: list[str]
) -> list[Target]:
    """Give targets of the same memory one sink; they must be tied in the checkpoint too."""
    result: list[Target] = []
    sinks: dict[MemoryKey, tuple[ByteSink, ObjectPath]] = {}
    for target in targets:
        memory = target.sink.memory
        if memory is None:
            result.append(target)
            continue
        sink, first = sinks.setdefault(memory, (target.sink, target.path))
        if aliases.get(first, first) == aliases.get(target.path, target.path):
            result.append(Target(target.path, target.spec, target.region, sink))
        else:
            problems.append(
                f"{show_path(target.path)} and {show_path(first)} share memory in the template, "
                "but are stored as two tensors: untie them, or select one"
            )
    return result


def _difference(target: Target, stored: StoredObject) -> str | None:
    shown = show_path(target.path)
    if stored.kind is not Kind.TENSOR:
        return f"{shown} is stored as a value, but is a tensor in the template"
    here, there = target.spec, stored.spec
    parts = []
    if there.shape != here.shape:
        parts.append(f"shape {list(there.shape)} is stored, the template has {list(here.shape)}")
    if there.dtype != here.dtype:
        parts.append(f"dtype {there.dtype} is stored, the template has {here.dtype}")
    return f"{shown}: {'; '.join(parts)}" if parts else None
