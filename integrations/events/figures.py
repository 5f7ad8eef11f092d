"""The figures of an event that are worth a curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def curves(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of an event by name; empty for an event that has none.

    Times are seconds. Bytes of a save are those of all ranks together.
    """
    match event["kind"]:
        case "durable":
            total = event["total"]
            raw, stored = total["bytes_raw"], total["bytes_stored"]
            found = {f"save/{phase}_s": seconds for phase, seconds in event["seconds"].items()}
            found |= {"save/bytes_raw": raw, "save/bytes_stored": stored}
            return found | ({"save/ratio": raw / stored} if stored else {})
        case "restore_done" | "load_done":
            found = {f"restore/{phase}_s": seconds for phase, seconds in event["seconds"].items()}
            return found | {"restore/bytes_read": event["bytes_read"]}
        case "verified":
            return {"verify/total_s": event["seconds"], "verify/damaged": event["damaged"]}
    return {}
