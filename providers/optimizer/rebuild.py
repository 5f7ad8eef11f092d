"""The rebuilding of optimizer state: a dict that torch's `load_state_dict` takes.

With names instead of numbers it is one that torch.distributed.checkpoint takes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.core.abc import Placement
from penstock.core.types import collide, show_path
from penstock.providers.optimizer.match import (
    MAX_PARAMETERS,
    MEMBERSHIP,
    PARAMETER_FORM,
    index_of,
    malformed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Node, PlaceContext
    from penstock.core.types import ObjectPath

Maker: TypeAlias = "Callable[[], object]"


class Rebuilder:
    """Plans the state dict of one optimizer, with parameters in the order of groups."""

    def __init__(self, stored: Node, *, device: str | None, context: PlaceContext) -> None:
        counts = stored.meta.get("groups")
        if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
            raise malformed(stored.path)
        if sum(counts) > MAX_PARAMETERS:
            raise malformed(stored.path)
        self._path = stored.path
        self._device = device
        self._context = context
        self._result = Placement()
        self._counts: list[int] = counts
        self._numbers = self._numbered()
        self._named = context.named_optimizers
        if self._named:
            self._check_names()

    def rebuild(self) -> Placement:
        """Return the plan; its `finish` returns the dict.

        Raises:
            FormatError: The stored objects do not make an optimizer.
        """
        state = self._state()
        groups = self._groups()

        def finish() -> object:
            made: dict[str, Any] = {"state": {number: make() for number, make in state}}
            if groups:
                made["param_groups"] = [{k: make() for k, make in g.items()} for g in groups]
            return made

        self._result.finish = finish
        return self._result

    def _numbered(self) -> dict[ObjectPath, int]:
        """Return the number of each parameter by the path of its state, and correct the counts.

        Ranks that train different parameters tell positions within their own groups. Then the
        parameters of a group stand in stored order, those of the first rank first.
        """
        places: list[tuple[ObjectPath, int, int]] = []
        for node in self._context.nodes((*self._path, "state")):
            if node.form == PARAMETER_FORM:
                group, position = node.meta.get("group"), node.meta.get("position")
                if not isinstance(group, int) or not isinstance(position, int):
                    raise malformed(node.path)
                if not 0 <= group < len(self._counts):
                    raise malformed(node.path)
                places.append((node.path, group, position))
        if collide([(group, position) for _, group, position in places]):
            raise malformed(self._path)
        uses = Counter((group, position) for _, group, position in places)
        of_one_rank = all(
            count == 1 and position < self._counts[group]
            for (group, position), count in uses.items()
        )
        if not of_one_rank:
            seen: Counter[int] = Counter()
            for at, (path, group, _) in enumerate(places):
                places[at] = path, group, seen[group]
                seen[group] += 1
            self._counts = [seen[group] for group in range(len(self._counts))]
        numbers = {path: self._start(group) + position for path, group, position in places}
        if collide(list(numbers.values())):
            raise malformed(self._path)
        return numbers

    def _check_names(self) -> None:
        nodes = self._context.nodes((*self._path, "state"))
        if len(self._numbers) < sum(self._counts) or not all(n.meta.get("named") for n in nodes):
            self._result.problems.append(
                f"{show_path(self._path)} is stored without parameter names: load it without "
                "named_optimizers=True, or exclude it"
            )

    def _start(self, group: int) -> int:
        return sum(self._counts[:group])

    def _state(self) -> list[tuple[int | str, Maker]]:
        found: list[tuple[int | str, Maker]] = []
        for name in self._context.children((*self._path, "state")):
            here = (*self._path, "state", name)
            number = self._numbers.get(here)
            if number is None:
                raise malformed(here)
            make = self._maker(here)
            # By names an empty state has an entry, without which torch.distributed.checkpoint
            # refuses to load it.
            if make is not None and (self._named or self._context.children(here)):
                found.append((name if self._named else number, make))
        for key in self._context.children((*self._path, "shared")):
            make = self._maker((*self._path, "shared", key))
            if make is not None:
                found.append((key, make))
        return found

    def _groups(self) -> list[dict[str, Maker]]:
        found = []
        for index in self._context.children((*self._path, "param_groups")):
            here = (*self._path, "param_groups", index)
            at = index_of(index, here)
            if at >= len(self._counts):
                raise malformed(here)
            makers = {key: self._maker((*here, key)) for key in self._context.children(here)}
            options = {k: m for k, m in makers.items() if m is not None and k not in MEMBERSHIP}
            found.append(options | {"params": _constant(self._params(at))})
        return found

    def _params(self, group: int) -> list[int] | list[str]:
        start = self._start(group)
        numbers = range(start, start + self._counts[group])
        if not self._named:
            return list(numbers)
        names = {number: path[-1] for path, number in self._numbers.items()}
        return [names[number] for number in numbers if number in names]

    def _maker(self, path: ObjectPath) -> Maker | None:
        placed = self._context.rebuild(path, device=self._device)
        self._result.absorb(placed)
        return placed.finish


def _constant(value: object) -> Maker:
    return lambda: value
