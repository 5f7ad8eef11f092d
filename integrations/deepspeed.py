"""DeepSpeed checkpoints in Penstock: one save of all ranks, instead of a file for each object.

DeepSpeed looks for its files by name. So this adapter writes a stub under each of these names. The
file `penstock.json` beside the stubs names the checkpoint that has the contents.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import logging
import os
import re
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from penstock import (
    Checkpointer,
    CheckpointNotFoundError,
    ConfigError,
    DamagedError,
    FormatError,
    PenstockError,
)
from penstock.integrations import missing_extra
from penstock.integrations.files.torch_import import STUB

try:
    from deepspeed import comm as dist
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils import zero_to_fp32
    from deepspeed.utils.tensor_fragment import fragment_address
except ModuleNotFoundError as error:
    raise missing_extra(error, "deepspeed") from None

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo

log = logging.getLogger(__name__)

_PLACE = "penstock.json"
_TAG = "deepspeed_tag"  # in the metadata of each checkpoint
_LAST = "deepspeed-latest"  # a tag of Penstock's: retention spares the checkpoint
_CLASS = "deepspeed_class"
_CLASSES: dict[str, type] = {
    kind.__name__: kind for kind in (DynamicLossScaler, LossScaler, fragment_address)
}
_engines = count()  # the same on all ranks, so that their checkpointers meet


def use(engine: Any, url: str | Path | None = None, **options: Any) -> PenstockEngine:
    """Make a DeepSpeed engine save to and load from a run of Penstock.

    Call it on all ranks with the same arguments, right after `deepspeed.initialize`.

    Args:
        engine: The first object that `deepspeed.initialize` returned.
        url: The run, a path or URL; default: the folder `penstock` in `save_dir`.
        options: Options of `penstock.Checkpointer`. With `allow_pickle=True`, files that DeepSpeed
            itself wrote, which are pickles, are loaded too.

    Returns:
        The new checkpoint engine of `engine`.

    Raises:
        ConfigError: An option is wrong, or `engine` would write checkpoint files that bypass
            Penstock; nothing was changed.
    """
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        name = type(engine.checkpoint_engine).__name__
        msg = (
            f"the engine already has a {name}: call `use` once, and configure no checkpoint writer"
        )
        raise ConfigError(msg)
    if engine.use_node_local_storage():
        msg = (
            "use_node_local_storage puts files where other ranks cannot read them: remove it from "
            "the config"
        )
        raise ConfigError(msg)
    if engine.zero_nvme_offload_optimizer():
        msg = (
            "Penstock cannot save an optimizer that DeepSpeed offloads to NVMe: offload it to the "
            "CPU"
        )
        raise ConfigError(msg)
    adapter = PenstockEngine(engine.checkpoint_engine, url=url, **options)
    engine.checkpoint_engine = adapter
    _merge_from_stubs(engine, adapter)
    return adapter


def _merge_from_stubs(engine: Any, adapter: PenstockEngine) -> None:
    """Make `load_checkpoint` read stubs where DeepSpeed bypasses its checkpoint engine.

    For ZeRO-3 without optimizer states, `zero_to_fp32` opens the files of all ranks with
    `torch.load` to merge the weights.
    """
    load_checkpoint = engine.load_checkpoint

    def load(file: str, map_location: Any = None, **_: Any) -> Any:
        return adapter.load(file, map_location)

    def load_from_stubs(*args: Any, **kwargs: Any) -> Any:
        if engine.checkpoint_engine is not adapter:  # the program stopped using Penstock
            return load_checkpoint(*args, **kwargs)
        zero_to_fp32.torch = SimpleNamespace(**{**vars(torch), "load": load})
        try:
            return load_checkpoint(*args, **kwargs)
        finally:
            zero_to_fp32.torch = torch

    engine.load_checkpoint = load_from_stubs


@dataclass(frozen=True, slots=True)
class _Place:
    """The checkpoint of a tag.

    Attributes:
        run: The run; in `penstock.json`, a path is relative to the file's folder.
        step: The step.
        uid: The uid of the step's newest save when this record was made.
        tag: The tag in the metadata of the checkpoint.
    """

    run: str
    step: int
    uid: str
    tag: str

    @classmethod
    def read(cls, folder: Path) -> _Place | None:
        """Read the record in a folder of stubs; None if there is none.

        Raises:
            FormatError: The record is damaged.
        """
        file = folder / _PLACE
        try:
            place = cls(**json.loads(file.read_bytes()))
            return replace(place, run=_absolute(place.run, folder))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            msg = (
                f"{file} is damaged; the checkpoint that it named is not. Replace its contents "
                "with the line that begins with { in a .pt file beside it"
            )
            raise FormatError(msg, [str(file)]) from error

    def line(self, folder: Path) -> str:
        """Return the record as a line of JSON, with a path of the run relative to `folder`."""
        run = self.run if "://" in self.run else os.path.relpath(self.run, folder.resolve())
        return json.dumps({**asdict(self), "run": run}) + "\n"


@dataclass(slots=True)
class _Pending:
    """A save between `create` and `commit`.

    Attributes:
        tag: The tag.
        folder: The folder of the tag.
        run: The run of the save.
        label: The name of the tag in the run.
        tree: The contents of DeepSpeed's files, by file name.
        joint: Whether all ranks save a checkpoint; else rank 0 saves only weights.
    """

    tag: str
    folder: Path
    run: str
    label: str
    tree: dict[str, Any] = field(default_factory=dict)
    joint: bool = False


class PenstockEngine(CheckpointEngine):  # type: ignore[misc] # DeepSpeed has no types
    """A `CheckpointEngine` of DeepSpeed; `use` installs it.

    The step of a checkpoint is N for the tag `global_stepN`, and DeepSpeed's step count for any
    other tag. If that step belongs to another tag, the checkpoint gets the next free step.
    """

    def __init__(
        self, own: CheckpointEngine, *, url: str | Path | None = None, **options: Any
    ) -> None:
        """Create the checkpoint engine.

        Args:
            own: DeepSpeed's own engine, for saves of only weights and for files that it wrote.
            url: As for `use`.
            options: As for `use`.

        Raises:
            ConfigError: An option is wrong.
        """
        super().__init__()
        self._reading: dict[str, Any] = {**options, "ranks": "alone"}
        Checkpointer("memory://", **self._reading).close()  # a wrong option fails now
        self.name = type(self).__name__
        self._own = own
        self._url = url and _absolute(os.fspath(url))
        self._options = options
        self._meeting = f"deepspeed/{next(_engines)}"
        self._open: tuple[str, Checkpointer] | None = None
        self._pending: _Pending | None = None
        self._loaded: tuple[Path, Any] | None = None
        self._last: _Place | None = None
        self._warned = False

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a save; DeepSpeed calls it on all ranks."""
        self._loaded = None
        folder = Path(info.save_dir, info.tag)
        run = self._url or _absolute("penstock", Path(info.save_dir))
        label = info.tag if self._url is None else str(folder.resolve())
        self._pending = _Pending(info.tag, folder, run, label)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002 - its own
        """Create a folder."""
        super().makedirs(path, exist_ok=exist_ok)
        # All ranks create a tag's folder for a checkpoint; no rank does to save only weights.
        if self._pending is not None and Path(path) == self._pending.folder:
            self._pending.joint = True

    def save(self, state_dict: Any, path: str) -> None:
        """Keep the contents of DeepSpeed's file `path` until `commit`.

        Weights alone, which are for other programs, go directly to a file.
        """
        file = Path(path)
        if self._pending is None or file.parent != self._pending.folder:
            self._own.save(state_dict, path)
        else:
            self._pending.tree[file.name] = _with_optimizer(state_dict, _plain)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Save the contents that all ranks have kept as one checkpoint, durable on return.

        Raises:
            PenstockError: The save failed on some rank; the tag's files still name the previous
                checkpoint.
        """
        del info  # that of `create`
        pending, self._pending = self._pending, None
        if pending is None or not pending.joint:
            return True
        self._warn()
        ckpt = self._checkpointer(pending.run)
        step = _of_rank_0(lambda: self._choose_step(ckpt, pending))
        metadata = {_TAG: pending.label}
        report = ckpt.save(
            pending.tree, step, mode="blocking", overwrite=True, metadata=metadata
        ).result()
        place = _Place(pending.run, step, report.uid, pending.label)
        if dist.get_rank() == 0:
            self._lead(pending.folder, place, ckpt)
        for name in pending.tree:
            _write(pending.folder / name, _stub_text(name, place, pending.folder))
        dist.barrier()  # DeepSpeed's `latest` may name this tag from now on
        self._last = place
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the contents of the file `path`, on the CPU.

        Raises:
            CheckpointNotFoundError: There is no such file, or its checkpoint was deleted.
            ConfigError: DeepSpeed itself wrote it, and `allow_pickle` is not set.
            DamagedError: `penstock.json`, the file, or the stored data is damaged.
        """
        file = Path(path)
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded[0] == file:
            return loaded[1]
        place = _Place.read(file.parent)
        if not _is_stub(file, place, allow_pickle=bool(self._options.get("allow_pickle"))):
            return self._own.load(path, map_location)
        if place is None:
            msg = (
                f"{file.parent / _PLACE} is missing: create it from the line of {file} that "
                "begins with {"
            )
            raise FormatError(msg, [str(file)])
        with Checkpointer(place.run, **self._reading) as ckpt:
            checkpoint = ckpt.open(place.step)
            if checkpoint.info.metadata.get(_TAG) != place.tag:
                msg = f"step {place.step} of {place.run} no longer holds the checkpoint of {file}"
                raise CheckpointNotFoundError(msg)
            state = _with_optimizer(checkpoint[file.name], _live)
        self._last = place
        if file.name.endswith("model_states.pt"):  # DeepSpeed loads it twice
            self._loaded = file, state
        return state

    def preserves_storage_sharing(self) -> bool:
        """Return False, since a view of a larger tensor need not be cloned before it is saved."""
        return False

    def cleanup(self) -> None:
        """Close the run."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _checkpointer(self, run: str) -> Checkpointer:
        if self._open is None or self._open[0] != run:
            self.cleanup()
            self._open = run, Checkpointer(run, name=self._meeting, **self._options)
        return self._open[1]

    def _choose_step(self, ckpt: Checkpointer, pending: _Pending) -> int:
        if self._options.get("retention"):
            self._spare_last(ckpt, pending.run)
        if numbered := re.fullmatch(r"global_step(\d+)", pending.tag):
            step = int(numbered[1])
        else:
            step = next(s["global_steps"] for s in pending.tree.values() if "global_steps" in s)
        used_steps = set(ckpt.steps())
        while step in used_steps and ckpt.info(step).metadata.get(_TAG) != pending.label:
            step += 1
        return step

    def _spare_last(self, ckpt: Checkpointer, run: str) -> None:
        """Pin only the checkpoint that DeepSpeed's file `latest` names.

        Retention runs before DeepSpeed updates that file.
        """
        last = self._last.step if self._last and self._last.run == run else None
        for step in ckpt.steps():
            with suppress(DamagedError, CheckpointNotFoundError):
                if (_LAST in ckpt.info(step).tags) != (step == last):
                    (ckpt.pin if step == last else ckpt.unpin)(step, _LAST)

    def _lead(self, folder: Path, place: _Place, ckpt: Checkpointer) -> None:
        """Point a tag to a checkpoint, and delete the tag's previous one, as an overwrite would."""
        before = None
        with suppress(FormatError):
            before = _Place.read(folder)
        # One record for the stubs of all ranks: a kill at any moment leaves one checkpoint.
        _write(folder / _PLACE, place.line(folder))
        if before is None or before.run != place.run or before.step == place.step:
            return
        try:
            info = ckpt.info(before.step)
            if info.metadata.get(_TAG) == place.tag and not set(info.tags) - {_LAST}:
                ckpt.delete(before.step)
        except CheckpointNotFoundError:
            pass
        except PenstockError as error:  # other ranks are waiting
            log.warning(
                "step %d, which tag %s no longer names, could not be deleted: %s",
                before.step,
                place.tag,
                str(error),
            )

    def _warn(self) -> None:
        if not self._warned and dist.get_rank() == 0:
            log.warning(
                "DeepSpeed stores no random state, no position in the data, and no gradients that "
                "are being accumulated: for an exact resume, save right after a step of the "
                "optimizer, and pass the rest as save_checkpoint(client_state=) (logged once)"
            )
        self._warned = True


def _absolute(run: str, folder: Path | None = None) -> str:
    return run if "://" in run else str(Path(folder or "", run).resolve())


def _is_stub(file: Path, place: _Place | None, *, allow_pickle: bool) -> bool:
    """Return whether a file is a stub; otherwise DeepSpeed wrote it.

    Raises:
        CheckpointNotFoundError: There is no such file.
        ConfigError: DeepSpeed wrote it, and `allow_pickle` is not set.
        FormatError: It is not a stub, although `penstock.json` is beside it.
    """
    if not file.exists():
        if place is None:
            msg = f"there is no {file}"
            raise CheckpointNotFoundError(msg)
        return True  # a save of an existing tag was killed before it wrote all stubs
    with file.open("rb") as opened:
        if opened.read(len(STUB)) == STUB:
            return True
    if place is not None:
        msg = (
            f"{file} is not a stub, but {_PLACE} is beside it. If DeepSpeed has saved this "
            f"tag later than Penstock, delete {_PLACE}. Otherwise only this file is damaged: "
            "delete it, and copy another .pt file of this folder to its name"
        )
        raise FormatError(msg, [str(file)])
    if not allow_pickle:
        msg = (
            f"{file} is not a stub. If DeepSpeed wrote it, it is a pickle, which can "
            "run code: to load it anyway, pass allow_pickle=True to `use`"
        )
        raise ConfigError(msg)
    return False


def _of_rank_0(choose: Callable[[], int]) -> int:
    """Return rank 0's choice, or raise its error, on all ranks."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [choose()]
        except PenstockError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], PenstockError):
        raise answer[0]
    return int(answer[0])


def _stub_text(name: str, place: _Place, folder: Path) -> str:
    return (
        f"{STUB.decode()}{place.line(folder)}"
        "To write its contents as a file that torch.load reads:\n"
        f"    penstock export {place.run} OUT.pt --to torch --step {place.step} --include {name}\n"
    )


def _write(file: Path, text: str) -> None:
    """Replace a file durably; a crash leaves the old text or the new one."""
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _with_optimizer(state: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return `state` with `change` applied to the optimizer part, which only DeepSpeed writes."""
    if "optimizer_state_dict" not in state:
        return state
    return {**state, "optimizer_state_dict": change(state["optimizer_state_dict"])}


def _plain(value: Any) -> Any:
    """Return DeepSpeed's state with its few classes turned into data that needs no pickle."""
    if type(value) in _CLASSES.values():
        return {_CLASS: type(value).__name__, **vars(value)}
    if isinstance(value, ZeroStageEnum):
        return int(value)
    if type(value) in {dict, OrderedDict}:
        return type(value)((key, _plain(item)) for key, item in value.items())
    return [_plain(item) for item in value] if type(value) is list else value


def _live(value: Any) -> Any:
    """Undo `_plain`, except that the ZeRO stage stays a number, which compares equal."""
    if type(value) is list:
        return [_live(item) for item in value]
    if type(value) not in {dict, OrderedDict}:
        return value
    if _CLASS not in value:
        return type(value)((key, _live(item)) for key, item in value.items())
    made: Any = object.__new__(_CLASSES[value.pop(_CLASS)])
    vars(made).update(value)
    return made
