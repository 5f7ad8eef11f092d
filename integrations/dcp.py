"""Storage for `torch.distributed.checkpoint` (DCP) that saves checkpoints of Penstock.

```python
dcp.save(state, checkpoint_id="runs/gpt/step-100", storage_writer=penstock.dcp.Writer())
dcp.load(state, checkpoint_id="runs/gpt/step-100", storage_reader=penstock.dcp.Reader())
```
"""

from __future__ import annotations

import io
import os
import re
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from penstock import (
    Checkpointer,
    ConfigError,
    Leaves,
    Region,
    Shard,
    Shards,
    StepExistsError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.metadata import STORAGE_TYPES
    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        SavePlan,
        SavePlanner,
        WriteItem,
    )

    from penstock import Checkpoint

__all__ = ["Reader", "Writer", "run_and_step"]

_Path = tuple[str | int, ...]

_STEP = re.compile(r"(?i:(?:global_?)?step|iter|iteration|checkpoint|ckpt)?[-_=]?(\d{1,18})")
"""Folder names that contain a step. Any other name is a run's, such as `llama3`."""

_OF_FILES = frozenset(
    {
        "single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead",
        "cache_staged_state_dict", "serialization_format", "_extensions", "_extension_registry",
    }
)  # fmt: skip
"""Options of DCP's own storage that concern its files; ignored, so programs can keep them."""


def run_and_step(url: str) -> tuple[str, int | None]:
    """Split a URL into the run and the step, which is None if the last part is not a step."""
    place, mark, query = url.partition("?")
    root, slash, name = place.rstrip("/").rpartition("/")
    match = _STEP.fullmatch(name)
    if match is None:
        return url, None
    return f"{root or slash or '.'}{mark}{query}", int(match[1])


class _Storage:
    """The base of `Writer` and `Reader`: the checkpoint's location and options."""

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        step: int | None = None,
        *,
        group: Any = None,
        overwrite: bool = True,
        **options: Any,
    ) -> None:
        url = options.pop("path", url)
        self.checkpoint_id: str | os.PathLike[str] | None = url
        self._step = step
        self._overwrite = overwrite
        self._options: dict[str, Any] = {name: options[name] for name in options.keys() - _OF_FILES}
        # As numbers, which can be sent to the process of an asynchronous save.
        is_group = group is not None and not hasattr(group, "__iter__")
        self._group = dist.get_process_group_ranks(group) if is_group else group

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the location of the next save or load; None keeps the current one."""
        if checkpoint_id is not None:
            self.checkpoint_id, self._step = checkpoint_id, None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True, because Penstock itself reports why a location is unusable."""
        del checkpoint_id
        return True

    def _place(self) -> tuple[str, int | None]:
        """Return the run, and its step if one was given.

        Raises:
            ConfigError: No location was given.
        """
        if self.checkpoint_id is None:
            msg = (
                f"penstock.dcp.{type(self).__name__} has no location: give it a URL, or give dcp a "
                "checkpoint_id, such as 'runs/gpt/step-100'"
            )
            raise ConfigError(msg)
        url = os.fspath(self.checkpoint_id)
        return (url, self._step) if self._step is not None else run_and_step(url)


class Writer(_Storage, StorageWriter):
    """Saves for `dcp.save` and `dcp.async_save`; each call makes one checkpoint of Penstock.

    The last part of the URL, or of the `checkpoint_id`, may be the step: `runs/gpt/step-100` and
    `runs/gpt/100` are step 100 of the run `runs/gpt`. Without a step, it saves step 0 of a run that
    must not have later steps. An existing step is replaced, as in DCP.

    Args:
        url: The run, or the run and a step; default: the `checkpoint_id` of each call.
        step: The step, if `url` is the run alone.
        group: The process group that you pass to dcp, or its global ranks; default: all ranks.
        overwrite: Whether to replace a checkpoint of the same step.
        options: Options of `Checkpointer`, such as `rules` and `retention`; `allow_pickle=True`
            stores objects that need pickle.
    """

    _collective = True
    _alone = False

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        """Begin a save."""
        del args
        self._place()  # all ranks raise its error
        self._collective = kwargs.get("use_collectives", True)
        self._alone = False

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add this rank's number to the plan; a cached plan keeps it for later saves."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return replace(plan, storage_data=rank)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Determine which ranks take part, since DCP does not report it.

        Raises:
            ConfigError: The ranks are not those of `group`.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        count = world if self._group is None else len(self._group)
        # `no_dist`, or a group of one rank. Without collectives each rank gets its own plan,
        # and all of them save.
        self._alone = len(plans) == 1 and (self._collective or world == 1)
        if self._collective and not self._alone and len(plans) != count:
            ranks = [plan.storage_data for plan in plans]
            msg = (
                f"ranks {ranks} save, but penstock.dcp.Writer was made for {count} ranks: give it "
                "the process group of dcp.save, as group="
            )
            raise ConfigError(msg)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save together with the other ranks; the checkpoint is durable on return."""
        root, step = self._place()
        ranks: dict[str, Any] = {"group": self._group, "name": f"dcp/{root}/{step}"}
        if self._alone:
            ranks = {"ranks": "alone"}
        # Opened before the planner is called: if it raises, the other ranks learn that immediately.
        with Checkpointer(root, **(ranks | self._options)) as ckpt:
            # A save without a step must not be hidden by later steps.
            overwrite = self._overwrite and (step is not None or ckpt.latest() in {None, 0})
            tree = _tree(plan, planner)
            try:
                ckpt.save(tree, step or 0, mode="blocking", overwrite=overwrite).result()
            except StepExistsError as error:
                msg = f"Checkpoint already exists: {error}"  # as in DCP's own storage
                raise StepExistsError(msg) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing, because the ranks have committed the checkpoint together."""


class Reader(_Storage, StorageReader):
    """Loads checkpoints of a `Writer` or a `Checkpointer` for `dcp.load`, on any number of ranks.

    Each rank reads what it needs. Without a step, it reads the newest step.

    Args:
        url: As for `Writer`.
        step: As for `Writer`.
        group: Not needed, because each rank reads separately.
        options: Options of `Checkpointer`.
    """

    _opened: ExitStack
    _view: Checkpoint
    _paths: Mapping[str, _Path]
    _values: Mapping[str, object]

    def read_metadata(self) -> Metadata:
        """Return metadata of the stored state, under DCP's names."""
        root, step = self._place()
        options: dict[str, Any] = {**self._options, "ranks": "alone"}
        with ExitStack() as stack:
            ckpt = stack.enter_context(Checkpointer(root, **options))
            self._view = ckpt.open("latest" if step is None else step)
            tree = ckpt.load(self._view.step, device="meta", named_optimizers=True)
            self._opened = stack.pop_all()
        flat, self._paths = flatten_state_dict(tree)
        self._values = {n: leaf for n, leaf in flat.items() if not isinstance(leaf, torch.Tensor)}
        entries = {name: _described(leaf) for name, leaf in flat.items()}
        return Metadata(entries, planner_data=self._paths)

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, and pass its values to the planner."""
        with self._opened:
            for item in plan.items:
                name = item.storage_index.fqn
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._dumped(name))
                    continue
                target = planner.resolve_tensor(item).detach()
                region = Region(tuple(item.storage_offsets), tuple(item.lengths))
                if region.numel:
                    target.copy_(self._view.read(_shown(self._paths[name]), region))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _dumped(self, name: str) -> io.BytesIO:
        value = self._values[name]
        # DCP treats a tuple, and a list that contains a tuple, as one value.
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
            value = self._view[_shown(self._paths[name])]
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        return data


def _described(leaf: object) -> STORAGE_TYPES:
    if not isinstance(leaf, torch.Tensor):
        return BytesStorageMetadata()
    # One chunk, however many are stored: a rank then reads each piece in one call.
    whole = ChunkStorageMetadata(torch.Size([0] * leaf.dim()), leaf.size())
    return TensorStorageMetadata(TensorProperties(dtype=leaf.dtype), leaf.size(), [whole])


def _shown(path: _Path) -> str:
    """Return a path of DCP in Penstock's notation."""
    return "/".join(str(k).replace("%", "%25").replace("/", "%2F") or "%00" for k in path)


def _tree(plan: SavePlan, planner: SavePlanner) -> dict[str, Leaves]:
    """Return the objects that this rank saves in the plan, nested like the state passed to dcp."""
    paths: Mapping[str, _Path] = plan.planner_data or {}
    lengths: dict[_Path, int] = {}
    for path in paths.values():
        for depth, key in enumerate(path):
            if isinstance(key, int):
                lengths[path[:depth]] = max(key + 1, lengths.get(path[:depth], 0))
    pieces: dict[_Path, list[Any]] = {}
    for item in plan.items:
        path = paths.get(item.index.fqn, (item.index.fqn,))
        pieces.setdefault(path, []).append(_resolved(item, planner))
    tree: dict[str, dict[_Path, Any]] = {}
    for path, items_of_path in pieces.items():
        leaf = items_of_path[0] if len(items_of_path) == 1 else Shards(items_of_path)
        tree.setdefault(str(path[0]), {})[path[1:]] = leaf
    return {
        key: Leaves(items, {path[1:]: n for path, n in lengths.items() if path[0] == key})
        for key, items in tree.items()
    }


def _resolved(item: WriteItem, planner: SavePlanner) -> object:
    """Return the planner's data for an item: a tensor, a `Shard` or a value."""
    data: Any = planner.resolve_data(item)
    if item.type is WriteItemType.BYTE_IO:
        data.seek(0)
        # The planner has just pickled an object of this process. If the checkpoint needs a pickle,
        # Penstock refuses it, or accepts it with `allow_pickle=True`.
        return torch.load(data, weights_only=False)
    planned = item.tensor_data
    if planned is None or item.type is WriteItemType.TENSOR:
        return data.detach()
    return Shard(data.detach(), planned.size, planned.chunk.offsets)
