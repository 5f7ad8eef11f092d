"""Checks of providers: declarations, descriptions, live memory, and restores of single objects."""

from __future__ import annotations

import sys
from array import array
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from penstock.core.abc import Lines, MemoryKey, Node, StateObject, StateProvider
from penstock.core.abc.provider import describes_together, places_together
from penstock.core.errors import UnsupportedStateError
from penstock.core.tree.describe import describe_tree
from penstock.core.tree.place import Placing
from penstock.core.types import Kind, show_path
from penstock.testing.expectations import expect_own_api_version, expect_signatures, finding
from penstock.testing.stored import PIECE_BYTES, read_piece, read_source, store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.core.abc import ByteSource, Placement
    from penstock.core.tree.containers import Providers
    from penstock.core.tree.select import Selection
    from penstock.core.types import ObjectPath
    from penstock.testing.stored import Stored

_CONTAINERS = frozenset({"dict", "list", "tuple"})

_MOST = 8  # the most objects of one value to check, spread over all its objects

DTYPES_THAT_NUMPY_LACKS = ("bfloat16", "float8_e4m3fn")
_MOST_VISITED = 100_000  # objects: a value may refer to half the process
_OPAQUE = (type, ModuleType, FunctionType, str, bytes, int, float)
_BUFFERS = (bytearray, array, memoryview)


def claims_are_priorities(value: object, providers: Providers) -> None:
    """Check the claims for the type of the value, and for types that no provider can know."""
    for kind in (type(value), type("Stranger", (), {}), object):
        for provider in providers.all():
            claim: object = provider.claims(kind)
            # Not `isinstance`: a provider that returns True means "yes", but gets priority 1.
            assert claim is None or type(claim) is int, (
                f"claims({kind.__name__}) of provider {provider.name!r} returned {claim!r}, which "
                f"is of type {type(claim).__name__}: return an int, the priority, or None for "
                "a foreign type"
            )


def declarations_are_sane(value: object, providers: Providers) -> None:
    """Check the provider's name, versions and forms."""
    provider = providers.for_type(type(value))
    if provider is None:
        return  # plain data: the value provider takes it without a claim
    expect_own_api_version(provider)
    expect_signatures(provider, StateProvider)
    assert provider.name, "a provider needs a name"
    assert provider.version >= 1, "versions count from 1"
    assert isinstance(provider.forms, tuple), "forms must be a tuple of names"
    assert len(set(provider.forms)) == len(provider.forms), "a form is declared twice"
    for other in providers.all():
        shared = set(provider.forms) & set(other.forms) if other is not provider else ()
        assert not shared, f"{other.name} declares {shared} too: a form must belong to one provider"
    for kind in (type("Stranger", (), {}), object):
        assert provider.claims(kind) is None, (
            f"claims {kind.__name__}, an unknown type: return None"
        )
    _names_its_memory(value, provider)


def _names_its_memory(value: object, provider: StateProvider) -> None:
    """Check that the optional methods return what core can use."""
    for name, tensor in provider.parameters(value):
        assert isinstance(name, str), f"parameters gives the name {name!r}: it must be a str"
        assert tensor is not None, f"parameters gives no tensor for {name!r}"
    for key in provider.claimed_memory(value):
        assert isinstance(key, MemoryKey), f"claimed_memory gives {key!r}: give a MemoryKey"
    places: Iterable[object] = provider.unsteady_memory(value)
    for place in places:
        types = tuple(map(type, place)) if isinstance(place, tuple) else ()
        assert types == (str, int), f"unsteady_memory gives {place!r}: give (device, storage)"
    for name, _ in provider.left_out(value):
        assert isinstance(name, str), f"left_out gives the name {name!r}: it must be a str"


def description_is_whole(stored: Stored) -> None:
    """Check that entries are below `part`, can be rebuilt, and return bytes in any pieces."""
    seen: set[ObjectPath] = set()
    assert stored.description.entries, "nothing is described"
    for entry in stored.description.entries:
        shown = show_path(entry.path)
        assert entry.path[:1] == ("part",), f"{shown} is outside its part"
        if entry.form not in _CONTAINERS:
            stored.providers.for_form(entry.form)  # raises PluginError if none can rebuild it
        if isinstance(entry, Node):
            assert not any(p[: len(entry.path)] == entry.path for p in seen), (
                f"the node {shown} comes after its children"
            )
        else:
            assert entry.source.nbytes == entry.spec.nbytes, (
                f"{shown}: source and spec sizes differ"
            )
            check_source(entry.source, entry.spec.itemsize)
        seen.add(entry.path)


def description_repeats(stored: Stored, state: object) -> None:
    """Check that describing changes nothing, and repeats its result."""
    again = store(state, providers=stored.providers)
    assert again.tree.objects == stored.tree.objects, "a second description differs"
    assert again.tree.nodes == stored.tree.nodes, "a second description has other nodes"
    assert again.data == stored.data, "describing changes the state"


def values_together_are_as_each(make: Callable[[], object], providers: Providers) -> None:
    """Check that `describe_all` of several values equals `describe` of each value."""
    provider = providers.for_type(type(make()))
    if provider is None or not describes_together(type(provider)):
        return
    values = {"0": make(), "1": make(), "2": make()}
    # A list that holds an object is of another type, so each child is described separately.
    each = store({"part": {**values, "other": [make()]}}, providers=providers)
    together = store({"part": values}, providers=providers)
    count = len(together.tree.objects)
    assert each.tree.objects[:count] == together.tree.objects, "describe_all gives other objects"
    assert each.tree.nodes[: len(together.tree.nodes)] == together.tree.nodes, (
        "describe_all gives other nodes"
    )
    assert {path: each.data.get(path) for path in together.data} == together.data, (
        "describe_all gives other bytes"
    )


def targets_together_are_as_each(make: Callable[[], object], providers: Providers) -> None:
    """Check that `place_all` of several values plans the same as `place` of each value."""
    provider = providers.for_type(type(make()))
    if provider is None or not places_together(type(provider)):
        return
    values = {"0": make(), "1": make(), "2": make()}
    stored = store({"part": values}, providers=providers)
    for include in (None, "part/1"):
        # A list child has another type, so each child is planned separately.
        each = stored.plan({"part": {**values, "other": [make()]}}, include)
        together = stored.plan({"part": values}, include)
        assert _facts(together) == _facts(each), "place_all plans other targets"


def _facts(placement: Placement) -> list[object]:
    return [(t.path, t.spec, t.regions, t.sink.nbytes, t.sink.memory) for t in placement.targets]


def check_source(source: ByteSource, itemsize: int) -> None:
    """Check that a source gives the same bytes whole, in pieces, as a view and in sampled lines.

    Also checks that the source keeps no buffer.

    Raises:
        AssertionError: The source breaks a promise.
    """
    whole = read_source(source)
    view = source.view()
    assert (view is None) == (source.address is None), (
        "view and address go together: give both, or None for both"
    )
    if view is not None:
        assert view.contiguous, "the view must be flat"
        assert bytes(view) == whole, "view and copy_out differ"
    for items in (1, 3, 7):
        step = items * max(itemsize, 1)
        for start in range(0, len(whole), max(step, len(whole) // 16 // step * step)):
            length = min(step, len(whole) - start)
            piece = read_piece(source, start, length)
            assert piece == whole[start : start + step], f"piece at {start} differs"
    items = len(whole) // max(itemsize, 1)
    for lines in (Lines(len(whole), 0, 0), Lines(itemsize, (items - 1) // 2 * itemsize, 2)):
        if lines.steps < items:
            starts = lines.starts(len(whole))
            expected = b"".join(whole[start : start + lines.width] for start in starts)
            sampled = type(source).sample([source, source], [lines, lines])()
            assert list(sampled) == [expected, expected], f"{lines} of sample differ"


def each_object_is_restored_alone(stored: Stored, make: Callable[[], object]) -> None:
    """Check that a selected object is restored alone, or that a problem explains why not.

    Args:
        stored: The checkpoint of a value.
        make: Returns another value, with another state.
    """
    for path in _some(stored):
        _restored_alone(stored, {"part": make()}, path)
        _loaded_alone(stored, path)


def each_object_that_is_not_there_is_missing(
    stored: Stored, make: Callable[[], object], optional: Selection
) -> None:
    """Check that an object that is not stored is reported as missing, or as a problem.

    The check also passes if the restored value lacks the object, as when an optimizer drops state
    that the checkpoint lacks.

    Args:
        stored: The checkpoint of a value.
        make: Returns another value of the same structure.
        optional: The objects that a checkpoint may lack without an error.
    """
    for path in _some(stored) or list(stored.data):
        if optional.selects(path):
            continue
        shown, state, shortened = show_path(path), {"part": make()}, _without(stored, path)
        with finding(f"planning a restore from a checkpoint without {shown}"):
            placement = shortened.plan(state)
        if placement.problems or path in placement.missing:
            continue
        with finding(f"a restore from a checkpoint without {shown}, not reported as missing"):
            shortened.complete(placement, piece_bytes=PIECE_BYTES)
            after = store(state, providers=stored.providers).data
        assert path not in after, (
            f"a checkpoint without {shown} is not noticed: put each path that `place` does not "
            "find into `missing`, and add the `missing` of each result of `context.place`"
        )


def _without(stored: Stored, path: ObjectPath) -> Stored:
    """Return the checkpoint without an object and the objects tied to it."""
    tree = stored.tree
    gone = {path, *(tied for tied, target in tree.aliases.items() if target == path)}
    return replace(
        stored,
        tree=replace(
            tree,
            objects=[o for o in tree.objects if o.path not in gone],
            values={p: v for p, v in tree.values.items() if p not in gone},
            aliases={p: q for p, q in tree.aliases.items() if p not in gone},
        ),
        data={p: d for p, d in stored.data.items() if p not in gone},
    )


def _some(stored: Stored) -> list[ObjectPath]:
    paths = list(stored.data)
    return paths[:: -(-len(paths) // _MOST)] if len(paths) > 1 else []


def _restored_alone(stored: Stored, target: dict[str, Any], path: ObjectPath) -> None:
    shown = show_path(path)
    providers = stored.providers
    before = store(target, providers=providers).data
    with finding(f"planning to restore {shown} alone"):
        placing = Placing(providers, stored.tree, lambda p: p == path, allow_pickle=False)
        placement = placing.place_tree(target)
    if placement.problems:
        return  # the provider restores the value whole or not at all
    _only(placement.missing, path, "reports {other} as missing")
    assert not placement.missing, f"{shown} is stored and selected, but reported as missing"
    _only([t.path for t in placement.targets], path, "has a target for {other}")
    _only(placement.values, path, "uses {other}")
    with finding(f"restoring {shown} alone (an unselected child may have no `finish`)"):
        stored.complete(placement, piece_bytes=PIECE_BYTES)
        after = store(target, providers=providers).data
    assert after.get(path) == stored.data[path], f"{shown} alone was selected, but not restored"
    for other, data in before.items():
        assert other == path or after.get(other) == data, (
            f"only {shown} was selected, but {show_path(other)} changed: touch nothing else"
        )


def _only(paths: list[ObjectPath], path: ObjectPath, what: str) -> None:
    for other in paths:
        problem = what.format(other=show_path(other))
        assert other == path, (
            f"only {show_path(path)} was selected, but place {problem}: ask `context.selected`, or "
            "leave the child to `context.place`"
        )


def _loaded_alone(stored: Stored, path: ObjectPath) -> None:
    with finding(f"loading {show_path(path)} alone"):
        placing = Placing(stored.providers, stored.tree, lambda p: p == path, allow_pickle=False)
        placement = placing.rebuild_tree(device=None)
        if not placement.missing and not placement.problems:
            stored.complete(placement)


def describing_copies_no_tensor(value: object, providers: Providers) -> None:
    """Check that two descriptions name the same memory, and leave the value's tensors alone."""
    if not has_buffers(value):
        return  # such a value hands out copies of its state, like random generators
    state = {"part": value}
    before = [(id(t), t.data_ptr()) for t in _plain(value)]
    # Both are kept: a second copy may reuse the address of a freed first one.
    first = describe_tree(state, providers=providers, allow_pickle=False)
    second = describe_tree(state, providers=providers, allow_pickle=False)
    after = [(id(t), t.data_ptr()) for t in _plain(value)]
    assert after == before, "describe replaces tensors of the value, but must change nothing"
    for one, other in zip(first.entries, second.entries, strict=True):
        if not isinstance(one, StateObject) or not isinstance(other, StateObject):
            continue
        if one.kind is not Kind.TENSOR or not one.spec.nbytes:
            continue
        same = (one.source.memory, one.source.address) == (
            other.source.memory,
            other.source.address,
        )
        assert same, (
            f"{show_path(one.path)}: two descriptions name two memories, so describe copies the "
            "tensor: describe the live one (core copies it at the capture). If the "
            "value itself hands out copies, pass `copies=True`"
        )


def describing_after_a_change_sees_it(
    make: Callable[[], object],
    change: Callable[[Any], object],
    equal: Callable[[Any, Any], bool],
    providers: Providers,
) -> None:
    """Check that a description after a change shows the changed value."""
    value: Any = make()
    # Held until the later description is made. If it were freed, the later one could get the same
    # address, and a provider that wrongly caches by address would pass.
    earlier = store({"part": value}, providers=providers)
    changed = change(value)
    value = value if changed is None else changed
    stored = store({"part": value}, providers=providers)
    del earlier
    again = {"part": make()}
    placement = stored.plan(again)
    if placement.missing or placement.problems:
        return  # the changed value does not fit a fresh one, for example in shape
    stored.complete(placement, piece_bytes=PIECE_BYTES)
    assert equal(again["part"], value), (
        "after a described value changes, its next description still shows the old state: "
        "describe the live memory, and remember nothing between calls"
    )


def dtypes_that_numpy_lacks_come_back(make: Callable[[], object], providers: Providers) -> None:
    """Check that float tensors of dtypes that numpy lacks are restored, or refused."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for name in DTYPES_THAT_NUMPY_LACKS:
        dtype, value, target = getattr(torch, name, None), make(), make()
        if dtype is None or not _retype(value, dtype, 1) or not _retype(target, dtype, 101):
            continue
        what = f"a value with tensors of {name}, which numpy does not know"
        with finding(f"describing {what}", UnsupportedStateError):
            try:
                stored = store({"part": value}, providers=providers)
            except UnsupportedStateError:
                continue  # refused, with a message that names a remedy
        _comes_back(stored, value, target, what)


def _comes_back(stored: Stored, value: object, target: object, what: str) -> None:
    state = {"part": target}
    with finding(f"restoring {what}"):
        placement = stored.plan(state)
        wrong = [*placement.missing, *placement.problems]
        assert not wrong, f"{what} does not fit another one of the same dtype: {wrong}"
        stored.complete(placement, piece_bytes=PIECE_BYTES)
        again = store(state, providers=stored.providers)
    for path, data in stored.data.items():
        assert again.data.get(path) == data, (
            f"{show_path(path)} of {what} comes back changed: its stored bytes differ (the check "
            "compares bytes, since `equal` may not know such tensors). One value must always be "
            "stored as the same bytes; a pickle varies, so describe its parts one by one"
        )
    described = {
        entry.source.memory.storage
        for entry in stored.description.entries
        if isinstance(entry, StateObject) and entry.source.memory is not None
    }
    for one, other in zip(_plain(value), _plain(state["part"]), strict=True):
        is_stored = one.untyped_storage().data_ptr() in described
        assert not is_stored or _raw(one) == _raw(other), (
            f"{what}: a {one.dtype} tensor of shape {list(one.shape)} comes back changed"
        )
    with finding(f"loading {what}"):
        stored.load()


def _plain(value: object) -> list[Any]:
    torch: Any = sys.modules.get("torch")
    return [
        t
        for t in torch_tensors(value)
        if type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided
    ]


def _retype(value: object, dtype: Any, seed: int) -> bool:
    """Give every floating tensor in `value` that dtype, and bytes that depend on `seed`."""
    torch: Any = sys.modules["torch"]
    floats = [t for t in _plain(value) if t.is_floating_point() and t.device.type == "cpu"]
    for number, tensor in enumerate(floats):
        size = tensor.numel() * dtype.itemsize
        data = (torch.arange(size) + seed + 7 * number).remainder(251).to(torch.uint8)
        tensor.data = data.view(dtype).reshape(tensor.shape)
    return bool(floats)


def _raw(tensor: Any) -> bytes:
    torch: Any = sys.modules["torch"]
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.tolist())


def torch_tensors(value: object, /) -> list[Any]:
    """Return the tensors in the attributes and items of `value`, with their gradients."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    return [o for o in _objects(value) if isinstance(o, torch.Tensor)]


def has_buffers(value: object, /) -> bool:
    """Return whether `value` holds any tensor, array or buffer."""
    numpy = sys.modules.get("numpy")
    arrays = (*_BUFFERS, numpy.ndarray) if numpy is not None else _BUFFERS
    return bool(torch_tensors(value)) or any(isinstance(o, arrays) for o in _objects(value))


def _objects(root: object) -> Iterator[object]:
    seen: dict[int, object] = {}  # keeps the objects: the id of a freed object may be reused
    waiting = [root]
    while waiting and len(seen) < _MOST_VISITED:
        value = waiting.pop()
        if id(value) in seen or value is None or isinstance(value, _OPAQUE):
            continue
        seen[id(value)] = value
        yield value
        waiting += reversed(list(_parts(value)))


def _parts(value: Any) -> Iterable[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield getattr(value, name)
    torch: Any = sys.modules.get("torch")
    tensor: Any = value  # the type checker takes `value` for a container
    if torch is not None and isinstance(value, torch.Tensor) and tensor.is_leaf:
        yield tensor.grad
