"""Adapters between Penstock and other tools: trainers, their files, and sinks for events.

An integration imports only the public API of `penstock`, as a user's program does. No other package
of Penstock imports an integration. Importing an adapter imports its trainer. An importer or
exporter of files imports another tool only when it is called.
"""

from __future__ import annotations


def missing_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """Return the error for a missing trainer, which names the extra to install.

    If the trainer is there but lacks a package that it needs, returns `error` unchanged.
    """
    if error.name != extra:
        return error
    msg = f"penstock.integrations.{extra} needs {extra}: pip install 'penstock[{extra}]'"
    return ModuleNotFoundError(msg, name=extra)
