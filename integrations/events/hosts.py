"""The libraries that sinks write to: imported when a sink is made."""

from __future__ import annotations

import importlib
from typing import Any

from penstock import ConfigError


def host(module: str, extra: str) -> Any:
    """Import a module of a host.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        msg = f"{module} cannot be imported ({error}): pip install 'penstock[{extra}]'"
        raise ConfigError(msg) from error
