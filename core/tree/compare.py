"""Compares a planned restore with the stored objects: which fit, are missing, or differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.abc import Difference, Target
from penstock.core.types import Kind, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.core.abc import ByteSink, MemoryKey, Placement, StoredObject
    from penstock.core.types import ObjectPath


def compare(
    placement: Placement,
    chosen: Mapping[ObjectPath, StoredObject],
    aliases: Mapping[ObjectPath, ObjectPath],
    is_container: Callable[[ObjectPath], bool],
) -> Placement:
    """Leave only targets that fit what is stored; list the rest as missing or as differences.

    Args:
        placement: The planned restore; changed in place, and returned.
        chosen: The selected stored objects.
        aliases: Path of a tied object -> path of the one whose bytes it shares.
        is_container: Whether a path has something stored below it.
    """
    fitting: list[Target] = []
    for target in placement.targets:
        stored = chosen.get(target.path)
        if stored is not None:
            difference = _difference(target, stored)
            if difference is None:
                fitting.append(target)
            else:
                placement.differ(difference)
        elif is_container(target.path):
            placement.differ(_other_kind(target.path, "a container"))
        else:
            placement.missing.append(target.path)
    placement.targets = _tied(fitting, aliases)
    placement.missing = list(dict.fromkeys(placement.missing))
    return placement


def _tied(targets: list[Target], aliases: Mapping[ObjectPath, ObjectPath]) -> list[Target]:
    """Give targets of the same memory one sink where the stored objects are tied, too.

    Other targets of the same memory keep their sinks; `overlap` compares the bytes stored for them.
    """
    result: list[Target] = []
    sinks: dict[tuple[MemoryKey, ObjectPath], ByteSink] = {}
    for target in targets:
        memory, sink = target.sink.memory, target.sink
        if memory is not None:
            sink = sinks.setdefault((memory, aliases.get(target.path, target.path)), sink)
        if sink is target.sink:
            result.append(target)
        else:
            result.append(Target(target.path, target.spec, target.region, sink))
    return result


def _difference(target: Target, stored: StoredObject) -> Difference | None:
    if stored.kind is not Kind.TENSOR:
        return _other_kind(target.path, "a value")
    here, there = target.spec, stored.spec
    unequal: list[tuple[str, object, object]] = []
    if there.shape != here.shape:
        unequal.append(("shape", list(there.shape), list(here.shape)))
    if there.dtype != here.dtype:
        unequal.append(("dtype", there.dtype, here.dtype))
    if not unequal:
        return None
    told = "; ".join(f"{what} {a} is stored, the template has {b}" for what, a, b in unequal)
    return Difference(
        target.path,
        stored=", ".join(f"{what} {a}" for what, a, _ in unequal),
        here=", ".join(f"{what} {b}" for what, _, b in unequal),
        sentences=(f"{show_path(target.path)}: {told}",),
        skippable=there.dtype == here.dtype,
    )


def _other_kind(path: ObjectPath, stored: str) -> Difference:
    sentence = f"{show_path(path)} is stored as {stored}, but is a tensor in the template"
    return Difference(path, stored, "a tensor", (sentence,), skippable=False)
