"""Says once, by what the first save holds, which rules of the configuration match nothing in it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.core.patterns import compile_all
from penstock.core.select import nothing_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.core.config import Rule
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")


class UnusedRules:
    """Looks at one save, the first that holds anything: a misspelt pattern matches no other either.

    A rule for what is added to the state later is warned of as well, but once, and every later
    save is spared the comparison.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = list(rules)

    def look(self, objects: Iterable[ObjectPath], step: int) -> None:
        """Log a warning for every rule with a pattern that matches none of `objects`."""
        if not self._rules:
            return
        paths = list(objects)
        if not paths:
            return
        rules, self._rules = self._rules, []
        for rule in rules:
            unused = [
                pattern
                for pattern in compile_all("match", rule.match)
                if not any(pattern.matches(path) for path in paths)
            ]
            if unused:
                log.warning(
                    "%s: %s in step %d, so no codec is used for it (said once)",
                    rule.shown,
                    "; ".join(nothing_for(pattern, paths) for pattern in unused),
                    step,
                )
