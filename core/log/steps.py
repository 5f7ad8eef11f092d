"""Notes the steps of optimizers as they happen.

The global *post*-step hook sees the gradients that the step has used. A pre-step hook would miss
changes that the optimizer's own hooks, a closure, or a fused step make to them.

Tested in `tests/integration/log/test_ends.py`.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet, ref

from penstock.core.foreign import said
from penstock.core.log.grads import NotLoggedError, copy_grads, local_of
from penstock.core.save.fence import address_of
from penstock.core.save.hooks import after_steps, before_steps

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    import torch
    from torch.optim import Optimizer

    from penstock.core.abc import Replayer
    from penstock.core.abc.byte_sources import MemoryKey
    from penstock.core.log.grads import Cut, GradCopies
    from penstock.core.log.proof import Proof

    Marks: TypeAlias = list[tuple[int, int, int]]

_NO_OPTIONS = frozenset({"params", "param_names"})
_watches: WeakSet[StepWatch] = WeakSet()

_KEY = "penstock"  # of our hooks among an optimizer's own
_PROOFS = 2  # proofs of each optimizer: its first step may create the state that its second uses


@dataclass(slots=True)
class LoggedStep:
    """One step of an optimizer.

    Attributes:
        key: The id of the optimizer.
        optimizer: The optimizer.
        replayer: Takes steps of this optimizer again.
        captured: The values that the replayer captured before and after the step.
        options: The options of each group, without its parameters.
        grads: The copied gradients; None: not copied yet.
        uncopied: The gradient of each parameter of each group, and the version of each gradient.
            The gradients are weak references: a run that never logs must not pay with memory or
            time.
        digest: The digest of the optimizer's parameters and state after the step; empty: not taken.
        proof: Takes the step again after it is encoded; None: no proof was begun.
    """

    key: int
    optimizer: Any
    replayer: Replayer
    captured: Mapping[str, Any]
    options: Sequence[Mapping[str, Any]]
    grads: GradCopies | None = None
    uncopied: tuple[Sequence[Sequence[Any]], Sequence[int]] = (), ()
    digest: str = ""
    proof: Proof | None = None


@dataclass(eq=False)
class StepWatch:
    """Notes the steps since the last entry, and detects changes of parameters between steps.

    Attributes:
        find: Returns the replayer of an optimizer; None if it has none.
        prove: Begins a proof before a step.
        cut_of: Returns the whole shape of a DTensor and this rank's regions.
        idle: Waits until the copied gradients of earlier steps are no longer used.
        steps: The steps, in order.
        strangers: The optimizers that stepped but were not in the state, by id.
        trouble: Why these steps cannot be logged; empty if they can be.
        keeps: Whether to copy gradients. False until the first call of `log`, or until a restore
            has replayed a log: a run that never logs must not pay with time and memory.
    """

    find: Callable[[Any], Replayer | None]
    prove: Callable[[Any, Replayer, Mapping[str, Any]], Proof | None]
    cut_of: Callable[[Any], Cut]
    idle: Callable[[], None]
    steps: list[LoggedStep] = field(default_factory=list)
    strangers: dict[int, Callable[[], Optimizer | None]] = field(default_factory=dict)
    trouble: str = ""
    keeps: bool = False
    # The result of `_marks` after the last step of each optimizer of the state, by id.
    _after: dict[int, tuple[Callable[[], Optimizer | None], Marks]] = field(default_factory=dict)
    _left: defaultdict[int, int] = field(default_factory=lambda: defaultdict(lambda: _PROOFS))
    # The attributes of each optimizer at the start. A process that replays starts with the same.
    _attributes: dict[int, tuple[Callable[[], Optimizer | None], Mapping[str, Any]]] = field(
        default_factory=dict
    )
    # For each step that is running: its proof, and the captured values and generator states from
    # before the step.
    _proofs: dict[int, Proof | None] = field(default_factory=dict)
    _begun: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    _random: dict[int, Sequence[bytes]] = field(default_factory=dict)
    _kept: defaultdict[int, dict[str, torch.Tensor]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    # First byte and end of each tensor that the optimizers change, by the address of its storage.
    _ranges: defaultdict[int, set[tuple[int, int]]] | None = None

    def start(self, optimizers: Iterable[Optimizer]) -> None:
        """From now on, watch all steps of this process, and changes to these optimizers."""
        self.clear()
        self._after, self._ranges = {}, None
        for optimizer in optimizers:
            self._mark(optimizer)
            if self._attributes.get(id(optimizer), (lambda: None, {}))[0]() is not optimizer:
                self._attributes[id(optimizer)] = ref(optimizer), attributes_of(optimizer)
        before_steps(_before_step)
        after_steps(_after_step)
        _watches.add(self)

    def stop(self) -> None:
        """Stop watching steps, and forget those noted."""
        _watches.discard(self)
        self.clear()

    def pause(self, reason: str) -> None:
        """Until `start`, forget all steps and copy no gradients."""
        self.clear()
        self.trouble = reason
        self._kept.clear()  # a backend may still read them after a write that timed out

    def check(self) -> None:
        """Check that no optimizer of the state has changed since its last step.

        Copies the gradients of steps that were noted without a copy.

        Raises:
            NotLoggedError: The steps cannot be logged.
        """
        for step in self.steps:
            if step.grads is None:
                self._copy_late(step)
        for known, _ in self._after.values():
            if (optimizer := known()) is not None:
                self.compare(optimizer)
        for step in () if self.trouble else self.steps:
            if step.proof is not None and not step.proof.still_holds(step.optimizer):
                kind = type(step.optimizer).__name__
                self.trouble = f"a parameter of {kind} was changed through Tensor.data after a step"
        if self.trouble:
            raise NotLoggedError(self.trouble)

    def claimed(self) -> set[int]:
        """Return the addresses of the memory that the optimizers change, as of their last step."""
        return {address for _, marks in self._after.values() for *_, address in marks} - {0}

    def covers(self, memory: MemoryKey, itemsize: int) -> bool:
        """Return whether all of this memory belongs to one tensor that an optimizer changes."""
        start = memory.offset
        stop = start + itemsize + _reach(memory.shape, memory.strides)
        for known in (self._ranges, None):
            if known is None:  # not yet, or steps have created state since
                self._ranges = defaultdict(set)
                for optimizer in filter(None, (known() for known, _ in self._after.values())):
                    for tensor in map(local_of, tensors_of(optimizer)):
                        address, size = address_of(tensor), tensor.itemsize
                        if address and tensor.numel():
                            first = tensor.data_ptr() - address
                            reach = size * _reach(tensor.shape, tensor.stride())
                            self._ranges[address].add((first, first + size + reach))
            assert self._ranges is not None
            if any(a <= start and stop <= b for a, b in self._ranges[memory.storage]):
                return True
        return False

    def clear(self) -> None:
        """Forget the noted steps."""
        self.steps, self.strangers, self.trouble = [], {}, ""

    def before(self, optimizer: Optimizer, *, has_closure: bool = False) -> None:
        """Check that an optimizer has not changed since its last step, and prepare to note a step.

        Captures what the step itself may change, and begins a proof if one is due.

        Args:
            optimizer: The optimizer.
            has_closure: Whether the step evaluates a closure, which may draw random numbers.
        """
        self.compare(optimizer)
        if self.trouble or not self.knows(optimizer):
            return
        replayer, key = self.find(optimizer), id(optimizer)
        if replayer is None:
            return
        self._begun[key] = replayer.capture_before(optimizer)
        # torch's own optimizers draw no random numbers. Checking them would only blame the step for
        # a draw by another thread.
        if not has_closure and not type(optimizer).__module__.startswith("torch.optim."):
            self._random[key] = _random_states(optimizer)
        if self.keeps and self._left[key]:
            self._left[key] -= 1
            self._proofs[key] = self.prove(optimizer, replayer, self._attributes[key][1])

    def compare(self, optimizer: Optimizer) -> None:
        """Check that an optimizer has not changed since its last step."""
        # In a run that never logs, this is set after its second step, so that nothing is compared.
        if self.trouble:
            return
        if self.knows(optimizer) and self._after[id(optimizer)][1] != _marks(optimizer):
            kind = type(optimizer).__name__
            if self.find(optimizer) is None:  # a wrapper: the step of what it wraps changed it
                self.trouble = _unknown(optimizer)
            else:
                self.trouble = f"a parameter or the state of {kind} was changed outside a step"

    def after(self, optimizer: Optimizer) -> None:
        """Note a step that was just taken."""
        proof = self._proofs.pop(id(optimizer), None)
        random = self._random.pop(id(optimizer), None)
        if not self.knows(optimizer):
            self.strangers[id(optimizer)] = (lambda: optimizer) if self.keeps else ref(optimizer)
            return
        self.trouble = self.trouble or self._obstacle(optimizer)
        replayer = self.find(optimizer)
        if self.trouble or replayer is None:
            self.steps = []
            return
        if random is not None and random != _random_states(optimizer):
            # A replay would draw other numbers, and a proof would advance training's generator.
            kind = type(optimizer).__name__
            self.trouble = f"{kind} draws from the global generator of torch in its steps"
            self.steps = []
            return
        options = options_of(optimizer)
        captured = {**self._begun.pop(id(optimizer), {}), **replayer.capture(optimizer)}
        step = LoggedStep(id(optimizer), optimizer, replayer, captured, options)
        grads = [[p.grad for p in group["params"]] for group in optimizer.param_groups]
        if self.keeps:
            try:
                self._copy(step, grads)
            except NotLoggedError as error:
                self.trouble = str(error)
                return
        else:
            present = [grad for group in grads for grad in group if grad is not None]
            references = [[g if g is None else ref(g) for g in group] for group in grads]
            step.optimizer = ref(optimizer)
            step.uncopied = references, [*map(version_of, present)]
        if proof is not None:
            proof.finish(optimizer)
            step.proof = proof
        self.steps.append(step)
        self._mark(optimizer)

    def _copy(self, step: LoggedStep, grads: Sequence[Sequence[Any]]) -> None:
        self.idle()
        step.grads = copy_grads(grads, self.cut_of, self._kept[step.key])

    def _copy_late(self, step: LoggedStep) -> None:
        """Copy the gradients of a step that was taken before the first call of `log`."""
        references, versions = step.uncopied
        grads = [[g if g is None else g() for g in group] for group in references]
        present = [grad for group in grads for grad in group if grad is not None]
        step.optimizer = step.optimizer()
        if step.optimizer is None or len(present) != len(versions):
            msg = (
                "this is the first call of log, and the gradients are gone: the first call must "
                "come before zero_grad"
            )
            raise NotLoggedError(msg)
        if [*map(version_of, present)] != versions:
            msg = (
                "this is the first call of log, and a gradient was changed after the step: the "
                "first call must come before zero_grad"
            )
            raise NotLoggedError(msg)
        self._copy(step, grads)

    @contextmanager
    def noting_failures(self, optimizer: Optimizer) -> Iterator[None]:
        """If a replayer fails, end the log instead of the training."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - recorded: training continues
            self.trouble = f"the replayer of {type(optimizer).__name__} failed: {said(error)}"
            self.steps = []

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether changes to this optimizer are watched."""
        known = self._after.get(id(optimizer))
        return known is not None and known[0]() is optimizer  # an id may be used again

    def _mark(self, optimizer: Optimizer) -> None:
        self._after[id(optimizer)] = ref(optimizer), _marks(optimizer)

    def _obstacle(self, optimizer: Optimizer) -> str:
        """Return why the step that was just taken cannot be logged; empty if it can."""
        kind = type(optimizer).__name__
        if any(step.key == id(optimizer) for step in self.steps):
            return f"{kind} stepped twice without a call of log"
        replayer = self.find(optimizer)
        if replayer is None:
            return _unknown(optimizer)
        return replayer.obstacle(optimizer)


def _unknown(optimizer: Optimizer) -> str:
    kind = type(optimizer).__name__
    return f"steps of {kind} cannot be replayed: no installed replayer handles it"


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return copies of the options of each group, without its parameters.

    The originals do not suffice: a scheduler may change a tensor in place before it is stored.
    """
    return [
        copied_options({k: v for k, v in group.items() if k not in _NO_OPTIONS})
        for group in optimizer.param_groups
    ]


def with_groups(
    optimizer: Optimizer, groups: list[dict[str, Any]], attributes: Mapping[str, Any]
) -> Optimizer:
    """Return an optimizer of the same class with other groups and attributes.

    `copy.copy` would not do: it leaves out attributes.
    """
    made: Any = object.__new__(type(optimizer))
    vars(made).update(attributes)
    made.param_groups = groups
    return cast("Optimizer", made)


def copied_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with their tensors copied, since schedulers and steps change them in place."""
    return {key: detached(value, {}) for key, value in options.items()}


def set_options(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Set the options of each group. Changes tensors in place, since schedulers may hold them."""
    import torch  # noqa: PLC0415 - as below

    for group, stored in zip(optimizer.param_groups, options, strict=True):
        for key in group.keys() - stored.keys() - _NO_OPTIONS:
            del group[key]
        for key, value in stored.items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def detached(value: Any, memo: Mapping[int, Any]) -> Any:
    """Return a value with copies of all that a step may change in place.

    Other threads can then read the copy while training continues.

    Args:
        value: An attribute or an option of an optimizer.
        memo: Replacements for objects, by the id of the object.
    """
    import torch  # noqa: PLC0415 - torch is loaded only to log

    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Tensor):
        return _cloned(value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if type(value) is dict:
        return {key: detached(item, memo) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(detached(item, memo) for item in value)
    return value


def _cloned(tensor: Any) -> Any:
    """Return a copy of a tensor. Copies quantized tensors by parts, as they may lack `clone`."""
    if hasattr(tensor, "_local_tensor") or not (names := _parts_of(tensor)):
        return tensor.detach().clone()
    parts = {name: _cloned(getattr(tensor, name)) for name in names}
    facts = tensor.__tensor_flatten__()[1]
    kind: Any = type(tensor)
    return kind.__tensor_unflatten__(parts, facts, tensor.size(), tensor.stride())


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return copies of an optimizer's attributes, without its groups and state."""
    own = {key: v for key, v in vars(optimizer).items() if key not in {"state", "param_groups"}}
    copies: dict[str, Any] = detached(own, {id(p): p for p in parameters_of(optimizer)})
    return copies


def storages_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the addresses of the memory that these optimizers change; skips empty tensors."""
    tensors = (tensor for optimizer in optimizers for tensor in tensors_of(optimizer))
    return {*map(address_of, map(local_of, tensors))} - {0}


def has_only(value: object, parameters: Collection[int]) -> bool:
    """Return whether a value is a module whose only state is parameters with these ids."""
    import torch  # noqa: PLC0415 - as below

    if not isinstance(value, torch.nn.Module):
        return False
    plain = torch.nn.Module
    # Checks each module: `parameters` and `buffers` would each walk all modules and build names.
    return all(
        all(p is None or id(p) in parameters for p in module._parameters.values())  # noqa: SLF001
        and not any(buffer is not None for buffer in module._buffers.values())  # noqa: SLF001
        and type(module).get_extra_state is plain.get_extra_state
        and type(module).state_dict is plain.state_dict
        and type(module)._save_to_state_dict is plain._save_to_state_dict  # noqa: SLF001
        and not module._state_dict_hooks  # noqa: SLF001 - they may add anything
        and not module._state_dict_pre_hooks  # noqa: SLF001
        for module in value.modules()
    )


def version_of(tensor: Any) -> int:
    """Return the version of a tensor, which rises with each change in place."""
    return int(tensor._version)  # noqa: SLF001 - torch has no public name for it


def _random_states(optimizer: Optimizer) -> list[bytes]:
    """Return the states of the global generators that a step may draw from."""
    import torch  # noqa: PLC0415 - as above

    devices = {p.device for p in parameters_of(optimizer)}
    own = [torch.cuda.default_generators[d.index] for d in devices if d.type == "cuda"]
    generators = (torch.default_generator, *own)
    return [generator.get_state().numpy().tobytes() for generator in generators]


def _marks(optimizer: Optimizer) -> Marks:
    """Return marks that differ after any change of groups, parameters or state that torch sees.

    Changes in place through `Tensor.data` leave no mark; digests find them.
    """
    values: list[Any] = []
    groups = [(0, len(group["params"]), 0) for group in optimizer.param_groups]
    tensors = [
        (id(tensor), version_of(tensor), address_of(local_of(tensor)))
        for tensor in tensors_of(optimizer, ordered=False, values=values)
    ]
    return [*groups, *tensors, (0, hash(repr(values)), 0)]


def storages_of_step(optimizer: Optimizer, parameter: torch.Tensor) -> set[int]:
    """Return the addresses of the memory of one parameter and its state."""
    found: list[torch.Tensor] = []
    _gather([parameter, optimizer.state.get(parameter, {})], found)
    return {*map(address_of, map(local_of, found))} - {0}


def tensors_of(
    optimizer: Optimizer, *, ordered: bool = True, values: list[Any] | None = None
) -> list[torch.Tensor]:
    """Return each parameter with the tensors of its state, then state that no parameter owns.

    Args:
        optimizer: The optimizer.
        ordered: Whether to sort state by its keys. Otherwise it keeps the order of insertion, which
            is faster.
        values: Gets the state that is neither a tensor nor a container.
    """
    state: dict[Any, Any] = optimizer.state
    found: list[torch.Tensor] = []
    for parameter in parameters_of(optimizer):
        _gather((parameter, state.get(parameter, ())), found, values, ordered=ordered)
    shared = {key: value for key, value in state.items() if isinstance(key, str)}
    _gather((shared,), found, values, ordered=ordered)
    return found


def _gather(
    items: Iterable[Any],
    found: list[torch.Tensor],
    values: list[Any] | None = None,
    *,
    ordered: bool = True,
) -> None:
    # Not a generator, which is slower: this runs three times in each step, for every tensor.
    for value in items:
        if hasattr(value, "untyped_storage"):
            if hasattr(value, "_local_tensor") or not hasattr(value, "__tensor_flatten__"):
                found.append(value)
            else:
                _gather([getattr(value, name) for name in _parts_of(value)], found)
        elif isinstance(value, dict):
            inner = [value[key] for key in sorted(value, key=str)] if ordered else value.values()
            _gather(inner, found, values, ordered=ordered)
        elif isinstance(value, (list, tuple)):
            _gather(value, found, values, ordered=ordered)
        elif values is not None and value is not None:
            values.append(value)


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the distance from the first to the last element, in the unit of the strides."""
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _parts_of(tensor: Any) -> Sequence[str]:
    """Return the names of the attributes in which a quantized tensor keeps its data."""
    parts: Sequence[str] = (
        tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    )
    return parts


def _before_step(optimizer: Optimizer, args: Sequence[object], kwargs: object) -> None:
    for watch in list(_watches):
        with watch.noting_failures(optimizer):
            watch.before(optimizer, has_closure=len(args) > 1 or bool(kwargs))
    # The optimizer's own hooks run after this one. What they change would be missing in a replay:
    # so steps are noted before its post-hooks, and compared again after its pre-hooks.
    pre, post = _own_hooks(optimizer)
    if _watches and pre:
        pre[_KEY] = _compare_again
    if _watches and post:
        post[_KEY] = _note_step
        post.move_to_end(_KEY, last=False)


def _after_step(optimizer: Optimizer, *_: object) -> None:
    pre, post = _own_hooks(optimizer)
    pre.pop(_KEY, None)
    if post.pop(_KEY, None) is None:
        _note_step(optimizer)


def _own_hooks(optimizer: Any) -> tuple[OrderedDict[Any, Any], OrderedDict[Any, Any]]:
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001


def _compare_again(optimizer: Optimizer, *_: object) -> None:
    for watch in list(_watches):
        with watch.noting_failures(optimizer):
            watch.compare(optimizer)


def _note_step(optimizer: Optimizer, *_: object) -> None:
    for watch in list(_watches):
        with watch.noting_failures(optimizer):
            watch.after(optimizer)
