"""Finds the codec chain of each object by the rules of a configuration."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.core.abc import StateObject
from penstock.core.config.model import AUTO
from penstock.core.errors import CodecError, ConfigError, PluginError
from penstock.core.limits import MAX_CODEC_NAME_CHARS, MAX_INT
from penstock.core.pipeline.auto import CANDIDATES, AutoChains, class_of
from penstock.core.pipeline.codec_chain import CodecChain
from penstock.core.tree.patterns import compile_all, is_catch_all
from penstock.core.tree.select import Selection, nothing_for

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.core.abc import Node
    from penstock.core.config.model import CheckpointerConfig, Rule
    from penstock.core.plugins.registry import Registry
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")


class ChainTable:
    """The codec chains of a configuration, by the first rule that matches; number 0 is raw.

    Under an `auto` rule each class of objects has its own number, without a chain: the chain is
    chosen while the save runs.
    """

    def __init__(self, config: CheckpointerConfig, registry: Registry) -> None:
        self._rules = [(Selection(include=rule.match), rule) for rule in config.rules]
        self.chooses = bool(self._rules)
        """Whether there are rules. Without rules, all objects are raw and need no lookup."""
        self._numbers: dict[int, int] = {}
        self.chains: list[CodecChain | None] = [None]
        self.auto: AutoChains | None = None
        self._classes: dict[int, str] = {}
        self._number_of_class: dict[str, int] = {}
        if any(rule.codecs == AUTO for rule in config.rules):
            self.auto = self._auto_chains(registry)
        for index, rule in enumerate(config.rules):
            if rule.codecs == AUTO:
                continue
            chain = codec_chain(rule, registry)
            _check_lossy(rule, chain)
            if chain is not None:
                _check_codecs(chain)
                _warn_of_bare_deltas(rule, chain)
            # Tied objects are compared by these numbers: see `without_foreign_rounding`.
            alike = [n for i, n in self._numbers.items() if config.rules[i].codecs == rule.codecs]
            if chain is None or alike:
                self._numbers[index] = alike[0] if alike else 0
            else:
                self._numbers[index] = len(self.chains)
                self.chains.append(chain)
        _warn_of_useless_deltas(config, self.chains)
        self._exact = {n: self._without_lossy(n) for n in range(len(self.chains))}
        self._unchecked = list(config.rules)

    def number(self, entry: StateObject, *, exact: bool) -> int:
        """Return the number of an object's chain; `exact` leaves out its lossy codecs."""
        for index, (selection, rule) in enumerate(self._rules):
            if selection.selects(entry.path):
                if rule.codecs == AUTO:
                    return self._class_number(entry)
                number = self._numbers[index]
                return self._exact[number] if exact else number
        return 0

    def is_exact(self, number: int) -> bool:
        """Return whether the chain with this number decodes to exactly the bytes it encoded."""
        chain = self.chains[number]
        return chain is None or chain.lossless

    def is_auto(self, number: int) -> bool:
        """Return whether the chain with this number is chosen while the save runs."""
        return number in self._classes

    def warn_of_unused(self, paths: Sequence[ObjectPath], step: int) -> None:
        """Warn about rules that match nothing in the first save that holds anything.

        Later saves skip the comparison, since a misspelled pattern would match nothing in them
        either. So a rule for objects that join the state later also causes one warning.
        """
        if not paths:
            return
        rules, self._unchecked = self._unchecked, []
        for rule in rules:
            unused = [
                pattern
                for pattern in compile_all("match", rule.match)
                if not any(pattern.matches(path) for path in paths)
            ]
            if unused:
                log.warning(
                    "%s: %s (in step %d, so no codec is used for it; logged once)",
                    rule.shown,
                    "; ".join(nothing_for(pattern, paths) for pattern in unused),
                    step,
                )

    def _class_number(self, entry: StateObject) -> int:
        name = class_of(entry.role, entry.spec.dtype)
        number = self._number_of_class.get(name)
        if number is None:
            number = self._number_of_class[name] = len(self.chains)
            self._classes[number] = name
            self.chains.append(None)
        return number

    def _auto_chains(self, registry: Registry) -> AutoChains:
        installed = set(registry.names("codec"))
        candidates: dict[str, int] = {}
        for name, options in CANDIDATES:
            if name not in installed:
                continue
            chain = CodecChain([registry.codec(name, options)])
            # A third party may have another codec with that name.
            if chain.lossless and not chain.needs_base:
                candidates[name] = len(self.chains)
                self.chains.append(chain)
        return AutoChains(self._classes, candidates)

    def _without_lossy(self, number: int) -> int:
        chain = self.chains[number]
        if chain is None or chain.lossless:
            return number
        exact = [codec for codec in chain.codecs if codec.lossless]
        if not exact:
            return 0
        self.chains.append(CodecChain(exact))
        return len(self.chains) - 1


def codec_chain(rule: Rule, registry: Registry) -> CodecChain | None:
    """Return the codecs of `rule`, ready for use; None means raw.

    Raises:
        PluginError: A codec is broken or not installed.
        ConfigError: Options of a codec are wrong, or the codecs do not fit together in this order.
    """
    codecs = []
    assert rule.codecs != AUTO
    for number, link in enumerate(rule.codecs):
        try:
            codecs.append(registry.codec(link.type, link.options))
        except (ConfigError, PluginError) as error:
            if not rule.origin.what:
                raise
            where = rule.origin.below(f"codecs[{number}]")
            msg = f"{where.what}: {where.place}: {error}"
            raise (ConfigError if isinstance(error, ConfigError) else PluginError)(msg) from error
    try:
        return CodecChain(codecs) if codecs else None
    except CodecError as error:
        msg = f"{rule.shown}: {error}"
        raise ConfigError(msg) from error


def without_foreign_rounding(
    entries: Sequence[StateObject | Node], table: ChainTable
) -> tuple[Sequence[StateObject | Node], Collection[ObjectPath]]:
    """Keep a lossy rule for one name of a tied object from rounding it under its other names.

    The chain of the owner, to which the other names are tied, encodes the object. If that chain is
    lossy, a name with a lossless chain becomes the owner instead. Ranks that tie the same memory
    differently then contradict each other about the owner, and the save fails. With the old owner,
    some of them would round their part of the object.

    Returns:
        The entries with the new owners; and the paths of owners that must not use their lossy
        codecs, because all names have lossy chains, but not the same one.
    """
    tied: dict[ObjectPath, list[StateObject]] = {}
    for entry in entries if table.chooses else ():
        if type(entry) is StateObject and entry.same_as is not None:
            tied.setdefault(entry.same_as, []).append(entry)
    owners: dict[ObjectPath, ObjectPath] = {}
    exact: set[ObjectPath] = set()
    for entry in entries if tied else ():
        if type(entry) is not StateObject or entry.path not in tied:
            continue
        chain = table.number(entry, exact=False)
        chains = [table.number(name, exact=False) for name in tied[entry.path]]
        if table.is_exact(chain) or not set(chains) - {chain}:
            continue
        lossless = [
            n.path for n, c in zip(tied[entry.path], chains, strict=True) if table.is_exact(c)
        ]
        if lossless:
            owners[entry.path] = lossless[0]
        else:
            exact.add(entry.path)
    if not owners:
        return entries, exact
    return [
        entry._replace(same_as=None if owner == entry.path else owner)
        if type(entry) is StateObject and (owner := owners.get(entry.same_as or entry.path))
        else entry
        for entry in entries
    ], exact


def _check_lossy(rule: Rule, chain: CodecChain | None) -> None:
    """Refuse a lossy codec in a rule that names no objects: it would round everything.

    Raises:
        ConfigError: A pattern matches everything at some depth.
    """
    if chain is None or chain.lossless:
        return
    lossy = next(codec.name for codec in chain.codecs if not codec.lossless)
    for pattern in rule.match:
        if is_catch_all(pattern):
            msg = (
                f"{rule.shown}: codec {lossy} is lossy, and the pattern {pattern!r} matches "
                "objects of nearly any name: name what may be rounded, as in "
                "'optimizer/**/exp_avg_sq'"
            )
            raise ConfigError(msg)


def _warn_of_useless_deltas(
    config: CheckpointerConfig, chains: Sequence[CodecChain | None]
) -> None:
    """Warn about options for delta chains if no rule makes one.

    This is not an error: jobs may share a configuration file, its rules may be off for a while, and
    reading a run needs neither rules nor deltas.
    """
    if "deltas" in config.model_fields_set and not any(c and c.needs_base for c in chains):
        log.warning(
            "the option deltas has no effect: no rule has the codec delta, so every checkpoint is "
            'stored without a base. Begin the codecs of a rule with it, as in ["delta", '
            '"floatsplit"], or remove deltas'
        )


def _warn_of_bare_deltas(rule: Rule, chain: CodecChain) -> None:
    """Warn about a chain of `delta` alone, which couples checkpoints but makes none smaller.

    Only for our codec: another codec that needs a base may compress its own output.
    """
    if [codec.name for codec in chain.codecs] == ["delta"]:
        log.warning(
            "%s: no codec follows delta, and differences take as much room as the data "
            "itself: add a codec after it that makes them smaller, as in "
            '["delta", "floatsplit"]',
            rule.shown,
        )


def _check_codecs(chain: CodecChain) -> None:
    """Refuse a codec whose name or version readers would refuse in the manifest."""
    for codec in chain.codecs:
        if len(codec.name) > MAX_CODEC_NAME_CHARS or not 0 <= codec.version <= MAX_INT:
            msg = (
                f"codec {codec.name!r} of version {codec.version} cannot be recorded: a name has "
                f"at most {MAX_CODEC_NAME_CHARS} characters, a version is at least 0"
            )
            raise PluginError(msg)
