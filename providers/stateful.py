"""The provider of values with `state_dict` and `load_state_dict`: stored and loaded whole."""

from __future__ import annotations

import sys
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from penstock.core.abc import Node, Placement, StateObject, StateProvider
from penstock.core.errors import RestoreError, UnsupportedStateError
from penstock.core.types import Kind, show_path, with_article
from penstock.providers.children import leaves, rebuild_dict
from penstock.providers.rng import unchanged_random_state
from penstock.providers.tensor import is_sharded, new_like
from penstock.providers.wrappers import LOADERS, is_wrapper, place_wrapped, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from penstock.core.abc import DescribeContext, PlaceContext, StoredObject
    from penstock.core.types import ObjectPath

PRIORITY = 10  # low: a provider that knows the type itself comes first
REFUSED = 15  # for loaders without both methods, which are claimed to refuse them with advice
FORM = "stateful"

_WHOLE = "state"  # the only child of a state that is not a dict with string keys

# Modules and names of classes whose instances read data, a different part on each rank.
_READERS = (
    ("torch.utils.data", ("DataLoader", "Sampler", "Dataset")),
    ("torchdata.nodes", ("BaseNode", "Loader")),
    ("datasets", ("IterableDataset",)),
    ("accelerate.data_loader", ("DataLoaderAdapter",)),
)


class StatefulProvider(StateProvider):
    """Stores schedulers, gradient scalers, stateful data loaders, foreign optimizers, and so on.

    The value is restored whole or not at all, because only its own code understands its state.
    """

    name = "stateful"
    forms = (FORM,)

    def claims(self, kind: type, /) -> int | None:
        saves = getattr(kind, "state_dict", None)
        loads = getattr(kind, "load_state_dict", None)
        if callable(saves) and callable(loads):
            return PRIORITY
        return REFUSED if _is_plain_loader(kind) or is_wrapper(kind, LOADERS) else None

    def on_other_ranks(self, kind: type, /) -> Literal["error"] | None:
        """Return "error" for data readers, because each rank reads its own data."""
        return "error" if _reads_data(kind) or is_wrapper(kind, LOADERS) else None

    def describe(
        self, value: Any, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        if is_wrapper(type(value), LOADERS):
            yield from context.describe(wrapped(value, LOADERS), path)
            return
        _refuse_loader(value, path)
        state = value.state_dict()
        whole = not _has_names(state)
        children = {_WHOLE: state} if whole else state
        entries = [
            entry
            for name, item in children.items()
            for entry in context.describe(item, (*path, name))
        ]
        kind = type(value)
        yield Node(
            path,
            FORM,
            {
                "class": f"{kind.__module__}.{kind.__qualname__}",
                "ordered": type(state) is OrderedDict,
                "whole": whole,
                "objects": sum(isinstance(entry, StateObject) for entry in entries),
            },
        )
        yield from entries

    def place(self, value: Any, path: ObjectPath, /, *, context: PlaceContext) -> Placement:
        if is_wrapper(type(value), LOADERS):
            return place_wrapped(value, path, LOADERS, context=context)
        _refuse_loader(value, path)
        result = Placement(finish=lambda: value)
        node = context.node(path)
        count = leaves(context, path)
        kind = type(value).__name__
        if node is None or node.form != FORM:
            if count:
                form = "dict" if node is None else node.form
                if context.stored(path) is not None:
                    form = "plain value"
                result.problems.append(
                    f"{show_path(path)} is stored as {with_article(form)}, but is "
                    f"{with_article(kind)} in the template, "
                    "which loads only what its own state_dict returns"
                )
            elif context.selected(path):
                result.missing.append(path)
            return result
        whole = node.meta.get("objects")
        if count != whole:
            if count:
                result.problems.append(
                    f"{show_path(path)} is a {kind} and {_why_not(count, whole)}"
                )
            return result
        if not count and not context.selected(path):
            return result
        placed = self.rebuild(node, device=None, context=context)
        root = (*path, _WHOLE) if node.meta.get("whole") else path
        _place_sharded(placed, value, root, context)
        result.absorb(placed)
        # An optimizer with its own state dict loads by the numbers of parameters, and torch
        # compares no shapes: core must not restore it while a parameter is skipped.
        result.numbered = [path] if _is_optimizer(value) else []
        make = placed.finish
        assert make is not None

        def finish() -> object:
            value.load_state_dict(make())
            _spare_random_state(value)
            return value

        result.finish = finish
        return result

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        """Plan the state that `load_state_dict` takes."""
        assert isinstance(stored, Node)
        placed = rebuild_dict(stored.path, device=device, context=context)
        build: Any = placed.finish
        if stored.meta.get("whole"):
            placed.finish = lambda: next(iter(build().values()), None)
        elif stored.meta.get("ordered"):
            placed.finish = lambda: OrderedDict(build())
        return placed


def _why_not(count: int, whole: object) -> str:
    if isinstance(whole, int) and count > whole:
        return (
            "is restored whole, but each rank stored only a part of it, as pipeline stages do: put "
            "the modules themselves into the state instead of the object that wraps them"
        )
    return (
        f"is restored whole or not at all, but only {count} of its {whole} objects are selected: "
        "select or exclude all of them"
    )


def _place_sharded(placed: Placement, value: Any, path: ObjectPath, context: PlaceContext) -> None:
    """Plan a `DTensor` for each stored tensor that is a `DTensor` in the state of `value`.

    With plain tensors, each rank would read the whole tensor. The value's code would then mix it
    with a module's DTensors, which torch refuses.
    """
    if context.world_size == 1 or "torch.distributed.tensor" not in sys.modules:
        return
    if not any(_is_tensor(context, target.path) for target in placed.targets):
        return  # before `state_dict` is called
    made: dict[ObjectPath, object] = {}
    for here, item in _sharded(value.state_dict(), path):
        stored = context.stored(here)
        if stored is not None and stored.kind is Kind.TENSOR:
            new = new_like(item, stored)
            if new is not None:
                made[here] = new
    if not made:
        return
    # The plain tensors planned so far take no memory, because nothing has been written to them.
    placed.targets = [target for target in placed.targets if target.path not in made]
    for here, tensor in made.items():
        placed.targets += context.place(tensor, here).targets
    build: Any = placed.finish

    def finish() -> object:
        used: set[ObjectPath] = set()
        above = {here[:n] for here in made for n in range(len(here))}
        state = _with(build(), path, made, above, used)
        if len(used) < len(made):  # else its code would load unwritten memory
            first = next(here for here in made if here not in used)
            msg = (
                f"{show_path(first)} is not at this path in the state that was rebuilt from the "
                "checkpoint: the state_dict() that returns it must build the same containers as at "
                "the save"
            )
            raise RestoreError(msg)
        return state

    placed.finish = finish


def _is_tensor(context: PlaceContext, path: ObjectPath) -> bool:
    stored = context.stored(path)
    return stored is not None and stored.kind is Kind.TENSOR


def _sharded(state: object, path: ObjectPath) -> Iterator[tuple[ObjectPath, torch.Tensor]]:
    """Yield each `DTensor` in nested containers, with its path."""
    if is_sharded(state):
        yield path, state
    elif isinstance(state, dict):
        for key, item in state.items():
            yield from _sharded(item, (*path, str(key)))
    elif isinstance(state, list | tuple):
        for number, item in enumerate(state):
            yield from _sharded(item, (*path, str(number)))


def _with(
    state: Any,
    path: ObjectPath,
    made: Mapping[ObjectPath, object],
    above: AbstractSet[ObjectPath],
    used: set[ObjectPath],
) -> Any:
    """Return `state` with the objects of `made` put in; add their paths to `used`.

    Args:
        state: The state that was built from the stored objects.
        path: The path of `state`.
        made: The objects by path.
        above: The paths of all their containers.
        used: Collects the paths of the objects that were put in.
    """
    if path in made:
        used.add(path)
        return made[path]
    if path not in above:
        return state
    if isinstance(state, dict):
        for key, item in state.items():
            state[key] = _with(item, (*path, str(key)), made, above, used)
        return state
    if isinstance(state, list | tuple):
        numbered = enumerate(state)
        items = [_with(item, (*path, str(n)), made, above, used) for n, item in numbered]
        make = getattr(state, "_make", type(state))  # of a named tuple
        return make(items)
    return state


def _has_names(state: object) -> bool:
    return type(state) in (dict, OrderedDict) and all(type(key) is str for key in state)  # type: ignore[attr-defined]  # a dict by now


def _reads_data(kind: type) -> bool:
    bases = (getattr(sys.modules.get(module), n, None) for module, names in _READERS for n in names)
    return any(base is not None and issubclass(kind, base) for base in bases)


def _spare_random_state(value: Any) -> None:
    """Keep the next iterator of a torchdata loader from changing the global random state.

    That iterator continues the saved one, which drew its seed before the save. A second draw would
    change all later random numbers. The iterator cannot be made here, because a sampler's
    `set_epoch` call comes between the restore and the iterator.
    """
    loader = getattr(value, "base_dataloader", value)  # of accelerate
    stateful = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    if stateful is not None and isinstance(loader, stateful):
        loader._get_iterator = partial(_iterator_that_draws_nothing, loader)  # noqa: SLF001


def _iterator_that_draws_nothing(loader: Any) -> object:
    del loader._get_iterator  # noqa: SLF001 - the class's method remains, and draws
    with unchanged_random_state():
        made: object = loader._get_iterator()  # noqa: SLF001
    own = loader.generator
    if (
        own is not None
        and own is getattr(loader.sampler, "generator", None)
        and not loader.num_workers
    ):
        # torchdata leaves the generator as it was right after the sample order was drawn. The saved
        # iterator had then drawn a seed from it too.
        torch.empty((), dtype=torch.int64).random_(generator=own)
    return made


def _is_plain_loader(kind: type) -> bool:
    module: Any = sys.modules.get("torch.utils.data.dataloader")
    if module is None:
        return False
    return issubclass(kind, (module.DataLoader, module._BaseDataLoaderIter))  # noqa: SLF001


def _is_optimizer(value: object) -> bool:
    base = getattr(sys.modules.get("torch.optim"), "Optimizer", None)
    return base is not None and isinstance(value, base)


def _refuse_loader(value: object, path: ObjectPath) -> None:
    adapter = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderAdapter", None)
    if adapter is not None and issubclass(type(value), adapter):
        # The adapter always has both methods, but they work only if its loader has them.
        if not hasattr(vars(value).get("base_dataloader"), "state_dict"):
            msg = (
                f"{show_path(path)} is a {type(value).__name__} of accelerate, which cannot report "
                "its position: make the Accelerator with dataloader_config="
                "DataLoaderConfiguration(use_stateful_dataloader=True), which needs torchdata"
            )
            raise UnsupportedStateError(msg)
        return
    if callable(getattr(type(value), "load_state_dict", None)):
        return
    msg = (
        f"{show_path(path)} is a {type(value).__name__}, which cannot report its position: put a "
        "torchdata.stateful_dataloader.StatefulDataLoader in its place, the loader itself, not an "
        "iterator over it"
    )
    raise UnsupportedStateError(msg)
