"""Defines the format version, and checks the features that a record names. Sans-IO.

Tested in `tests/core/format/test_commit_record.py` and `test_records.py`.
"""

from __future__ import annotations

from typing import Any

from penstock.core.format.strict_json import check_texts, refuse

FORMAT_VERSION = 1
"""Version of every record's bytes."""

FEATURES: frozenset[str] = frozenset()
"""Features beyond version 1 that this release reads."""


def without_features(body: Any, name: str) -> Any:
    """Check the features that a record requires; return its body without the lists of features.

    Args:
        body: The decoded JSON; anything but an object is returned as it is.
        name: Name of the record, for error messages.

    Raises:
        FormatError: The record requires a feature that this release does not know.
    """
    if type(body) is not dict or body.keys().isdisjoint(("requires", "optional")):
        return body
    unknown = sorted(set(check_texts(body.get("requires", []), name)) - FEATURES)
    if unknown:
        refuse(
            name,
            f"requires {', '.join(map(repr, unknown))}, which this release of Penstock cannot"
            " read: use a newer release",
        )
    if type(body.get("optional", {})) is not dict:
        refuse(name, "`optional` is not a JSON object")
    return {key: body[key] for key in body if key not in {"requires", "optional"}}
