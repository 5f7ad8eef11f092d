"""The keys of a flattened state dict: `state.<parameter>.<key>`, `param_groups.<parameter>.<key>`.

torch.distributed.checkpoint makes them with `flatten_optimizer_state_dict=True`. Names of
parameters have dots, options have none, and nested state has several keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STATE, GROUPS = "state", "param_groups"


def is_flattened(keys: Iterable[object]) -> bool:
    """Return whether there are keys, and all are those of a flattened state dict."""
    found = [type(key) is str and key.startswith((f"{STATE}.", f"{GROUPS}.")) for key in keys]
    return bool(found) and all(found)


def split_keys(keys: Iterable[str]) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """Return the full keys of the state and of the options, by parameter and the rest of the key.

    Without options the last part of a key is the rest of it.
    """
    state: dict[str, dict[str, str]] = {}
    options: dict[str, dict[str, str]] = {}
    of_state: dict[str, str] = {}
    for full in keys:
        kind, _, text = full.partition(".")
        if kind == STATE:
            of_state[text] = full
        else:
            name, _, key = text.rpartition(".")
            options.setdefault(name, {})[key] = full
    for text, full in of_state.items():
        parts = text.split(".")
        names = [".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)] or [""]
        name = next((name for name in names if name in options), names[0])
        state.setdefault(name, {})[text[len(name) + 1 :]] = full
    return state, options


def flattened(prefix: str, items: Mapping[Any, Any]) -> dict[str, Any]:
    """Return `items` with their keys flattened, those of dicts within them too."""
    found: dict[str, Any] = {}
    for key, item in items.items():
        full = f"{prefix}.{key}"
        found |= flattened(full, item) if isinstance(item, dict) else {full: item}
    return found
