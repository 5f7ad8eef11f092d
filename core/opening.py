"""Opens the backend that a path, a URL or a table means."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from penstock.core.abc import Backend
from penstock.core.errors import CapabilityError, ConfigError, PenstockError, PluginError
from penstock.core.guarding import guarded
from penstock.core.registry import default_registry
from penstock.core.shipping import shipped_by
from penstock.core.validation import nearest, refusal, validated

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.core.abc import PluginConfig
    from penstock.core.registry import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a part of a configuration was written: which one, and the place in it.

    All are equal: what was written in two places may still be the same.
    """

    what: str = field(default="", compare=False)
    place: str = field(default="", compare=False)

    def below(self, key: str) -> Origin:
        """The place of something in it."""
        return Origin(self.what, f"{self.place}.{key}")


class PluginChoice(BaseModel):
    """A plugin by entry-point name, and its options beside it."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    type: str
    _origin: Origin = PrivateAttr(default=Origin())

    @property
    def origin(self) -> Origin:
        """Where it was written; empty, unless that was in a file."""
        return self._origin

    def came_from(self, origin: Origin) -> None:
        """Let complaints say where it was written."""
        self._origin = origin

    @property
    def options(self) -> dict[str, Any]:
        """All but `type`; checked by the plugin's own `Config` when it is opened."""
        return dict(self.model_extra or {})


class BackendConfig(PluginChoice):
    """A backend by entry-point name, and its options: `{type = "posix", path = "runs/gpt"}`."""


BackendSpec: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | BackendConfig | Backend"

# What a plain path or file:// takes: the first that works here.
_LOCAL = ("uring", "posix")
_LIGHT_LOCAL = ("posix",)

# The backend for schemes that no backend is named after.
_ANY_URL = "fsspec"
_WITHOUT_FSSPEC = {"s3", "s3a"}  # its own path to these needs botocore alone

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
# User and password; the latter may hold slashes, as those of S3 do.
_SECRETS = re.compile(r"(://)(?:[^/?#]*@|[^/?#@:]+:(?!\d+/)[^?#@]*@)|\?.*", re.DOTALL)

_CONFIGURATION = re.compile(r"\.(toml|ya?ml|json)$", re.IGNORECASE)

_warned: set[str] = set()


def open_backend(
    spec: BackendSpec,
    registry: Registry | None = None,
    *,
    must_exist: bool = False,
    light: bool = False,
) -> Backend:
    """Open the backend that `spec` means; a `Backend` is returned as it is.

    A plain path or `file://` takes `uring` when its probe passes, else `posix`, with one warning
    per reason and process that says why. A scheme that no backend is named after is `fsspec`'s,
    if fsspec knows it. Options stand in a URL's query.

    Args:
        spec: Path, URL, table with `type`, `BackendConfig`, or an open backend.
        registry: Where backends are looked up; default: everything installed.
        must_exist: Refuse a local folder that is not there; otherwise the first write makes it.
        light: Only small records will be read: a plain path takes `posix` straight away.

    Raises:
        ConfigError: The URL or its options are wrong, or no backend serves its scheme.
        PluginError: The backend is not installed or broken.
        StorageError: It cannot be opened.
    """
    if isinstance(spec, Backend):
        return guarded(spec)
    registry = registry or default_registry()
    if isinstance(spec, (Mapping, BackendConfig)):
        return _open_table(spec, registry, must_exist=must_exist)
    url = os.fspath(spec)
    if _CONFIGURATION.search(url) and not _scheme(url) and not Path(url).is_dir():
        msg = (
            f"{url} looks like a configuration file, not like the folder of a run: use "
            f"Checkpointer.from_config({url!r}), or file:// before the path of a folder"
        )
        raise ConfigError(msg)
    names = registry.names("backend")
    scheme = _scheme(url)
    if not scheme:
        _refuse_lost_slash(url, names)
    if scheme in {"", "file"}:
        return _open_local(_LIGHT_LOCAL if light else _LOCAL, url, registry, must_exist=must_exist)
    if scheme not in names and _ANY_URL in names and _is_known_to_fsspec(scheme):
        scheme = _ANY_URL
    if scheme not in names:
        msg = f"{shown_url(url)}: no installed backend serves {scheme}://{nearest(scheme, names)}"
        if _ANY_URL in names and not _has_fsspec():
            msg += ". Those of fsspec need its package: pip install 'penstock[fsspec]'"
        raise ConfigError(msg)
    cls = registry.backend_class(scheme)
    return _opened(cls, _from_url(cls, url), registry, must_exist=must_exist)


def portable(spec: BackendSpec) -> str | dict[str, Any] | None:
    """What another process can open the same from; None: there is no such thing."""
    if isinstance(spec, Backend):
        return None
    if isinstance(spec, BackendConfig):
        spec = {"type": spec.type, **spec.options}
    if not isinstance(spec, Mapping):
        return os.fspath(spec)
    try:
        table: dict[str, Any] = json.loads(json.dumps(dict(spec), default=os.fspath))
    except (TypeError, ValueError):
        return None
    return table


def shown_url(url: str) -> str:
    """`url` without user, password and query."""
    return _SECRETS.sub(r"\1", url) if _scheme(url) else url


def _open_table(
    spec: Mapping[str, Any] | BackendConfig, registry: Registry, *, must_exist: bool
) -> Backend:
    if not isinstance(spec, BackendConfig):
        spec = validated(BackendConfig, spec, what="backend")
    what, origin = f"options of backend {spec.type!r}", spec.origin
    try:
        cls = registry.backend_class(spec.type)
    except PluginError as error:
        if not origin.what:
            raise
        msg = f"{origin.what}: {origin.place}.type: {error}"
        raise PluginError(msg) from error
    if origin.what:
        what = f"{origin.what}: {what}"
    config = validated(cls.Config, spec.options, what=what, place=origin.place)
    return _opened(cls, config, registry, must_exist=must_exist, origin=origin)


def _open_local(
    candidates: tuple[str, ...], url: str, registry: Registry, *, must_exist: bool
) -> Backend:
    *better, last = candidates
    for name in better:
        try:
            cls = registry.backend_class(name)
            return _opened(cls, _from_url(cls, url), registry, must_exist=must_exist)
        except (CapabilityError, PluginError) as error:
            _warn_once(f"{name} is not used, {last} takes its place: {error}")
    cls = registry.backend_class(last)
    return _opened(cls, _from_url(cls, url), registry, must_exist=must_exist)


def _from_url(cls: type[Backend], url: str) -> PluginConfig:
    from urllib.parse import parse_qsl  # noqa: PLC0415 - most are plain paths

    base, query = url, ""
    if _scheme(url):
        base, _, query = url.partition("?")
    options: dict[str, str] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key in options:
            msg = f"{shown_url(url)}: option {key!r} is given twice"
            raise ConfigError(msg)
        options[key] = value
    try:
        return cls.from_url(base, options)
    except ValidationError as error:
        raise refusal(error, cls.Config, what=f"options in {shown_url(url)}") from None


def _opened(
    cls: type[Backend],
    config: PluginConfig,
    registry: Registry,
    *,
    must_exist: bool,
    origin: Origin | None = None,
) -> Backend:
    path = config.model_dump().get("path") if cls.name in _LOCAL else None
    if must_exist and path is not None and not Path(path).is_dir():
        msg = f"there is no folder {path}"
        raise ConfigError(msg)
    try:
        return guarded(
            cls.open(
                config,
                open_backend=lambda spec: open_backend(_placed(spec, config, origin), registry),
            )
        )
    except PenstockError:
        raise
    except Exception as error:
        msg = f"backend {cls.name!r} ({shipped_by(cls)}) cannot be opened: {error!r}"
        raise PluginError(msg) from error


def _placed(spec: BackendSpec, config: PluginConfig, origin: Origin | None) -> BackendSpec:
    """A backend that stands in the options of another, with the place where it was written."""
    if origin is None or not origin.what or not isinstance(spec, Mapping):
        return spec
    chosen = validated(BackendConfig, spec, what=f"{origin.what}: backend in {origin.place}")
    key = next((k for k in type(config).model_fields if getattr(config, k) is spec), None)
    chosen.came_from(origin if key is None else origin.below(key))
    return chosen


def _is_known_to_fsspec(scheme: str) -> bool:
    if scheme in _WITHOUT_FSSPEC:
        return True
    try:
        from fsspec.registry import known_implementations, registry  # noqa: PLC0415 - 80 ms
    except ImportError:
        return False
    return scheme in known_implementations or scheme in registry


def _has_fsspec() -> bool:
    try:
        import fsspec.registry  # noqa: F401, PLC0415 - 80 ms
    except ImportError:
        return False
    return True


def _scheme(url: str) -> str:
    match = _SCHEME.match(url)
    return match[1].lower() if match else ""


def _refuse_lost_slash(url: str, names: Collection[str]) -> None:
    """`Path("s3://bucket/run")` is `s3:/bucket/run`, which would be a folder of this machine.

    Raises:
        ConfigError: A scheme that something serves stands there, with one slash.
    """
    match = _ONE_SLASH.match(url)
    if match is None:
        return
    scheme = match[1].lower()
    if scheme in names or scheme == "file" or _is_known_to_fsspec(scheme):
        msg = (
            f"{match[1]}:/ with one slash is what pathlib makes of a URL, and would be a folder of "
            f"this machine: pass the URL as text, {match[1]}://..., or ./{match[1]}:/... if a "
            "folder is meant"
        )
        raise ConfigError(msg)


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning("%s", message)
