"""From a described state tree to everything that one save needs to know."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.core.abc import StateObject
from penstock.core.errors import CodecError, ConfigError, PenstockError, PluginError
from penstock.core.foreign import said
from penstock.core.limits import MAX_CODEC_NAME_CHARS, MAX_INT
from penstock.core.pipeline.chain import CodecChain
from penstock.core.plan.save import Capture, PlannedObject, plan_save
from penstock.core.save.request import SaveRequest
from penstock.core.tree.patterns import compile_all
from penstock.core.tree.select import Selection, nothing_for
from penstock.core.types import PAGE_BYTES, Kind, align_up, show_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import ByteSource
    from penstock.core.config.model import CheckpointerConfig, Rule
    from penstock.core.plan.save import SavePlan
    from penstock.core.plugins.registry import Registry
    from penstock.core.tree.describe import Description
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")


class ChainTable:
    """The codec chains of a configuration, by the first rule that matches; number 0 is raw."""

    def __init__(self, config: CheckpointerConfig, registry: Registry) -> None:
        self._rules = [(Selection(include=rule.match), rule) for rule in config.rules]
        self._numbers: dict[int, int] = {}
        self.chains: list[CodecChain | None] = [None]
        for index, rule in enumerate(config.rules):
            chain = codec_chain(rule, registry)
            self._numbers[index] = 0 if chain is None else len(self.chains)
            if chain is not None:
                self.chains.append(chain)
                _check_links(chain)
        self._exact = {n: self._without_lossy(n) for n in range(len(self.chains))}
        self._unchecked = list(config.rules)

    def number(self, path: ObjectPath, kind: Kind) -> int:
        """Chain of the object at `path`: a value's leaves out what is lossy."""
        for index, (selection, _) in enumerate(self._rules):
            if selection.selects(path):
                number = self._numbers[index]
                return self._exact[number] if kind is Kind.VALUE else number
        return 0

    def warn_of_unused(self, paths: Sequence[ObjectPath], step: int) -> None:
        """Say which rules match nothing of the first save that holds anything.

        A misspelt pattern matches nothing of a later save either. A rule for what is added to the
        state later is warned of as well, but once, and every later save is spared the comparison.
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
                    "%s: %s in step %d, so no codec is used for it (said once)",
                    rule.shown,
                    "; ".join(nothing_for(pattern, paths) for pattern in unused),
                    step,
                )

    def _without_lossy(self, number: int) -> int:
        chain = self.chains[number]
        if chain is None or chain.lossless:
            return number
        exact = [codec for codec in chain.codecs if codec.lossless]
        if not exact:
            return 0
        self.chains.append(CodecChain(exact))
        return len(self.chains) - 1


def _check_links(chain: CodecChain) -> None:
    """Refuse a codec whose name or version no reader would take."""
    for codec in chain.codecs:
        if len(codec.name) > MAX_CODEC_NAME_CHARS or not 0 <= codec.version <= MAX_INT:
            msg = (
                f"codec {codec.name!r} of version {codec.version} cannot be recorded: a name has "
                f"at most {MAX_CODEC_NAME_CHARS} characters, a version is at least 0"
            )
            raise PluginError(msg)


def plan_state(
    description: Description,
    *,
    config: CheckpointerConfig,
    table: ChainTable,
    step: int,
    generation: int,
    mode: str,
) -> SaveRequest:
    """Plan the save of a described tree."""
    defer = Selection(include=config.defer) if config.defer else None
    objects: list[PlannedObject] = []
    count = 0
    promised = False
    for entry in description.entries:
        if not isinstance(entry, StateObject):
            continue
        count += 1
        if entry.same_as is not None:
            continue
        capture = _capture(entry, description, mode=mode, defer=defer)
        if capture is Capture.DEFERRED and entry.source.memory not in description.deferrable:
            promised = True
        chain = table.number(entry.path, entry.kind)
        objects.append(PlannedObject(entry, capture, chain, _version(entry)))
    plan = plan_save(objects, chunk_bytes=config.chunk_bytes)
    return SaveRequest(
        step=step,
        generation=generation,
        mode=mode,
        entries=description.entries,
        plan=plan,
        chains=table.chains,
        providers=description.providers_used,
        objects=count,
        staging_bytes=_staging_need(plan, blocking=mode == "blocking"),
        pin=any(o.entry.source.device.startswith("cuda") for o in objects),
        promised=promised,
        block_bytes=config.block_bytes,
        grace_s=config.grace_s,
        io_timeout_s=config.io_timeout_s,
    )


def _version(entry: StateObject) -> int | None:
    try:
        return entry.source.version()
    except PenstockError:
        raise
    except Exception as error:
        msg = f"{show_path(entry.path)}: its source cannot say its version: {said(error)}"
        raise PluginError(msg) from error


def _steady(source: ByteSource) -> bool:
    try:
        return source.steady()
    except Exception:  # noqa: BLE001 - the capture asks again, and says whose it is
        return False


def _capture(
    entry: StateObject, description: Description, *, mode: str, defer: Selection | None
) -> Capture:
    if entry.kind is Kind.VALUE:
        return Capture.FROZEN
    memory = entry.source.memory
    if mode == "lazy" and memory is not None:
        if memory in description.deferrable:
            return Capture.DEFERRED
        if defer is not None and defer.selects(entry.path):
            return Capture.DEFERRED
    return Capture.NOW


def _staging_need(plan: SavePlan, *, blocking: bool) -> int:
    total = 0
    for chunk in plan.chunks:
        source = plan.objects[chunk.pieces[0].item].entry.source
        if blocking and not chunk.slab and source.address is not None and _steady(source):
            continue  # lent, not copied
        total += align_up(chunk.phase + chunk.length, PAGE_BYTES)
    return total


def codec_chain(rule: Rule, registry: Registry) -> CodecChain | None:
    """The codecs of `rule`, ready for use; None: raw.

    Raises:
        PluginError: A codec is not installed or broken.
        ConfigError: Its options do not fit, or codecs do not go together in this order.
    """
    codecs = []
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
