"""Opens the backend that a path, a URL or a table names.

Tested in `tests/integration/lifecycle/test_engines.py`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from penstock.core.abc import Backend, HostRoots
from penstock.core.config.explain import refusal, validated
from penstock.core.config.plugin_choice import (
    BackendConfig,
    BackendSpec,
    Origin,
    scheme_of,
    shown_url,
)
from penstock.core.distributions import installed_only
from penstock.core.errors import CapabilityError, ConfigError, PenstockError, PluginError
from penstock.core.foreign import shipped_by
from penstock.core.plugins.registry import default_registry
from penstock.core.storage.guarded import guarded
from penstock.core.storage.host_root import unchangeable_if_of_hosts
from penstock.core.suggest import nearest

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.core.abc import PluginConfig
    from penstock.core.plugins.registry import Registry

logger = logging.getLogger(__name__)


# The backends for a plain path or file://; the first that works on this machine is used.
_LOCAL = ("uring", "posix")
_LIGHT_LOCAL = ("posix",)

# The backend for schemes that no backend is named after.
_ANY_URL = "fsspec"
_WITHOUT_FSSPEC = {"s3", "s3a"}  # the `fsspec` backend needs only botocore for these

_OPTION = re.compile(r"[A-Za-z0-9_.-]+")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")

# Any text before ://, even if it is not a valid scheme. No real path begins like this.
_ODD_SCHEME = re.compile(r"([^/]+)://")

_CONFIGURATION = re.compile(r"\.(toml|ya?ml|json)$", re.IGNORECASE)

_warned: set[str] = set()


def open_backend(
    spec: BackendSpec,
    registry: Registry | None = None,
    *,
    must_exist: bool = False,
    light: bool = False,
) -> Backend:
    """Open the backend that `spec` names; return an open `Backend` as is.

    A plain path or `file://` uses `uring` if its probe passes, else `posix`, with one warning per
    reason and process. If no backend has the name of a scheme, `fsspec` opens the schemes that it
    knows. The options of a URL are in its query. A folder that is the root of one of several hosts
    can only be read.

    Args:
        spec: A path, a URL, a table with `type`, a `BackendConfig`, or an open backend.
        registry: Finds backends; default: all installed backends.
        must_exist: Whether to refuse a local folder that does not exist; otherwise the first write
            creates it.
        light: Whether only small records will be read. A plain path then uses `posix` without a
            probe.

    Raises:
        ConfigError: The URL or its options are wrong, or no backend serves its scheme.
        PluginError: The backend is not installed, or is broken.
        StorageError: The backend cannot be opened.
    """
    backend = _open(spec, registry or default_registry(), must_exist=must_exist, light=light)
    return backend if isinstance(spec, Backend) else unchangeable_if_of_hosts(backend)


def _open(
    spec: BackendSpec, registry: Registry, *, must_exist: bool = False, light: bool = False
) -> Backend:
    if isinstance(spec, Backend):
        return guarded(spec)
    if isinstance(spec, (Mapping, BackendConfig)):
        return _open_table(spec, registry, must_exist=must_exist)
    url = os.fspath(spec)
    if _CONFIGURATION.search(url) and not scheme_of(url) and not Path(url).is_dir():
        msg = (
            f"{url} looks like a configuration file, not like the folder of a run: use "
            f"Checkpointer.from_config({url!r}), or put file:// before the path of a folder"
        )
        raise ConfigError(msg)
    names = registry.names("backend")
    scheme = scheme_of(url)
    if not scheme:
        _refuse_lost_slash(url, names)
        _refuse_odd_scheme(url)
    if scheme in {"", "file"}:
        return _open_local(_LIGHT_LOCAL if light else _LOCAL, url, registry, must_exist=must_exist)
    if scheme not in names and _ANY_URL in names and _is_known_to_fsspec(scheme):
        scheme = _ANY_URL
    if scheme not in names:
        schemes = _fsspec_schemes() if _ANY_URL in names else set()
        hint = nearest(scheme, {*names, *schemes})
        if not hint.endswith("?"):  # fsspec's 60 schemes would hide the usual ones
            hint = nearest(scheme, {*names, "file", *_WITHOUT_FSSPEC})
            hint += ", and those of fsspec, such as gs and az" if schemes else ""
        msg = (
            f"{shown_url(url)}: no installed backend serves {scheme}://: install the package that "
            f"provides it{hint}"
        )
        if _ANY_URL in names and not schemes:
            msg += ". The schemes of fsspec need its package: pip install 'penstock[fsspec]'"
        raise ConfigError(msg)
    cls = registry.backend_class(scheme)
    return _opened(cls, _from_url(cls, url), registry, must_exist=must_exist)


def portable(spec: BackendSpec) -> str | dict[str, Any] | None:
    """Return a spec that opens the same backend in another process; None if there is none."""
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
            _warn_once(f"{name} is not used, so {last} takes its place: {error}")
    cls = registry.backend_class(last)
    return _opened(cls, _from_url(cls, url), registry, must_exist=must_exist)


def _from_url(cls: type[Backend], url: str) -> PluginConfig:
    from urllib.parse import parse_qsl  # noqa: PLC0415 - most are plain paths

    base, query = url, ""
    if scheme_of(url):
        base, _, query = url.partition("?")
    options: dict[str, str] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if not _OPTION.fullmatch(key):  # may be a piece of a password, so the message hides it
            msg = (
                f"{shown_url(url)}: the text after the ? is not a list of options; in a user or "
                "password write %3F for a ?"
            )
            raise ConfigError(msg)
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
        if Path(path).is_file():
            msg = f"{path} is a file, not the folder of a run"
        raise ConfigError(msg)
    # The backend `hosts` joins the roots of all hosts, so it may change the root of its host.
    opens = _open if issubclass(cls, HostRoots) else open_backend
    try:
        return guarded(
            cls.open(
                config, open_backend=lambda spec: opens(_placed(spec, config, origin), registry)
            )
        )
    except PenstockError:
        raise
    except Exception as error:
        msg = f"backend {cls.name!r} ({shipped_by(cls)}) cannot be opened: {error!r}"
        raise PluginError(msg) from error


def _placed(spec: BackendSpec, config: PluginConfig, origin: Origin | None) -> BackendSpec:
    """Return a backend spec from another backend's options, with its place in the file."""
    if origin is None or not origin.what or not isinstance(spec, Mapping):
        return spec
    chosen = validated(BackendConfig, spec, what=f"{origin.what}: backend in {origin.place}")
    key = next((k for k in type(config).model_fields if getattr(config, k) is spec), None)
    chosen.came_from(origin if key is None else origin.below(key))
    return chosen


def _is_known_to_fsspec(scheme: str) -> bool:
    return scheme in _WITHOUT_FSSPEC or scheme in _fsspec_schemes()


@installed_only()
def _fsspec_schemes() -> set[str]:
    try:
        from fsspec.registry import known_implementations, registry  # noqa: PLC0415 - 80 ms
    except ImportError:
        return set()
    return {*known_implementations, *registry}


def _refuse_lost_slash(url: str, names: Collection[str]) -> None:
    """Refuse `s3:/bucket/run`, pathlib's form of `s3://bucket/run`, which is a local folder.

    Raises:
        ConfigError: The path begins with the scheme of a known backend and one slash.
    """
    match = _ONE_SLASH.match(url)
    if match is None:
        return
    scheme = match[1].lower()
    if scheme in names or scheme == "file" or _is_known_to_fsspec(scheme):
        msg = (
            f"{match[1]}:/ has one slash, as pathlib writes a URL, and would be a local folder: "
            f"pass the URL as text, {match[1]}://..., or ./{match[1]}:/... for a folder"
        )
        raise ConfigError(msg)


def _refuse_odd_scheme(url: str) -> None:
    """Refuse `my_store://host/run`, which would open a local folder `my_store:`.

    Raises:
        ConfigError: The text before `://` is not a scheme.
    """
    match = _ODD_SCHEME.match(url)
    if match is not None:
        msg = (
            f"{match[1]}:// does not begin a URL: a scheme has letters, digits, +, . and -, and "
            f"begins with a letter; write ./{match[1]}:/... for a folder"
        )
        raise ConfigError(msg)


def _warn_once(message: str) -> None:
    if message not in _warned and logger.isEnabledFor(logging.WARNING):
        _warned.add(message)
        logger.warning("%s", message)
