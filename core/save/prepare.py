"""Prepares a save: checks its arguments, plans its chunks, and reserves its staging memory.

All of it happens on the caller's thread, before the save has threads, and stores nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.core.abc import StateObject
from penstock.core.concurrency.workers import CoreMeter, local_ranks
from penstock.core.config.model import AUTO
from penstock.core.errors import (
    CodecError,
    ConfigError,
    PenstockError,
    PluginError,
    StepExistsError,
    UnsupportedStateError,
)
from penstock.core.foreign import said
from penstock.core.format.records import commit_name, generation_above
from penstock.core.limits import (
    MAX_CODEC_NAME_CHARS,
    MAX_INT,
    MAX_METADATA_DEPTH,
    METADATA_LIMIT_BYTES,
    depth_of,
)
from penstock.core.pipeline.chain import CodecChain
from penstock.core.pipeline.choices import AutoChains
from penstock.core.pipeline.staging import Staging, default_budget
from penstock.core.plan.choice import CANDIDATES, CodecChooser, class_of
from penstock.core.plan.derived import find_masters
from penstock.core.plan.save import LARGEST_BLOCK_BYTES, Capture, PlannedObject, plan_save
from penstock.core.ranks.structure import is_below
from penstock.core.save.request import SaveRequest
from penstock.core.tree.patterns import compile_all, is_catch_all
from penstock.core.tree.select import Selection, nothing_for
from penstock.core.types import PAGE_BYTES, Kind, align_up, show_path, show_value

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from penstock.core.abc import ByteSource, Node
    from penstock.core.config.model import CheckpointerConfig, Rule
    from penstock.core.plan.save import KnownCuts, SavePlan
    from penstock.core.plugins.registry import Registry
    from penstock.core.rounds.round import RankPlace
    from penstock.core.tree.describe import Description
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")


def check_metadata(metadata: object) -> dict[str, Any]:
    """Return a user's metadata as it will be read back: tuples as lists, scalars as plain numbers.

    Raises:
        ConfigError: The metadata is not JSON, has a key that is no text, is larger than 16 MiB, or
            is nested too deeply.
    """
    if not isinstance(metadata, Mapping):
        msg = f"metadata is a {type(metadata).__name__}: pass a dict"
        raise ConfigError(msg)
    if depth_of(dict(metadata)) > MAX_METADATA_DEPTH:
        msg = (
            f"metadata is nested more than {MAX_METADATA_DEPTH} levels deep, or holds itself: pass "
            "flat dicts, and store what is deeper in the state"
        )
        raise ConfigError(msg)
    try:
        text = json.dumps(dict(metadata), ensure_ascii=False, default=_plain_scalar)
        result = json.loads(text)
        # `json` turns other keys into text, and would silently lose one of `{1: "a", "1": "b"}`.
        if not _all_keys_are_text(dict(metadata)):
            raise TypeError  # noqa: TRY301 - the handler below finds the key for its message
    except (TypeError, ValueError, RecursionError) as error:
        found = _foreign(dict(metadata), "metadata") if isinstance(error, TypeError) else None
        if found is not None:
            raise ConfigError(found) from error
        msg = f"metadata cannot be stored as JSON: {error}; pass plain dicts, lists, text, numbers"
        raise ConfigError(msg) from error
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > METADATA_LIMIT_BYTES or type(result) is not dict:
        msg = f"metadata is {size} bytes of JSON; at most {METADATA_LIMIT_BYTES} are stored"
        raise ConfigError(msg)
    return result


def claim_generation(
    step: int,
    entries: Mapping[int, Sequence[str]],
    *,
    url: str,
    overwrite: bool,
    may_be_deleted: Callable[[str], bool] = lambda _: False,
) -> int:
    """Return the generation that a save of `step` publishes.

    Args:
        step: The step to save.
        entries: The names of commit records by step, ascending. An overwrite needs all of them: it
            would publish a generation below one that is missing here, and count as the older one.
        url: The name of the run in messages.
        overwrite: Whether the save may replace a committed step.
        may_be_deleted: Returns whether a deletion that timed out may still delete the record of
            this name; its generation is skipped, or that deletion would take the new record.

    Raises:
        StepExistsError: This step or a later one is committed, and `overwrite` is off.
    """
    if overwrite:
        generation = generation_above(entries.get(step, ()))
    else:
        generation = 0
        steps = list(entries)
        if steps and step <= steps[-1]:
            raise _step_exists(step, steps, url)
    while may_be_deleted(commit_name(step, generation)):
        generation += 2  # the odd ones are those of compactions
    if generation > MAX_INT:
        msg = f"step {step} has a generation that none can follow: delete the step, and save again"
        raise StepExistsError(msg)
    return generation


class ChainTable:
    """The codec chains of a configuration, by the first rule that matches; number 0 is raw.

    Where the rule says `auto`, each class of objects has a number of its own, without a chain: the
    chain is chosen while the save runs.
    """

    def __init__(self, config: CheckpointerConfig, registry: Registry) -> None:
        self._rules = [(Selection(include=rule.match), rule) for rule in config.rules]
        self.chooses = bool(self._rules)
        """Whether an object may have a chain: most states have none, and many objects."""
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
            # Tied objects are compared by these numbers: see `_without_foreign_rounding`.
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
        """Return the chain of an object; with `exact`, without its lossy codecs."""
        for index, (selection, rule) in enumerate(self._rules):
            if selection.selects(entry.path):
                if rule.codecs == AUTO:
                    return self._class_number(entry)
                number = self._numbers[index]
                return self._exact[number] if exact else number
        return 0

    def is_exact(self, number: int) -> bool:
        """Return whether the chain of this number gives back the very bytes that it encoded."""
        chain = self.chains[number]
        return chain is None or chain.lossless

    def is_auto(self, number: int) -> bool:
        """Whether the chain with this number is chosen while the save runs."""
        return number in self._classes

    def warn_of_unused(self, paths: Sequence[ObjectPath], step: int) -> None:
        """Warn of the rules that match nothing of the first save that holds anything.

        A misspelt pattern matches nothing of a later save either. A rule for objects that join the
        state later is warned of as well, but once, and no later save pays for the comparison.
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
            # A third party's codec of that name may be another one.
            if chain.lossless and not chain.needs_base:
                candidates[name] = len(self.chains)
                self.chains.append(chain)
        return AutoChains(self._classes, candidates, CodecChooser(tuple(candidates)), CoreMeter())

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
    """Return the codecs of `rule`, ready for use; None stands for raw.

    Raises:
        PluginError: A codec is not installed or broken.
        ConfigError: Its options do not fit, or codecs do not go together in this order.
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


def plan_state(  # noqa: PLR0913 - options, each by name
    description: Description,
    *,
    config: CheckpointerConfig,
    table: ChainTable,
    step: int,
    generation: int,
    mode: str,
    share: bool,
    derive: bool,
    place: RankPlace | None = None,
    known: KnownCuts | None = None,
) -> SaveRequest:
    """Plan the save of a described tree.

    Args:
        description: The tree.
        config: Sizes, budgets, times.
        table: The codec chains.
        step: The step.
        generation: The generation.
        mode: The mode.
        share: Whether chunks that are stored already are not stored again.
        derive: Whether to look for objects that may be derived.
        place: This rank among those that save together; None: this process saves alone.
        known: The cuts of the save before.

    Raises:
        PluginError: A source cannot say its version.
    """
    defer = Selection(include=config.defer) if config.defer else None
    objects: list[PlannedObject] = []
    count = 0
    promised = False
    devices: set[str] = set()
    lazy = mode == "lazy"
    entries, exact = _without_foreign_rounding(description.entries, table)
    for entry in entries:
        if type(entry) is not StateObject:
            continue
        count += 1
        if entry.same_as is not None:
            continue
        if place is None and entry.replica is not None and not _is_whole(entry):
            _refuse_piece(entry)
        source = entry.source
        devices.add(source.device)
        capture = Capture.FROZEN if entry.kind is Kind.VALUE else Capture.NOW
        if lazy and capture is Capture.NOW:
            capture = _capture(entry, description, defer=defer)
            if capture is Capture.DEFERRED and source.memory not in description.deferrable:
                promised = True
        chain, is_auto = 0, False
        if table.chooses:
            # A tensor of no dimensions is a number, such as the count of an optimizer's steps.
            single = entry.kind is Kind.VALUE or not entry.spec.shape
            chain = table.number(entry, exact=single or entry.path in exact)
            is_auto = table.is_auto(chain)
        objects.append(PlannedObject(entry, capture, chain, _version(entry), is_auto))
    masters: Mapping[int, Sequence[int]] = {}
    if derive:
        own_paths = description.own_paths
        masters = find_masters(
            objects,
            is_exact=table.is_exact,
            counts=lambda entry: place is None or _is_alike(entry, own_paths),
        )
    # Ranks share the chunks of what they hold alike, so all have to cut alike.
    even = share or place is not None
    plan = plan_save(
        objects, chunk_bytes=config.chunk_bytes, masters=masters, even_cuts=even, known=known
    )
    # A part lists raw frames of another save, as shared ones or as bases, only with equal blocks,
    # and what fits the pieces changes when the first step of an optimizer makes its state.
    refers = share or any(chain is not None and chain.needs_base for chain in table.chains)
    blocks = LARGEST_BLOCK_BYTES if refers else plan.fitting_block_bytes()
    return SaveRequest(
        step=step,
        generation=generation,
        mode=mode,
        entries=entries,
        plan=plan,
        chains=table.chains,
        auto=table.auto,
        providers=description.providers_used,
        objects=count,
        staging_bytes=_staging_need(plan, blocking=mode == "blocking"),
        copied_from=min((d for d in devices if d.startswith("cuda")), default=None),
        promised=promised,
        share=share,
        block_bytes=config.block_bytes or blocks,
        grace_s=config.grace_s,
        io_timeout_s=config.io_timeout_s,
        rank=0 if place is None else place.rank,
        world_size=1 if place is None else place.world_size,
        own_paths=description.own_paths,
        shared=description.shared,
    )


def _without_foreign_rounding(
    entries: Sequence[StateObject | Node], table: ChainTable
) -> tuple[Sequence[StateObject | Node], Collection[ObjectPath]]:
    """Keep a lossy rule for one name of a tied object from rounding it under its other names.

    Returns:
        The entries, where an object whose owner has a lossy chain, and another name has none, is
        owned by that name; and the owners that have to go without their lossy codecs, since other
        names have other ones. Ranks that tie the same memory otherwise contradict the new owner,
        and the save fails: they would have rounded their part of it.
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


def _is_alike(entry: StateObject, own_paths: Sequence[ObjectPath]) -> bool:
    """Return whether all ranks of one structure hold an object whole, and alike."""
    return entry.replica is None and not is_below(entry.path, own_paths)


def staging_for(
    request: SaveRequest, reusable: Staging | None, config: CheckpointerConfig
) -> Staging:
    """Return staging memory within the budget; `reusable`, if given, is that of earlier saves."""
    budget = config.staging_bytes
    if budget is None:
        # What earlier saves left mapped may fit badly where tensors have moved within a page. A
        # block too few, and training would wait for the store.
        spare = 2 * config.chunk_bytes
        budget = default_budget(request.staging_bytes + spare, local_ranks())
    # With room for one chunk only, copying and writing would take turns.
    budget = max(budget, 2 * config.chunk_bytes)
    staging = reusable or Staging(budget)
    staging.budget_bytes = max(staging.budget_bytes, budget)
    largest = min(request.staging_bytes, config.chunk_bytes)
    staging.expect(request.staging_bytes, largest_bytes=largest, copied_from=request.copied_from)
    return staging


def _plain_scalar(value: object) -> object:
    """Return a numpy scalar, or a tensor or array without dimensions, as a plain value."""
    # Recognized by their methods, so that a commit record does not import torch.
    item = getattr(value, "item", None)
    if not callable(item) or getattr(value, "ndim", None) != 0:
        raise TypeError(type(value).__name__)
    try:
        found: object = item()
    except Exception as error:  # a tensor on meta has no value
        raise TypeError(str(error)) from error
    # `item` of a numpy.longdouble returns another numpy.longdouble.
    return float(found) if type(found) is type(value) else found  # type: ignore[arg-type]


def _all_keys_are_text(value: object) -> bool:
    todo = [value]
    while todo:
        here = todo.pop()
        if isinstance(here, dict):
            if not all(isinstance(key, str) for key in here):
                return False
            todo += here.values()
        elif isinstance(here, list | tuple):
            todo += here
    return True


def _foreign(value: object, place: str) -> str | None:
    """Describe the first key or value that cannot be stored, and what to pass instead."""
    if value is None or isinstance(value, str | int | float):
        return None
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return (
                    f"{place} has the key {show_value(key)}: keys of metadata are text, so pass "
                    "str() of it"
                )
        items = [(f"{place}[{show_value(key)}]", child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{place}[{number}]", child) for number, child in enumerate(value)]
    else:
        kind = type(value)
        subject = f"{place} is a {kind.__module__}.{kind.__qualname__}".replace(" builtins.", " ")
        if callable(getattr(value, "tolist", None)) and getattr(value, "ndim", None):
            return f"{subject} of several elements: pass .tolist()"
        with contextlib.suppress(TypeError):
            if _foreign(_plain_scalar(value), place) is None:
                return None
        return f"{subject}: metadata is stored as JSON; pass plain dicts, lists, text, numbers"
    return next(filter(None, (_foreign(child, where) for where, child in items)), None)


def _step_exists(step: int, steps: Sequence[int], url: str) -> StepExistsError:
    problem = "exists" if step in steps else f"is before the latest step {steps[-1]}"
    older = [s for s in steps if s < step]
    way = (
        f"call rewind({older[-1]}), which forgets all later steps,"
        if older
        else f"delete step {steps[0]} and all later ones (no earlier step to rewind to)"
    )
    return StepExistsError(
        f"step {step} on {url} {problem}. Call resume(state) to continue. Pass overwrite=True "
        f"(--overwrite) to save it anyway, or first {way} to continue from there. If another "
        "training saves here, give each its own root."
    )


def _check_lossy(rule: Rule, chain: CodecChain | None) -> None:
    """Refuse a lossy codec for objects that the rule does not name: it would round whatever comes.

    Raises:
        ConfigError: A pattern takes everything that stands at some depth.
    """
    if chain is None or chain.lossless:
        return
    lossy = next(codec.name for codec in chain.codecs if not codec.lossless)
    for pattern in rule.match:
        if is_catch_all(pattern):
            msg = (
                f"{rule.shown}: codec {lossy} is lossy, and the pattern {pattern!r} names nothing: "
                "name what may be rounded, as in 'optimizer/**/exp_avg_sq'"
            )
            raise ConfigError(msg)


def _warn_of_useless_deltas(
    config: CheckpointerConfig, chains: Sequence[CodecChain | None]
) -> None:
    """Warn of options for chains of deltas that no rule makes.

    No error: a file may be shared by jobs, or its rules be off for a while, and a run that is only
    read needs neither.
    """
    if "deltas" in config.model_fields_set and not any(c and c.needs_base for c in chains):
        log.warning(
            "the option deltas has no effect: no rule has the codec delta, so every checkpoint is "
            'stored without a base. Begin the codecs of a rule with it, as in ["delta", '
            '"floatsplit"], or leave deltas out'
        )


def _warn_of_bare_deltas(rule: Rule, chain: CodecChain) -> None:
    """Warn of a chain of `delta` alone, which couples checkpoints and makes none of them smaller.

    Only of ours: another codec that needs a base may compress what it makes.
    """
    if [codec.name for codec in chain.codecs] == ["delta"]:
        log.warning(
            "%s: no codec follows delta, and differences take as much room as the data "
            "itself: put a codec behind it that makes them smaller, as in "
            '["delta", "floatsplit"]',
            rule.shown,
        )


def _check_codecs(chain: CodecChain) -> None:
    """Refuse a codec whose name or version a reader would refuse in the manifest."""
    for codec in chain.codecs:
        if len(codec.name) > MAX_CODEC_NAME_CHARS or not 0 <= codec.version <= MAX_INT:
            msg = (
                f"codec {codec.name!r} of version {codec.version} cannot be recorded: a name has "
                f"at most {MAX_CODEC_NAME_CHARS} characters, a version is at least 0"
            )
            raise PluginError(msg)


def _is_whole(entry: StateObject) -> bool:
    return entry.source.nbytes == entry.spec.nbytes and len(entry.regions) <= 1


def _refuse_piece(entry: StateObject) -> NoReturn:
    msg = (
        f"{show_path(entry.path)} is a piece of a tensor of shape {list(entry.spec.shape)}, and "
        "this process saves alone: save with all ranks that hold the others, or the whole tensor"
    )
    raise UnsupportedStateError(msg)


def _version(entry: StateObject) -> int | None:
    try:
        return entry.source.version()
    except PenstockError:
        raise
    except Exception as error:
        msg = f"{show_path(entry.path)}: its source cannot say its version: {said(error)}"
        raise PluginError(msg) from error


def _capture(entry: StateObject, description: Description, *, defer: Selection | None) -> Capture:
    """Return when a lazy save captures a tensor."""
    memory = entry.source.memory
    if memory is not None:
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
            continue  # lent to the writer, not copied
        total += align_up(chunk.phase + chunk.length, PAGE_BYTES)
    return total


def _steady(source: ByteSource) -> bool:
    try:
        return source.steady()
    except Exception:  # noqa: BLE001 - the capture calls it again, and names the source
        return False
