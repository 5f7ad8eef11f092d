"""Reads a `CheckpointerConfig` from a mapping or a TOML, YAML or JSON file.

An unknown key is an error that names the nearest valid key. Relative paths, even in a file, are
relative to the current directory. `${NAME}` in a file is replaced from the environment.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias, TypedDict, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    InstanceOf,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from penstock.core.abc import Backend, SizeBytes, parse_size
from penstock.core.config.explain import validated
from penstock.core.config.plugin_choice import (
    BackendConfig,
    BackendSpec,
    Origin,
    Placed,
    PluginChoice,
    shown_url,
)
from penstock.core.distributions import installed_only
from penstock.core.errors import ConfigError, SelectionError
from penstock.core.limits import MAX_BLOCK_BYTES, MAX_CHUNK_BYTES, MAX_CODECS, MAX_LINKS
from penstock.core.suggest import nearest
from penstock.core.types import PAGE_BYTES
from penstock.core.units import seconds_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic_core import CoreSchema

    from penstock.core.plugins.entry_points import PluginKind

__all__ = [
    "BackendConfig",
    "BackendSpec",
    "CheckpointerConfig",
    "CodecConfig",
    "Deltas",
    "Mode",
    "OnBusy",
    "Prefer",
    "Retention",
    "Rule",
    "Schedule",
    "json_schema",
    "load_config",
    "parse_size",
    "read_file",
]

Mode: TypeAlias = Literal["blocking", "async", "lazy"]
AUTO: Final = "auto"
"""The value of `Rule.codecs` that lets saves choose the codecs."""

OnBusy: TypeAlias = Literal["wait", "skip", "raise"]

_VARIABLE = re.compile(r"\$\$|\$\{([^{}]*)\}|\$\{|\$[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _compiled(value: tuple[str, ...]) -> tuple[str, ...]:
    from penstock.core.tree.patterns import compile_all  # noqa: PLC0415 - needs xxhash

    try:
        compile_all("", value)
    except SelectionError as error:
        raise ValueError(str(error)) from None
    return value


def _list_of_codecs(value: object) -> object:
    msg = ""
    if isinstance(value, str) and value != AUTO:
        near = nearest(value, [AUTO])
        if not near.endswith("?"):
            return [value]
        msg = f"Input should be a list{near}"
    elif isinstance(value, Mapping):
        msg = 'Input should be a list: [{"type": "zstd", "level": 3}]'
    elif isinstance(value, list | tuple) and AUTO in value:
        msg = f'"{AUTO}" must not be in a list: write codecs = "{AUTO}"'
    if msg:
        raise ValueError(msg)
    return value


def _codecs_form(value: object) -> str:
    return "<auto>" if isinstance(value, str) else "<list>"


def _empty_if_none(value: object) -> object:
    return () if value is None else value


def _list_of_rules(value: object) -> object:
    if not isinstance(value, (str, Mapping)):
        return value
    msg = (
        'Input should be a list of tables: [{"match": "optimizer/**", "codecs": ["zstd"]}], in '
        "TOML [[rules]]; to have no rules, leave it out"
    )
    raise ValueError(msg)


def _network(value: str) -> str:
    try:
        return str(ipaddress.ip_network(value, strict=False))
    except ValueError as error:
        msg = f"{value!r} is not a network: write it as 10.1.0.0/16 or fd00::/64"
        raise ValueError(msg) from error


def _grace(value: float) -> float:
    if value > 0:
        return value
    msg = (
        "has to be above 0, because a save that makes no progress for half of this time fails. "
        "This is not the option of `penstock prune`, where --grace 0s prunes at once"
    )
    raise ValueError(msg)


def _whole_pages(value: int) -> int:
    if value % PAGE_BYTES:
        msg = f'Input should be a multiple of {PAGE_BYTES}: "1 MiB" is one, "1 MB" is not'
        raise ValueError(msg)
    return value


PageBytes: TypeAlias = Annotated[SizeBytes, Field(ge=PAGE_BYTES), AfterValidator(_whole_pages)]
ChunkBytes: TypeAlias = Annotated[PageBytes, Field(le=MAX_CHUNK_BYTES)]
BlockBytes: TypeAlias = Annotated[PageBytes, Field(le=MAX_BLOCK_BYTES)]
Patterns: TypeAlias = Annotated[
    tuple[str, ...],
    BeforeValidator(_listed),
    AfterValidator(_compiled),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class CodecConfig(PluginChoice):
    """A codec's entry-point name and options; a plain string is a name without options."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: object) -> object:
        return {"type": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> dict[str, Any]:
        """Describe both forms: a string or a table."""
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}


class Rule(_Model, Placed):
    """Selects objects by path, and the codecs that encode them.

    Attributes:
        match: One or more path patterns, as for `include` of a restore. A pattern that matches no
            object in the first save logs one warning, with the nearest paths.
        codecs: A list, in the order of encoding; each item is a name, or a table with `type` and
            options. A single name needs no list. An empty list keeps the objects raw, even if a
            later rule matches them. `"auto"`, without a list, lets saves choose codecs from
            measurements.
    """

    match: Patterns
    codecs: Annotated[
        Annotated[
            Annotated[Literal["auto"], Tag("<auto>"), WithJsonSchema({"type": "string"})]
            | Annotated[tuple[CodecConfig, ...], Field(max_length=MAX_CODECS), Tag("<list>")],
            Discriminator(_codecs_form),
        ],
        BeforeValidator(_list_of_codecs),
    ]

    @property
    def shown(self) -> str:
        """The name of the rule in messages."""
        return self._origin.place or "a rule"


def _duration(value: object) -> object:
    return seconds_of(value) if isinstance(value, str) else value


Duration: TypeAlias = Annotated[
    float,
    BeforeValidator(_duration),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*(s|min|h|d)?\s*$"},
            ]
        }
    ),
]
"""Seconds, or text such as `"30min"` or `"7d"`."""


class Retention(_Model):
    """Which checkpoints to keep. A checkpoint that no option keeps is deleted, unless it has a tag.

    Attributes:
        keep_last: Keep the N newest.
        keep_every: Keep the steps that are multiples of N.
        keep_best: Keep the N best by `best_metric`; newer checkpoints win ties. Needs `best_metric`
            and `best_mode`.
        best_metric: The metadata key of the number to compare, such as `"val_loss"`; it may be
            added after the save. A checkpoint without a finite number is never among the best.
        best_mode: `"min"` if the lowest number is the best, `"max"` if the highest is.
        keep_within: Keep checkpoints that are at most this much older than the newest, by the
            store's clock: `"90s"`, `"30min"`, `"24h"`, `"7d"`, or seconds. A pause makes no
            checkpoint older, but the first save after it does: its checkpoint is then the newest.
    """

    keep_last: int | None = Field(default=None, ge=1)
    keep_every: int | None = Field(default=None, ge=1)
    keep_best: int | None = Field(default=None, ge=1)
    best_metric: str | None = None
    best_mode: Literal["min", "max"] | None = None
    keep_within: Annotated[Duration, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        rules = (self.keep_last, self.keep_every, self.keep_best, self.keep_within)
        best = (self.keep_best, self.best_metric, self.best_mode)
        if None in best and any(one is not None for one in best):
            msg = (
                "keep_best, best_metric and best_mode go together: keep_best = 3, "
                'best_metric = "loss", best_mode = "min" (or "max")'
            )
            raise ValueError(msg)
        if all(rule is None for rule in rules):
            msg = (
                "needs keep_last, keep_every, keep_best or keep_within; leave [retention] out to "
                "keep all"
            )
            raise ValueError(msg)
        return self


def _every_form(value: object) -> str:
    return "<auto>" if isinstance(value, str) else "<number>"


class Schedule(_Model):
    """When `Checkpointer.due` says that a save is due.

    Attributes:
        every: The steps from one save to the next; `"auto"` chooses them from measurements of the
            run.
        overhead: The largest share of training time that saves may cost the training thread. If the
            run logs, the cost of the log counts too.
        mtbf_s: The mean time between failures of the job, in seconds. The interval is the shortest
            that `overhead` allows, or Young's optimum for this time if that is longer.
        max_replay_s: The longest time, in seconds, that the replay of a [log](logs.md) should take;
            `overhead` has priority. Default: the time that this process's last restore took.
    """

    every: Annotated[
        Annotated[Literal["auto"], Tag("<auto>")]
        | Annotated[int, Field(ge=1, strict=True), Tag("<number>")],
        Discriminator(_every_form),
    ] = "auto"
    overhead: float = Field(default=0.01, gt=0, le=1)
    mtbf_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_replay_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class Deltas(_Model):
    """How checkpoints that the codec `delta` encodes depend on earlier checkpoints.

    Attributes:
        every: Every N-th save has no base; the saves in between use an earlier save as base. With 1
            no save has a base.
        max_chain: Maximum earlier frames that are needed to decode a frame. If it is below
            `every - 1`, a save that would need more uses an older base.
        memory_bytes: Host memory for the newest state, with which the next save is compared. The
            default is the size of the state, if that is at most a quarter of the memory. If the
            state does not fit, or with 0, each save reads the base from the store.
    """

    every: int = Field(default=6, ge=1)
    max_chain: int = Field(default=5, ge=1, le=MAX_LINKS - 1)
    memory_bytes: Annotated[SizeBytes, Field(ge=0)] | None = None


class Prefer(_Model):
    """The distribution to use for each plugin name that several distributions claim."""

    provider: dict[str, str] = Field(default_factory=dict)
    codec: dict[str, str] = Field(default_factory=dict)
    backend: dict[str, str] = Field(default_factory=dict)
    replayer: dict[str, str] = Field(default_factory=dict)

    @property
    def choices(self) -> dict[PluginKind, dict[str, str]]:
        """The choices in the form that the registry expects."""
        return {
            "provider": self.provider,
            "codec": self.codec,
            "backend": self.backend,
            "replayer": self.replayer,
        }


def _backend_form(value: object) -> str:
    if isinstance(value, Backend):
        return "<instance>"
    return "<table>" if isinstance(value, (Mapping, BackendConfig)) else "<url>"


def _path_text(value: object) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fsdecode(value)
    msg = "Input should be a path, a URL, a table with `type`, or an open Backend"
    raise ValueError(msg)


class CheckpointerConfig(_Model):
    """All options of a checkpointer except its callbacks.

    Attributes:
        backend: Where checkpoints live: a path, a URL, a table with `type`, or an open `Backend`.
        rules: The codecs for objects, by path. The first matching rule wins; objects without a
            matching rule stay raw.
        retention: Which checkpoints to keep. By default all are kept.
        schedule: When `due` says that a save is due.
        deltas: How checkpoints depend on earlier checkpoints. Has no effect, and logs a warning,
            without a rule whose codecs begin with `delta`.
        staging_bytes: Maximum memory of this rank for captured state, at least two chunks. A larger
            state passes through it in parts, and the save blocks longer. The default is the state's
            size plus two chunks, but at most half of the available memory divided among the ranks
            of the machine.
        mode: The default mode of saves: `"blocking"`, `"async"` or `"lazy"`.
        on_busy: What a save does if another save is in progress: `"wait"` for it (counted as
            blocked time), `"skip"` (it does not start), or `"raise"` an error.
        allow_pickle: Whether to pickle values that no provider can store, and to unpickle them.
            Loading a pickle runs its code: set this only for checkpoints that you trust.
        defer: Patterns of further tensors that you promise not to change before the fence, for lazy
            saves.
        fence_timeout_s: Seconds that training waits for a pending capture before it abandons that
            save.
        io_timeout_s: Seconds that one request may take before the store counts as stuck, and the
            save, restore or call ends with `StorageTimeoutError`.
        ranks: With `"auto"`, the ranks of torch.distributed save one checkpoint together. With
            `"alone"`, each process saves separately, to its own root.
        rank_timeout_s: Seconds without progress of a rank before the other ranks abandon the save
            with a `RankError`.
        read_once_per_host: Whether one rank of each host reads the bytes that several of its ranks
            need in a restore, and passes them to the other ranks through shared memory.
        read_once_per_job: Whether one rank of the job reads the bytes that ranks of several hosts
            need in a restore, and sends them over the network. Rank 0's option applies.
        rank_network: The network between hosts for `read_once_per_job`, such as `"10.1.0.0/16"` or
            `"fd00::/64"`. The default is the network through which this machine reaches the store
            of the job.
        share: Whether a save refers to bytes that are already stored, instead of storing them
            again. Damage to one object then affects all objects that share its bytes.
        chunk_bytes: Maximum raw bytes in one frame; a multiple of 4096, at most 1 GiB.
        block_bytes: Raw bytes per checksum; a multiple of 4096, at most 1 GiB. Smaller blocks mean
            smaller reads for a region of a tensor, but a larger manifest. The default is about a
            quarter of the average tensor of this process, from 256 KiB to 4 MiB. It is 4 MiB with
            `share` or a rule with `delta`, since a save can refer to another save's raw bytes only
            if their blocks are equal.
        workers: Threads that encode and hash. The default is the number of cores that the process
            may use (affinity, the CPU limit of a container), divided by `LOCAL_WORLD_SIZE`, but at
            most 4.
        log_sync: Number of logged steps that are made durable together. A crash of the machine
            loses at most this many; if only the process is killed, a log on a local disk loses at
            most one. In an object store these steps are one object. The default is 1 in memory or
            on a disk of this machine, else 8.
        grace_s: Seconds for which `prune` keeps uncommitted data. Must be above 0: a save without
            progress for half of this time is never committed.
        prefer: The distribution to use for each plugin name that several distributions claim.
    """

    backend: Annotated[
        Annotated[str, BeforeValidator(_path_text), Tag("<url>")]
        | Annotated[BackendConfig, Tag("<table>")]
        | Annotated[SkipJsonSchema[InstanceOf[Backend]], Tag("<instance>")],
        Discriminator(_backend_form),
    ]
    rules: Annotated[
        tuple[Rule, ...], BeforeValidator(_list_of_rules), BeforeValidator(_empty_if_none)
    ] = ()
    retention: Retention | None = None
    schedule: Schedule = Field(default_factory=Schedule)
    deltas: Deltas = Field(default_factory=Deltas)
    staging_bytes: Annotated[SizeBytes, Field(ge=0)] | None = None
    mode: Mode = "async"
    on_busy: OnBusy = "wait"
    allow_pickle: bool = False
    defer: Annotated[Patterns, BeforeValidator(_empty_if_none)] = ()
    fence_timeout_s: float = Field(default=600.0, gt=0)
    io_timeout_s: float = Field(default=600.0, gt=0)
    ranks: Literal["auto", "alone"] = "auto"
    rank_timeout_s: float = Field(default=60.0, gt=0)
    read_once_per_host: bool = True
    read_once_per_job: bool = False
    rank_network: Annotated[str, AfterValidator(_network)] | None = None
    share: bool = False
    chunk_bytes: ChunkBytes = 16 << 20
    block_bytes: BlockBytes | None = None
    workers: int | None = Field(default=None, ge=1)
    log_sync: int | None = Field(default=None, ge=1)
    grace_s: Annotated[
        float, AfterValidator(_grace), WithJsonSchema({"type": "number", "exclusiveMinimum": 0})
    ] = 86400.0
    prefer: Prefer = Field(default_factory=Prefer)

    def __repr_args__(self) -> Iterator[tuple[str | None, object]]:
        """Yield all options, with the credentials removed from a URL."""
        for name, value in super().__repr_args__():
            yield name, shown_url(value) if name == "backend" and type(value) is str else value


class CheckpointerOptions(TypedDict, total=False):
    """The options of `Checkpointer(...)` as plain values; see `CheckpointerConfig`."""

    rules: Sequence[Rule | Mapping[str, Any]] | None
    retention: Retention | Mapping[str, int | float | str] | None
    schedule: Schedule | Mapping[str, int | float | str | None]
    deltas: Deltas | Mapping[str, int | str | None]
    staging_bytes: int | str | None
    mode: Mode
    on_busy: OnBusy
    allow_pickle: bool
    defer: str | Sequence[str] | None
    fence_timeout_s: float
    io_timeout_s: float
    ranks: Literal["auto", "alone"]
    rank_timeout_s: float
    read_once_per_host: bool
    read_once_per_job: bool
    rank_network: str | None
    share: bool
    chunk_bytes: int | str
    block_bytes: int | str | None
    workers: int | None
    log_sync: int | None
    grace_s: float
    prefer: Prefer | Mapping[str, Mapping[str, str]]


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | CheckpointerConfig,
    *,
    what: str = "configuration",
) -> CheckpointerConfig:
    """Return the configuration in `source`.

    Args:
        source: Path of a `.toml`, `.yaml`, `.yml` or `.json` file, a mapping, or a
            configuration, which is returned as is.
        what: Name of a mapping in error messages.

    Raises:
        ConfigError: The file cannot be read, or has errors. The message lists every error.
    """
    if isinstance(source, CheckpointerConfig):
        return source
    if isinstance(source, Mapping):
        return _loaded(source, what)
    path = Path(source)
    what = f"configuration {path}"
    try:
        config = _loaded(filled(read_file(path), os.environ, what=what), what)
    except RecursionError:
        msg = f"{what} is nested too deeply"
        raise ConfigError(msg) from None
    if isinstance(config.backend, BackendConfig):
        config.backend.came_from(Origin(what, "backend"))
    return config


def _loaded(values: Mapping[str, Any], what: str) -> CheckpointerConfig:
    config = validated(CheckpointerConfig, values, what=what)
    for number, rule in enumerate(config.rules):
        rule.came_from(Origin(what, f"rules[{number}]"))
    return config


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of configuration files, for editors and other tools."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **CheckpointerConfig.model_json_schema(),
    }


def read_file(path: Path) -> Mapping[str, Any]:
    """Return the content of a `.toml`, `.yaml`, `.yml` or `.json` file.

    Raises:
        ConfigError: The file cannot be read or parsed.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = _parse(path.suffix.lower(), text)
    except OSError as error:
        msg = f"configuration {path} cannot be read: {error.strerror}"
        raise ConfigError(msg) from error
    except ValueError as error:
        # tomllib, json and UTF-8 errors are ValueErrors, and name the place and the problem.
        msg = f"configuration {path} is not valid: {error}"
        raise ConfigError(msg) from error
    if not isinstance(values, Mapping):
        msg = f"configuration {path} holds a {type(values).__name__}, not a table"
        raise ConfigError(msg)
    return cast("Mapping[str, Any]", values)


@installed_only()
def _parse(suffix: str, text: str) -> object:
    if suffix == ".toml":
        import tomllib  # noqa: PLC0415 - each only where it is needed

        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    if suffix in {".yaml", ".yml"}:
        return _parse_yaml(text)
    msg = f"its suffix is {suffix or 'missing'}: use .toml, .yaml, .yml or .json"
    raise ValueError(msg)


def _parse_yaml(text: str) -> object:
    try:
        import yaml  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        msg = "reading YAML needs pyyaml: pip install penstock[yaml]"
        raise ConfigError(msg) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        # The error's own text quotes the line, which may hold a credential.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        msg = f"{getattr(error, 'problem', None) or type(error).__name__}{where}"
        raise ValueError(msg) from None


def filled(value: Any, environment: Mapping[str, str], *, what: str) -> Any:
    """Return `value` with each `${NAME}` in its strings replaced.

    `${NAME:-text}` has a default; `$$` means `$`. Refuses other forms, such as `$NAME`, since these
    would otherwise end up in the names of folders.

    Args:
        value: The content of a configuration file.
        environment: Variables by name.
        what: Name of the file, for error messages.

    Raises:
        ConfigError: Variables are not set or have another form. The message lists every problem.
    """
    problems: list[str] = []
    result = _filled(value, environment, "", problems)
    if problems:
        raise ConfigError(f"{what}:\n  " + "\n  ".join(problems))
    return result


def _filled(value: Any, environment: Mapping[str, str], place: str, problems: list[str]) -> Any:
    if isinstance(value, str):

        def looked_up(match: re.Match[str]) -> str:
            try:
                return _looked_up(match, environment)
            except ValueError as error:
                problems.append(f"{place}: {error}")
                return ""

        return _VARIABLE.sub(looked_up, value)
    if isinstance(value, Mapping):
        return {
            key: _filled(inner, environment, f"{place}.{key}" if place else str(key), problems)
            for key, inner in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [
            _filled(inner, environment, f"{place}[{number}]", problems)
            for number, inner in enumerate(value)
        ]
    return value


def _looked_up(match: re.Match[str], environment: Mapping[str, str]) -> str:
    """Return the text that replaces a variable.

    Raises:
        ValueError: The variable is not set, or has another form.
    """
    written, inner = match[0], match[1]
    named = None if inner is None else _NAME.fullmatch(inner)
    if written == "$$":
        return "$"
    if written == "${":
        problem = "${ has no closing }; write ${NAME}, or $${ for the text itself"
    elif inner is None:
        problem = (
            f"{written} is not filled in; write ${{{written[1:]}}} for the variable, or ${written} "
            "for the text itself"
        )
    elif named is None:
        problem = f"{written} is not a variable; write ${{NAME}} or ${{NAME:-text}}"
    elif named[1] in environment:
        return environment[named[1]]
    elif named[2] is not None:
        return named[2]
    else:
        problem = (
            f"the environment variable {named[1]} is not set; set it, or give a default "
            f"with ${{{named[1]}:-text}}"
        )
    raise ValueError(problem)
