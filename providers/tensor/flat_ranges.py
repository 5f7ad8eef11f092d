"""Parameters that FSDP1 cuts: each rank holds a range of a parameter's flattened elements."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from penstock.core.errors import UnsupportedStateError
from penstock.core.markers import Shard, Shards
from penstock.core.types import show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.core.types import ObjectPath


@dataclass(frozen=True, slots=True)
class Flat:
    """Elements `[start, stop)` of a flattened parameter.

    Attributes:
        shape: Shape of the whole parameter.
        start: The first element.
        stop: The element after the last one.
        replica: `(i, n)`: this rank is the `i`-th of `n` ranks that hold these elements.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    replica: tuple[int, int] = (0, 1)

    def shard(self, local: torch.Tensor) -> Shard:
        """Return `local`, which holds these elements, as a shard of the whole parameter."""
        return Shard(local, self.shape, replica=self.replica, flat_range=(self.start, self.stop))


def note_piece(local: torch.Tensor) -> None:
    """Record that `local` is this rank's piece of one parameter, which may have several names."""
    _pieces[local] = True


def is_piece(tensor: object) -> bool:
    """Return whether `note_piece` recorded `tensor`."""
    return isinstance(tensor, torch.Tensor) and tensor in _pieces


def is_stored_as_tensor(item: object) -> bool:
    """Return whether `item` is a tensor, or one or more pieces of a tensor."""
    return isinstance(item, torch.Tensor | Shard | Shards)


def note_flat(parameter: torch.Tensor, flat: Flat | None) -> None:
    """Record which elements of `parameter` this rank has: all of them if `flat` is None.

    The optimizer of the parameter needs this record, because it does not know the module.
    """
    _flats[parameter] = flat


def is_noted(parameter: torch.Tensor) -> bool:
    """Return whether `note_flat` recorded `parameter`."""
    return parameter in _flats


def refuse_unknown(
    parameters: Iterable[torch.Tensor],
    path: ObjectPath,
    *,
    known: Callable[[torch.Tensor], bool] = is_noted,
) -> None:
    """Refuse parameters that FSDP1 has flattened, unless this rank's elements are known.

    Raises:
        UnsupportedStateError: A parameter's elements are not known.
    """
    # Only that package of torch marks parameters, and most processes have not loaded it.
    if "torch.distributed.fsdp" not in sys.modules:
        return
    if any(getattr(p, "_fsdp_flattened", False) and not known(p) for p in parameters):
        msg = (
            f"{show_path(path)} has parameters that FSDP1 has flattened, and Penstock does not "
            "know which of their elements this rank holds: put the outermost "
            "FullyShardedDataParallel module itself into the state"
        )
        raise UnsupportedStateError(msg)


def flat_of(parameter: torch.Tensor) -> Flat | None:
    """Return which elements a parameter has; None if it is not cut by ranges."""
    if not _flats.data:
        return None
    flat: Flat | None = _flats.get(parameter)  # type: ignore[no-untyped-call]  # torch has no type
    return flat


_flats = WeakIdKeyDictionary()
_pieces = WeakIdKeyDictionary()
