"""Checks of providers: their declarations, and their descriptions of values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.abc import Lines, MemoryKey, Node, StateProvider
from penstock.core.abc.provider import describes_together
from penstock.core.testing.expectations import expect_own_api_version
from penstock.core.testing.signatures import expect_signatures
from penstock.core.testing.stored import read_piece, read_source, store
from penstock.core.types import show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.core.abc import ByteSource
    from penstock.core.testing.stored import Stored
    from penstock.core.tree.containers import Providers
    from penstock.core.types import ObjectPath

_CONTAINERS = frozenset({"dict", "list", "tuple"})


def claims_are_priorities(value: object, providers: Providers) -> None:
    """Check the claims for the type of the value, and for types that no provider can know."""
    for kind in (type(value), type("Stranger", (), {}), object):
        for provider in providers.all():
            claim: object = provider.claims(kind)
            # Not `isinstance`: a provider that returns True means "yes", but gets priority 1.
            assert claim is None or type(claim) is int, (
                f"claims({kind.__name__}) of provider {provider.name!r} returned {claim!r}, which "
                f"is of type {type(claim).__name__}: return an int, the priority, or None for "
                "what is not its own"
            )


def declarations_are_sane(value: object, providers: Providers) -> None:
    """Check the provider's name, versions and forms."""
    provider = providers.for_type(type(value))
    if provider is None:
        return  # plain data: the provider of values takes it without claiming its type
    expect_own_api_version(provider)
    expect_signatures(provider, StateProvider)
    assert provider.name, "a provider needs a name"
    assert provider.version >= 1, "versions count from 1"
    assert isinstance(provider.forms, tuple), "forms is a tuple of names"
    assert len(set(provider.forms)) == len(provider.forms), "a form is declared twice"
    for other in providers.all():
        shared = set(provider.forms) & set(other.forms) if other is not provider else ()
        assert not shared, f"{other.name} declares {shared} too: forms are unique"
    for kind in (type("Stranger", (), {}), object):
        assert provider.claims(kind) is None, f"claims {kind.__name__}, which it cannot know"
    _names_its_memory(value, provider)


def _names_its_memory(value: object, provider: StateProvider) -> None:
    """Check that the optional methods return what core can use."""
    for name, tensor in provider.parameters(value):
        assert isinstance(name, str), f"parameters gives {name!r} for a name: it is a str"
        assert tensor is not None, f"parameters gives no tensor for {name!r}"
    for key in provider.claimed_memory(value):
        assert isinstance(key, MemoryKey), f"claimed_memory gives {key!r}: it is a MemoryKey"
    places: Iterable[object] = provider.unsteady_memory(value)
    for place in places:
        types = tuple(map(type, place)) if isinstance(place, tuple) else ()
        assert types == (str, int), f"unsteady_memory gives {place!r}: it is (device, storage)"
    for name, _ in provider.left_out(value):
        assert isinstance(name, str), f"left_out gives {name!r} for a name: it is a str"


def description_is_whole(stored: Stored) -> None:
    """Check that entries are below their part, can be rebuilt, and give bytes in any pieces."""
    seen: set[ObjectPath] = set()
    assert stored.description.entries, "nothing is described"
    for entry in stored.description.entries:
        shown = show_path(entry.path)
        assert entry.path[:1] == ("part",), f"{shown} is outside of its part"
        if entry.form not in _CONTAINERS:
            stored.providers.for_form(entry.form)  # raises PluginError if none can rebuild it
        if isinstance(entry, Node):
            assert not any(p[: len(entry.path)] == entry.path for p in seen), (
                f"the node {shown} comes after what is below it"
            )
        else:
            assert entry.source.nbytes == entry.spec.nbytes, f"{shown}: size and spec differ"
            check_source(entry.source, entry.spec.itemsize)
        seen.add(entry.path)


def description_repeats(stored: Stored, state: object) -> None:
    """Check that describing changes nothing, and gives the same result again."""
    again = store(state, providers=stored.providers)
    assert again.tree.objects == stored.tree.objects, "a second description differs"
    assert again.tree.nodes == stored.tree.nodes, "a second description has other nodes"
    assert again.data == stored.data, "describing changes the state"


def values_together_are_as_each(make: Callable[[], object], providers: Providers) -> None:
    """Check that `describe_all` of several values gives what `describe` of each gives."""
    provider = providers.for_type(type(make()))
    if provider is None or not describes_together(type(provider)):
        return
    values = {"0": make(), "1": make(), "2": make()}
    # A list that holds an object is of another type, so each child is described by itself.
    each = store({"part": {**values, "other": [make()]}}, providers=providers)
    together = store({"part": values}, providers=providers)
    count = len(together.tree.objects)
    assert each.tree.objects[:count] == together.tree.objects, "describe_all describes differently"
    assert each.tree.nodes[: len(together.tree.nodes)] == together.tree.nodes, (
        "describe_all describes other nodes"
    )
    assert {path: each.data.get(path) for path in together.data} == together.data, (
        "describe_all gives other bytes"
    )


def check_source(source: ByteSource, itemsize: int) -> None:
    """Check that a source gives the same bytes whole, in pieces, as a view and by lines.

    It keeps no buffer.

    Raises:
        AssertionError: The source does not.
    """
    whole = read_source(source)
    view = source.view()
    assert (view is None) == (source.address is None), "a view goes with an address"
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
