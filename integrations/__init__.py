"""Adapters between Penstock and other tools: trainers, their files, and sinks for events.

An integration imports only the public API of `penstock`, as a user's program does, and no other
package of Penstock imports an integration. A trainer's adapter imports that trainer;
an importer or exporter of files imports another tool when it is called.
"""

from __future__ import annotations


def missing_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """Return the error of an adapter whose trainer is not installed; it names the extra to install.

    An error for a package that the installed trainer needs is returned unchanged.
    """
    if error.name != extra:
        return error
    msg = f"penstock.integrations.{extra} needs {extra}: pip install 'penstock[{extra}]'"
    return ModuleNotFoundError(msg, name=extra)
