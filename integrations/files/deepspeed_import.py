"""Reads folders that DeepSpeed wrote with ZeRO, from any number of ranks.

Each rank's file has its range of the flattened fp32 weights and of the optimizer's state. A read
joins the ranges of each parameter, under the model's names. DeepSpeed is not needed: inert classes
replace four of its own. Every other class that `weights_only` does not allow is refused.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from penstock import FormatError, Streamed, UnsupportedStateError
from penstock.integrations.files.torch_import import MappedFile, load_safely, refuse_stub

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

T = TypeVar("T")

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OTHERS = {
    re.compile(r".*expert.*\.pt"): "experts (MoE)",
    re.compile(r"layer_.*\.pt"): "pipeline parallelism",
    re.compile(r"zero"): "the universal format",
}
_OWN_KEYS = {
    "buffer_names", "checkpoint_parallel_dimensions", "data_sampler", "dp_world_size", "ds_config",
    "ds_version", "frozen_param_fragments", "frozen_param_shapes", "module", "mp_world_size",
    "num_experts", "optimizer", "param_shapes", "random_ltd", "shared_params",
    "sparse_tensor_module_names",
}  # fmt: skip
"""DeepSpeed's own keys beside the training state."""
_MAX_TAG_BYTES = 255


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the weights, the optimizer's state by parameter name, and the other training state.

    The values of trained weights come from the optimizer's fp32 copies. The data of weights and
    optimizer tensors is read later, when the result is saved; all else is loaded immediately.

    Args:
        folder: The folder with the files, or its parent folder, whose file `latest` names it.

    Raises:
        FormatError: A file is missing or damaged, or does not fit the others.
        UnsupportedStateError: The model was not sharded by ZeRO alone, or a file needs classes that
            cannot be loaded without running code; the error names them.
    """
    folder = _tagged(folder)
    try:
        return _Reader(folder).tree()
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        msg = f"{folder} is not what DeepSpeed writes: {type(error).__name__}: {error}"
        raise FormatError(msg, [str(folder)]) from error


def _tagged(folder: Path) -> Path:
    latest = folder / "latest"
    if not latest.is_file():
        return folder
    with latest.open("rb") as file:
        tag = file.read(_MAX_TAG_BYTES).decode(errors="replace").strip()
    if tag in {"", ".", ".."} or {"/", "\0"} & set(tag) or not (folder / tag).is_dir():
        msg = (
            f"{latest} names {tag!r}, which is not a folder beside it: is the checkpoint complete?"
        )
        raise FormatError(msg, [str(latest)])
    return folder / tag


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter, and its range in the flat memory of each rank."""

    name: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]  # start, number of elements


class _Reader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        models, states = self._files()
        self._model_files = list(map(MappedFile.of, models))
        self._state_files = list(map(MappedFile.of, states))
        self._models = [_load(path) for path in models]
        self._states = [self._typed(_load(path), "optimizer_state_dict", dict) for path in states]
        self._first = self._models[0]
        self._is_cut = "fp32_flat_groups" in self._states[0]  # the weights, too: ZeRO-3
        self._check_degrees()
        self._groups = self._read_groups()

    def tree(self) -> dict[str, Any]:
        rest = {k: v for k, v in self._first.items() if k not in _OWN_KEYS and v is not None}
        if "model" in rest:
            self._refuse("has a client state named 'model', where the weights belong")
        tree = {"model": self._weights(), "optimizer": self._optimizer(), **rest}
        return self._model_files[0].streamed(tree, {})  # type: ignore[no-any-return]  # a dict as well

    def _files(self) -> tuple[list[Path], list[Path]]:
        """Return the files of the model and of the optimizer, by rank.

        Raises:
            UnsupportedStateError: Some files are not from ZeRO alone.
        """
        names = sorted(path.name for path in self._folder.iterdir())
        for name in names:
            for other, kind in _OTHERS.items():
                if other.fullmatch(name):
                    self._refuse_kind(kind, name)
        models, states = (self._by_rank(names, pattern) for pattern in (_MODEL, _OPTIMIZER))
        if not states:
            msg = (
                f"{self._folder} has no files of ZeRO-1, 2 or 3: import its one file "
                "mp_rank_00_model_states.pt, where the weights are below `module` "
                "(--rename module=model)"
            )
            raise UnsupportedStateError(msg)
        if not models:
            self._refuse("has no file of the model: is the checkpoint complete?")
        return models, states

    def _by_rank(self, names: Sequence[str], pattern: re.Pattern[str]) -> list[Path]:
        files: dict[int, Path] = {}
        for match in filter(None, map(pattern.fullmatch, names)):
            rank, part = int(match[1] or 0), int(match[2])
            if part:
                self._refuse_kind("tensor parallelism", match[0])
            if rank in files:
                self._refuse(f"has rank {rank} twice, in {match[0]}")
            files[rank] = self._folder / match[0]
        missing = [rank for rank in range(len(files)) if rank not in files]
        if missing:
            self._refuse(f"lacks a file of rank {missing[0]}: is the checkpoint complete?")
        return [files[rank] for rank in range(len(files))]

    def _check_degrees(self) -> None:
        degrees = self._first.get("checkpoint_parallel_dimensions") or {}
        parallel = {
            "tensor parallelism": degrees.get("tp_degree"),
            "pipeline parallelism": degrees.get("pp_degree"),
            "model parallelism": self._first.get("mp_world_size"),
        }
        for name, degree in parallel.items():
            if degree not in {None, 1}:
                self._refuse_kind(name, f"degree {degree}")
        count = len(self._states)
        for state in self._states:
            count_there = state.get("partition_count")
            for number in count_there if isinstance(count_there, list) else [count_there]:
                if number != count:
                    self._refuse(f"was saved by {number} ranks, but has files of {count}")
        if len(self._models) != (count if self._is_cut else 1):
            self._refuse(f"has {len(self._models)} files of the model for {count} ranks")

    def _read_groups(self) -> list[list[_Parameter]]:
        """Return the parameters of each flat tensor."""
        groups = []
        for number, shapes in enumerate(self._typed(self._first, "param_shapes", list)):
            at, group = 0, []
            for name, sizes in shapes.items():
                shape = self._shape(name, sizes)
                if self._is_cut:
                    size, ranges = self._even_ranges(math.prod(shape), at)
                    at += size
                else:
                    ranges = self._mapped_ranges(number, name)
                group.append(_Parameter(name, shape, ranges))
            groups.append(group)
        return groups

    def _shape(self, name: object, sizes: object) -> tuple[int, ...]:
        if not isinstance(name, str) or not isinstance(sizes, tuple):
            self._refuse(f"has an invalid shape for parameter {name!r}")
        return tuple(map(int, sizes))

    def _even_ranges(self, numel: int, at: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Return the padded size of a ZeRO-3 part, and the range of elements on each rank."""
        count = len(self._states)
        size = -(-numel // count)
        return size, tuple((at, max(0, min(size, numel - n * size))) for n in range(count))

    def _mapped_ranges(self, group: int, name: str) -> tuple[tuple[int, int], ...]:
        ranges = []
        for state in self._states:
            mappings = self._typed(state, "param_slice_mappings", list)
            mapping = mappings[group].get(name) if group < len(mappings) else None
            start, numel = getattr(mapping, "start", 0), getattr(mapping, "numel", 0)
            if not all(type(n) is int and n >= 0 for n in (start, numel)):
                self._refuse(
                    f"has an invalid range for parameter {name!r}: its start and length must be "
                    "integers of at least 0"
                )
            ranges.append((start, numel))
        return tuple(ranges)

    def _weights(self) -> dict[str, Any]:
        key = "fp32_flat_groups" if self._is_cut else "single_partition_of_fp32_groups"
        flat = [self._typed(state, key, list) for state in self._states]
        if any(len(tensors) != len(self._groups) for tensors in flat):
            self._refuse("has different numbers of flat tensors and parameter groups")
        own = self._frozen() if self._is_cut else {}
        for number, group in enumerate(self._groups):
            of_ranks = [tensors[number] for tensors in flat]
            own |= {
                parameter.name: self._joined(parameter, of_ranks, "weights", self._state_files)
                for parameter in group
            }
        module = self._typed(self._first, "module", dict)
        shared = self._first.get("shared_params") or {}
        weights: dict[str, Any] = {}
        for name in dict.fromkeys([*module, *own]):
            owner = shared.get(name, name)
            value = weights[name] = own.get(owner, module.get(owner))
            # A parameter of ZeRO-3 leaves an empty tensor in the module.
            is_empty = isinstance(value, torch.Tensor) and not value.numel() and self._is_cut
            if value is None or (is_empty and owner not in self._first["buffer_names"]):
                self._refuse(f"has no values of {name!r}")
        return weights

    def _frozen(self) -> dict[str, Any]:
        weights: dict[str, Any] = {}
        for name, sizes in (self._first.get("frozen_param_shapes") or {}).items():
            shape = self._shape(name, sizes)
            _, ranges = self._even_ranges(math.prod(shape), 0)
            parts = [
                self._typed(model, "frozen_param_fragments", dict)[name] for model in self._models
            ]
            parameter = _Parameter(name, shape, ranges)
            weights[name] = self._joined(parameter, parts, "weights", self._model_files)
        return weights

    def _optimizer(self) -> dict[str, Any]:
        key = "optimizer_state_dict" if self._is_cut else "base_optimizer_state"
        bases = [self._typed(state, key, dict) for state in self._states]
        groups = self._typed(bases[0], "param_groups", list)
        numbers = [number for group in groups for number in group["params"]]
        if len(numbers) != len(self._groups):
            self._refuse("has state for the wrong number of flat tensors")
        by_number = dict(zip(numbers, self._groups, strict=True))
        states = [self._typed(base, "state", dict) for base in bases]
        state_by_name: dict[str, Any] = {}
        for number, group in by_number.items():
            of_ranks = [state.get(number, {}) for state in states]
            for parameter in group:
                state_by_name[parameter.name] = {
                    name: self._state_of(parameter, [state.get(name) for state in of_ranks], name)
                    for name in of_ranks[0]
                }
        return {
            "state": state_by_name,
            "param_groups": [
                {**group, "params": [p.name for n in group["params"] for p in by_number[n]]}
                for group in groups
            ],
        }

    def _state_of(self, parameter: _Parameter, of_ranks: list[Any], name: str) -> Any:
        first = of_ranks[0]
        if isinstance(first, torch.Tensor) and first.dim():
            return self._joined(parameter, of_ranks, name, self._state_files)
        if any(value != first for value in of_ranks):
            self._refuse(
                f"has a different {name} of {parameter.name!r} on some rank: are all files of the "
                "same step?"
            )
        # A tensor for each parameter: each step would count up a shared tensor several times.
        return first.clone() if isinstance(first, torch.Tensor) else first

    def _joined(
        self,
        parameter: _Parameter,
        of_ranks: Sequence[object],
        what: str,
        files: Sequence[MappedFile],
    ) -> Streamed:
        """Return a streamed tensor that joins the ranges of all ranks."""
        pieces = []
        for (start, numel), flat in zip(parameter.ranges, of_ranks, strict=True):
            if not isinstance(flat, torch.Tensor) or flat.dim() != 1 or len(flat) < start + numel:
                self._refuse(f"has too little {what} of {parameter.name!r}")
            pieces.append(flat[start : start + numel])
        dtypes = {piece.dtype for piece in pieces}
        if len(dtypes) != 1 or sum(map(len, pieces)) != math.prod(parameter.shape):
            self._refuse(f"has {what} of {parameter.name!r} that do not fit its shape")
        dtype = str(dtypes.pop()).removeprefix("torch.")
        data = [piece.detach().view(torch.uint8).numpy().data for piece in pieces]
        read = partial(_read_joined, list(zip(data, files, strict=True)))
        return Streamed(dtype, parameter.shape, read)

    def _typed(self, record: dict[str, Any], key: str, kind: type[T]) -> T:
        value = record.get(key)
        if not isinstance(value, kind):
            self._refuse(f"has a {type(value).__name__} as {key}, where a {kind.__name__} belongs")
        return value

    def _refuse(self, reason: str) -> NoReturn:
        msg = f"{self._folder} {reason}"
        raise FormatError(msg, [str(self._folder)])

    def _refuse_kind(self, kind: str, where: str) -> NoReturn:
        msg = (
            f"{self._folder} was saved with {kind} ({where}), which Penstock does not import: "
            "convert it with DeepSpeed's zero_to_fp32.py, and import the result"
        )
        raise UnsupportedStateError(msg)


def _read_joined(
    pieces: Sequence[tuple[memoryview, MappedFile]], start: int, out: memoryview
) -> None:
    at = done = 0
    for piece, file in pieces:
        begin = max(0, start + done - at)
        data = piece[begin : begin + out.nbytes - done]
        out[done : done + data.nbytes] = data
        if data.nbytes:
            file.check()
        done += data.nbytes
        at += piece.nbytes


class _StandIn:
    """Replaces an instance of a DeepSpeed class: keeps its attributes, and does nothing."""

    def __init__(self, *arguments: object) -> None:
        del arguments


def _stand_in(path: str) -> type[_StandIn]:
    module, _, name = path.rpartition(".")
    return type(name, (_StandIn,), {"__module__": module})


_STAND_INS: list[Any] = [
    _stand_in(f"deepspeed.{path}")
    for path in (
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.zero.config.ZeroStageEnum",
        "utils.tensor_fragment.fragment_address",
    )
]


def _load(path: Path) -> dict[str, Any]:
    refuse_stub(path)
    with torch.serialization.safe_globals(_STAND_INS):
        content = load_safely(path, str(path), mmap=True)
    if not isinstance(content, dict):
        msg = f"{path} holds a {type(content).__name__}, not a dict: it is not a DeepSpeed file"
        raise FormatError(msg, [str(path)])
    return content
