"""The ways between Penstock and other tools: trainers, their files, and sinks for events.

An integration imports the public face of `penstock` only, as a user's program does, and nothing of
the product imports an integration. The adapter of a trainer imports that trainer;
what reads and writes files imports another tool when it is called.
"""

from __future__ import annotations


def missing_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """Return the error of an adapter whose trainer is not installed; it names the extra to install.

    A package that the installed trainer itself misses is left as it is.
    """
    if error.name != extra:
        return error
    msg = f"penstock.integrations.{extra} needs {extra}: pip install 'penstock[{extra}]'"
    return ModuleNotFoundError(msg, name=extra)
