"""Checkpoints of transformers' `Trainer`, and of all trainers that derive from it.

A trainer expects its checkpoint in a folder. With Penstock, that folder is temporary and has only
the small files that the trainer or a derived class writes there. They are saved with the state, and
a resume writes them to a new folder.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import dataclass
from itertools import takewhile
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock import (
    Checkpointer,
    CheckpointNotFoundError,
    ConfigError,
    PerRank,
    Rng,
    StepExistsError,
)
from penstock.integrations import missing_extra

try:
    from transformers import Trainer
    from transformers.trainer_utils import get_last_checkpoint
except ModuleNotFoundError as error:
    raise missing_extra(error, "transformers") from None

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")
BEST = "best_global_step"
"""The metadata key of a checkpoint that was the best when it was saved."""

log = logging.getLogger("penstock")


class _OlderStepError(Exception):
    """Signals that training must resume from an older step, because a newer one is damaged."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


@dataclass
class _Run:
    """The run of one call of `train`.

    Attributes:
        ckpt: Its checkpointer.
        folder: The folder that transformers uses for its checkpoints.
        on_damage: As for `Checkpointer.restore`.
        step: The step that training resumes from; -1 if none.
        parts: The top-level keys of that checkpoint.
        newest: The newest step that training resumed from or saved.
    """

    ckpt: Checkpointer
    folder: Path
    on_damage: str = "raise"
    step: int = -1
    parts: frozenset[str] = frozenset()
    newest: int = -1

    def stub(self, step: object) -> Path:
        """Create and return the placeholder folder of a checkpoint."""
        folder = self.folder / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        return folder

    def restore(self, live: dict[str, Any], *keys: str) -> None:
        """Restore those `keys` that the checkpoint has.

        Raises:
            _OlderStepError: The checkpoint is damaged, and an older step was restored.
        """
        wanted = self.parts & live.keys() & {*keys}
        if wanted:
            report = self.ckpt.restore(
                live, self.step, include=sorted(wanted), on_damage=self.on_damage
            )
            if report.step != self.step:
                raise _OlderStepError(report.step)


class PenstockTrainerMixin(Trainer):  # type: ignore[misc]  # transformers may not be installed
    """Saves and resumes with Penstock: `class MyTrainer(PenstockTrainerMixin, Trainer)`.

    The checkpoints are in `output_dir/penstock`. They hold the model (of a PEFT model only its
    adapters), optimizer, scheduler, scaler, random state, and the state of the trainer and its
    callbacks. Saves are lazy. `train` returns when the last save is durable.

    Attributes:
        penstock_url: The location of the run; default: `output_dir/penstock`.
        penstock_options: Options of the `penstock.Checkpointer`. The defaults are `mode="lazy"`,
            and a `retention` that follows `save_total_limit`.
    """

    penstock_url: str | Path | None = None
    penstock_options: Mapping[str, Any] | None = None
    _penstock: _Run | None = None

    def train(
        self,
        resume_from_checkpoint: str | int | None = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train as `Trainer.train` does.

        Args:
            resume_from_checkpoint: True: the newest undamaged checkpoint; if none, the trainer's
                own checkpoint in `output_dir`; if none, a new training. A number: that step. In
                both cases the first save deletes all later checkpoints. A path: a checkpoint folder
                of transformers.
            trial: As for `Trainer.train`.
            args: As for `Trainer.train`.
            kwargs: As for `Trainer.train`.

        Returns:
            The result of `Trainer.train`.

        Raises:
            StepExistsError: Training would start from scratch, but the run has checkpoints.
            CheckpointNotFoundError: The run has no such step.
            ConfigError: A feature needs the trainer's own checkpoints, or the path has no
                checkpoint of transformers.
            StorageError: The location of the run cannot be written.
            PenstockError: A save or the restore failed.
        """
        self._check_may_save()
        url = self.penstock_url or Path(self._get_output_dir(trial), "penstock")
        # Without the optimizer, a lazy save can defer nothing.
        mode = "async" if self.args.save_only_model else "lazy"
        options = {"mode": mode, "retention": self._retention(), **(self.penstock_options or {})}
        with (
            tempfile.TemporaryDirectory(prefix="penstock-") as folder,
            Checkpointer(url, name=f"transformers/{url}", **options) as ckpt,
        ):
            if self.args.save_strategy != "no":
                ckpt.check({})  # else only the first save would fail
            self._penstock = run = _Run(ckpt, Path(folder))
            step: int | str = "latest"
            if resume_from_checkpoint is True:
                run.on_damage = "fallback"
            elif isinstance(resume_from_checkpoint, int):  # False is an int too
                step = resume_from_checkpoint
            try:
                while True:
                    begin = self._begin(run, resume_from_checkpoint, step, url)
                    try:
                        return super().train(begin, trial, *args, **kwargs)
                    except _OlderStepError as error:
                        step = error.step
                        if self.neftune_noise_alpha is not None:
                            self.neftune_hook_handle.remove()  # else it would be there twice
            finally:
                if self._owner(self.state.best_model_checkpoint):
                    self.state.best_model_checkpoint = None  # the temporary folder is gone
                self._penstock = None

    def _check_may_save(self) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if self.is_deepspeed_enabled or getattr(plugin, "fsdp_version", 2) != 2:  # noqa: PLR2004
            msg = (
                "a Trainer with DeepSpeed or FSDP1 cannot be saved: use FSDP2, with "
                'fsdp_config={"version": 2}, or save the DeepSpeed engine itself with '
                "penstock.integrations.deepspeed"
            )
            raise ConfigError(msg)
        if self.args.push_to_hub and not (self.penstock_url and self.args.hub_strategy == "end"):
            msg = (
                "push_to_hub uploads all of output_dir, and during training also checkpoint "
                "folders, which Penstock does not write: set penstock_url to a place outside of "
                'output_dir, and hub_strategy="end"'
            )
            raise ConfigError(msg)

    def _retention(self) -> dict[str, Any] | None:
        """Return the retention that keeps the last `save_total_limit` checkpoints, and the best."""
        limit = self.args.save_total_limit
        if limit is None or limit < 1:
            return None
        if self.args.metric_for_best_model is None:
            return {"keep_last": limit}
        best = {"keep_best": 1, "best_metric": BEST, "best_mode": "max"}
        return {"keep_last": limit, **best}

    def _begin(
        self, run: _Run, resume: str | int | None, step: int | str, url: object
    ) -> str | None:
        """Return the folder that `Trainer.train` should resume from, if any."""
        if isinstance(resume, int) and resume is not False:  # True is an int too
            try:
                stored = run.ckpt.load(step, include="files", on_damage=run.on_damage)["files"]
            except CheckpointNotFoundError:
                if resume is not True:
                    raise
                has_folder = Path(self.args.output_dir).is_dir()
                resume = get_last_checkpoint(self.args.output_dir) if has_folder else None
            else:
                files = {name: data for rank in stored.values() for name, data in rank.items()}
                return str(self._lay_out(run, files))
        if self.args.save_strategy != "no" and (steps := run.ckpt.steps()):
            msg = (
                f"{url} has checkpoints up to step {steps[-1]}: train(resume_from_checkpoint=True) "
                "continues from there; to begin again, delete them or use another output_dir"
            )
            raise StepExistsError(msg)
        if resume and not Path(resume, "trainer_state.json").is_file():
            msg = (
                f"{resume} is not a checkpoint of transformers: it has no trainer_state.json. For "
                f"a checkpoint in {url}, pass True or its step as a number. To continue another "
                f"run of Penstock, copy its checkpoint first: penstock copy OTHER {url}"
            )
            raise ConfigError(msg)
        return resume or None

    def _lay_out(self, run: _Run, files: dict[str, bytes]) -> Path:
        """Write the folder of a checkpoint, without the files that the `_load_...` methods read."""
        state = json.loads(files["trainer_state.json"])
        best = state["best_model_checkpoint"]
        if best and Path(best).parent != Path(self.args.output_dir):  # not transformers' own
            state["best_model_checkpoint"] = str(run.stub(_step_of(best)))
        files["trainer_state.json"] = json.dumps(state).encode()
        run.step = run.newest = state["global_step"]
        keys = run.ckpt.open(run.step).keys()
        run.parts = frozenset(path.partition("/")[0] for path in keys)
        if "optimizer" not in run.parts and self.args.process_index == 0:
            log.warning(
                "step %d was saved with save_only_model: optimizer, scheduler and random state "
                "start from scratch",
                run.step,
            )
        stub = run.stub(run.step)
        for name, data in files.items():
            path = stub / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return stub

    def _get_output_dir(self, trial: Any) -> str:
        run = self._penstock
        return super()._get_output_dir(trial) if run is None else str(run.folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run, step = self._penstock, self.state.global_step
        if run is None:  # outside of `train`
            super()._save_checkpoint(model, trial)
            return
        if run.newest == run.step:  # the first save
            self._prepare(run)
        stub = run.stub(step)
        super()._save_checkpoint(model, trial)
        paths = {path.relative_to(stub).as_posix(): path for path in stub.rglob("*")}
        files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
        entries = takewhile(
            lambda entry: entry.get("step") == step, reversed(self.state.log_history)
        )
        metadata = {k: v for entry in entries for k, v in entry.items() if isinstance(v, Real)}
        if self.state.best_global_step == step:
            metadata[BEST] = step
        live = {"model": _trained(self.model)} if self.args.save_only_model else self._live()
        # Schedule-free optimizers change parameters between steps, in train() and eval().
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        run.ckpt.save(
            {**live, "files": PerRank(files)},
            step,
            mode="async" if callable(getattr(inner, "train", None)) else None,
            metadata=metadata,
            # A callback requested a step again, or auto_find_batch_size restarted.
            overwrite=step <= run.newest,
        )
        run.newest = max(run.newest, step)

    def _prepare(self, run: _Run) -> None:
        """Rewind the run to the resumed step, and log why a resume will not be exact."""
        if self.args.process_index != 0:
            return
        if run.step >= 0:
            run.ckpt.rewind(run.step)
        if reasons := _reasons(self):
            log.warning("a resume will not be exact: %s", "; ".join(reasons))

    def _live(self) -> dict[str, Any]:
        """Return all objects with state, except the trainer itself."""
        live = {
            "model": _trained(self.model),
            "optimizer": self.optimizer,
            "scheduler": self.lr_scheduler,
            "scaler": getattr(self.accelerator, "scaler", None),
            "rng": Rng(),
        }
        return {name: value for name, value in live.items() if value is not None}

    def _owner(self, folder: str | None) -> _Run | None:
        """Return the run if `folder` is the placeholder of one of its checkpoints."""
        run = self._penstock
        return run if run and folder and Path(folder).parent == run.folder else None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002 - as the trainer has it
        """Write a folder for `from_pretrained`, as `Trainer.save_model` does.

        Args:
            output_dir: The folder; default: the trainer's.
        """
        if self._owner(output_dir) is None:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._owner(output_dir) is None:
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        if self._owner(output_dir) is None:
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        if self._owner(output_dir) is None:
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if run := self._owner(resume_from_checkpoint):
            run.restore({"model": _trained(self.model)}, "model")
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if run := self._owner(checkpoint):
            run.restore(self._live(), "optimizer", "scheduler", "scaler")
        super()._load_optimizer_and_scheduler(checkpoint)  # finds files of derived classes only

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if run := self._owner(checkpoint):
            run.restore({"rng": Rng()}, "rng")
        else:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        if self._penstock is not None:
            self._penstock.ckpt.wait()  # parameters are about to change
        best = self.state.best_model_checkpoint
        run = self._owner(best)
        if run is None:  # saved by transformers
            super()._load_best_model()
            return
        try:
            run.ckpt.restore({"model": _trained(self.model)}, _step_of(best), include="model")
        except CheckpointNotFoundError as error:
            log.warning("the best model is not loaded: %s", error)


def patch(trainer: T, url: str | Path | None = None, **options: Any) -> T:
    """Make an existing trainer save and resume with Penstock, as `PenstockTrainerMixin` does.

    Args:
        trainer: A `Trainer` or an instance of a derived class; it is changed in place.
        url: The location of the run; default: `output_dir/penstock`.
        options: Options of the `penstock.Checkpointer`.

    Returns:
        The same trainer.

    Raises:
        ConfigError: `trainer` is not a `Trainer`.
    """
    if not isinstance(trainer, Trainer):
        msg = f"patch takes a transformers.Trainer, not a {type(trainer).__name__}"
        raise ConfigError(msg)
    ready: Any = trainer
    kind = type(ready)
    if not issubclass(kind, PenstockTrainerMixin):
        ready.__class__ = type(kind.__name__, (PenstockTrainerMixin, kind), {})
    ready.penstock_url, ready.penstock_options = url, options
    return trainer


def _reasons(trainer: Any) -> list[str]:
    """Return the reasons why a resume is not exact, even with the trainer's own checkpoints."""
    args, collator = trainer.args, trainer.data_collator
    reasons = {
        "save_only_model leaves out the optimizer and random state": args.save_only_model,
        "ignore_data_skip reads the data from the beginning": args.ignore_data_skip,
        "enable_jit_checkpoint saves in the middle of a step: use penstock.Preemption instead": (
            getattr(args, "enable_jit_checkpoint", False)
        ),
        "use_seedable_sampler=False draws a different order of the data": (
            not args.accelerator_config.use_seedable_sampler
        ),
        "a dataset without a length is resumed exactly only in its first pass": (
            not hasattr(trainer.train_dataset, "__len__")
        ),
        "the collator draws random masks one batch ahead of the step": (
            getattr(collator, "mlm", False) and getattr(collator, "seed", None) is None
        ),
        "a resume from the last step of an epoch skips the evaluation of that epoch": (
            args.save_strategy == "steps" and args.eval_strategy == "epoch"
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]


def _step_of(folder: str) -> int:
    return int(folder.rpartition("-")[2])


def _trained(model: Any) -> Any:
    """Return the saved part of a model: a PEFT model is saved without its frozen base."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    if kind is None or not isinstance(model, kind):
        return model
    from penstock.integrations.peft import state_of  # noqa: PLC0415 - needs peft

    return state_of(model)
