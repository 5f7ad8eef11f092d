import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.abc import StateObject
from penstock.core.errors import RestoreError, TornSnapshotError, UnsupportedStateError
from penstock.core.ranks.structure import TakenLines, lines_within
from penstock.providers.tensor.sources import TensorSource, make_sink
from penstock.testing.providers import check_provider
from penstock.testing.stored import read_source

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


def raw(*shape, dtype=torch.float32, seed=0):
    """Random bits as a tensor of any dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some dtypes call themselves experimental
        tensor = torch.empty(shape, dtype=dtype)
    data = np.random.default_rng(seed).bytes(tensor.numel() * dtype.itemsize)
    if data:
        bits = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if dtype is torch.bool:
            bits = bits & 1
        tensor.untyped_storage().copy_(bits.untyped_storage())
    return tensor


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 1:
        plain = plain.view(torch.uint8)  # some of these dtypes cannot be copied
    plain = plain.clone(memory_format=torch.contiguous_format)
    return bytes(torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage()).numpy())


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "every other": lambda t: t[::2, 1:, ::3],
    "channels last": lambda t: t[None].contiguous(memory_format=torch.channels_last),
    "one element": lambda t: t[1, 2, 3],
    "column": lambda t: t[:, 0, 0],
    "empty": lambda t: t[:, 3:3],
}


def test_every_dtype_restores_bit_by_bit(save):
    for dtype in DTYPES:
        tensor = raw(3, 5, dtype=dtype)
        stored = save({"t": tensor, "scalar": tensor[0, 0]})
        loaded = stored.load()
        assert loaded["t"].dtype is dtype
        assert bits(loaded["t"]) == bits(tensor), dtype
        assert loaded["scalar"].shape == ()
        target = {"t": raw(3, 5, dtype=dtype, seed=1), "scalar": raw(dtype=dtype, seed=2)}
        live = target["t"]
        stored.restore(target)
        assert target["t"] is live
        assert bits(live) == bits(tensor), dtype
        assert bits(target["scalar"]) == bits(tensor[0, 0]), dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
def test_every_layout_is_stored_row_major_and_restored_in_place(save, dtype):
    for layout, of in LAYOUTS.items():
        tensor = of(raw(4, 6, 8, dtype=dtype))
        stored = save({"t": tensor})
        assert stored.data["t",] == bits(tensor), layout
        target = of(raw(4, 6, 8, dtype=dtype, seed=1))
        stored.restore({"t": target})
        assert bits(target) == bits(tensor), layout
        assert target.stride() == tensor.stride()


def test_contiguous_cpu_memory_is_offered_without_a_copy():
    tensor = raw(64, 64)
    source = TensorSource(tensor)
    assert source.address == tensor.data_ptr()
    view = source.view()
    tensor[0, 0] = 7.0
    assert bytes(view[:4]) == np.float32(7).tobytes()
    part = TensorSource(tensor[3:])
    assert part.address == tensor.data_ptr() + 3 * 64 * 4
    assert part.nbytes == 61 * 64 * 4


@pytest.mark.parametrize("view", ["conj", "neg", "conj neg"])
def test_conjugate_and_negative_views_store_values(save, view):
    tensor = raw(3, 4, dtype=torch.complex64)
    shown = {
        "conj": lambda t: t.conj(),
        "neg": torch._neg_view,
        "conj neg": lambda t: torch._neg_view(t.conj()),
    }[view]
    source = TensorSource(shown(tensor))
    assert source.address is None
    assert read_source(source) == bits(shown(tensor))
    target = raw(3, 4, dtype=torch.complex64, seed=1)
    save({"t": shown(tensor)}).restore({"t": shown(target)})
    torch.testing.assert_close(target, tensor, rtol=0, atol=0, equal_nan=True)


def test_parameter_is_restored_in_place_and_keeps_requires_grad(save):
    stored = save({"w": raw(5)})
    for wanted in (True, False):
        weight = torch.nn.Parameter(torch.zeros(5), requires_grad=wanted)
        version = weight._version
        stored.restore({"w": weight})
        assert bits(weight) == bits(raw(5))
        assert weight.requires_grad is wanted
        assert weight._version > version
        assert weight.is_leaf


def test_source_keeps_the_memory_it_described_when_data_is_assigned(save):
    weight = torch.nn.Parameter(raw(5))
    source = TensorSource(weight)
    weight.data = torch.zeros(5)
    assert read_source(source) == bits(raw(5))


def test_expanded_tensor_is_stored_in_full_and_restored_if_values_agree(save):
    row = raw(1, 4)
    stored = save({"t": row.expand(3, 4)})
    assert len(stored.data["t",]) == 48
    memory = torch.zeros(1, 4)
    version = memory._version
    stored.restore({"t": memory.expand(3, 4)})
    assert bits(memory) == bits(row)
    assert memory._version > version
    contiguous = torch.zeros(3, 4)
    stored.restore({"t": contiguous})
    assert bits(contiguous) == bits(row.expand(3, 4))


@pytest.mark.parametrize(
    "target",
    [lambda: torch.zeros(1, 4).expand(3, 4), lambda: torch.zeros(6).as_strided((3, 4), (1, 1))],
    ids=["expanded", "overlapping"],
)
def test_values_that_disagree_on_one_address_are_an_error_with_path(save, target):
    stored = save({"x": {"t": raw(3, 4)}})
    with pytest.raises(RestoreError, match="x/t"):
        stored.restore({"x": {"t": target()}})


def test_tied_tensors_are_stored_once_and_still_tied_after(save):
    weight = raw(4, 4)
    state = {"a": weight, "view": weight[:2], "b": weight.view(4, 4)}
    stored = save(state)
    assert stored.tree.aliases == {("b",): ("a",)}
    loaded = stored.load()
    assert loaded["a"] is loaded["b"]
    other = torch.zeros(4, 4)
    placement = stored.restore({"a": other, "b": other, "view": torch.zeros(2, 4)})
    sinks = {t.path: t.sink for t in placement.targets}
    assert sinks["a",] is sinks["b",]
    assert bits(other) == bits(weight)


@given(
    picks=st.lists(
        st.tuples(st.sampled_from(sorted(LAYOUTS)), st.integers(0, 4)), min_size=1, max_size=12
    ),
    parameters=st.booleans(),
)
def test_tensors_described_together_are_stored_like_single_ones(save, picks, parameters):
    """In any order: cached traits of the previous tensor are not used for this one."""
    turning = raw(3, 4, 5, dtype=torch.complex64)
    bases = [raw(3, 4, 5), raw(3, 4, 5, dtype=torch.int16), turning, turning.conj()]
    bases.append(turning.conj().imag)
    tensors = [LAYOUTS[layout](bases[number]) for layout, number in picks]
    if parameters:
        tensors = [torch.nn.Parameter(tensor, requires_grad=False) for tensor in tensors]
    named = {str(number): tensor for number, tensor in enumerate(tensors)}
    together = save({"t": named})
    each = save({"t": {**named, "of another type": [raw(1)]}})  # so each is described separately
    assert together.tree.objects == each.tree.objects[: len(together.tree.objects)]
    assert together.tree.aliases == each.tree.aliases
    assert together.data == {path: each.data[path] for path in together.data}
    for path, data in together.data.items():
        assert data == bits(named[path[1]])


@given(
    picks=st.lists(st.tuples(st.sampled_from(sorted(LAYOUTS)), st.integers(0, 3)), min_size=1),
    left_out=st.sets(st.integers(0, 5)),
)
def test_tensors_placed_together_are_restored_like_single_ones(save, picks, left_out):
    def tensors(seed):
        turning = raw(3, 4, 5, dtype=torch.complex64, seed=seed)
        short = raw(3, 4, 5, dtype=torch.int16, seed=seed)
        bases = [raw(3, 4, 5, seed=seed), short, turning, turning.conj()]
        # Each has its own memory: several views of one would have to agree.
        made = [LAYOUTS[layout](bases[number].clone()) for layout, number in picks]
        return {str(number): tensor for number, tensor in enumerate(made)}

    values = tensors(1)
    stored = save({"t": values})
    together, each = {"t": tensors(2)}, {"t": {**tensors(2), "of another type": [1]}}
    exclude = [f"t/{number}" for number in left_out]
    plan = stored.restore(together, exclude=exclude)
    stored.complete(stored.plan(each, exclude=exclude))
    assert [t.path[1] for t in plan.targets] == [n for n in values if int(n) not in left_out]
    for name, tensor in together["t"].items():
        kept = int(name) in left_out
        assert bits(tensor) == bits((tensors(2) if kept else values)[name])
        assert bits(tensor) == bits(each["t"][name])


REFUSED = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta device"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "has the mkldnn layout"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "int_repr",
    ),
    "lazy": (torch.nn.UninitializedParameter, "one forward"),
    "subclass": (lambda: torch.ones(3).as_subclass(Strange), "does not know"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "nested",
    ),
    "dispatching": (lambda: Dispatching(torch.ones(3)), "__tensor_flatten__"),
}


class Strange(torch.Tensor):
    pass


class Dispatching(torch.Tensor):
    """Consists of another tensor without declaring it."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore")
def test_non_plain_memory_is_refused_with_its_path(save):
    stored = save({"a": {"list": [torch.ones(3)]}})
    for make, reason in REFUSED.values():
        with pytest.raises(UnsupportedStateError, match=rf"^a/list/0 .*{reason}"):
            save({"a": {"list": [make()]}})
        with pytest.raises(UnsupportedStateError, match=rf"^a/list/2 .*{reason}"):
            save({"a": {"list": [torch.ones(3), torch.ones(3), make(), torch.ones(3)]}})
        with pytest.raises(UnsupportedStateError, match=r"^a/list/0 "):
            stored.plan({"a": {"list": [make()]}})
        with pytest.raises(UnsupportedStateError, match=rf"^a/list/2 .*{reason}"):
            stored.plan({"a": {"list": [torch.ones(3), torch.ones(3), make(), torch.ones(3)]}})


def test_dtensor_of_one_rank_is_stored_as_a_tensor(save, tmp_path):
    dist = torch.distributed
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
        assert save({"a": tensor}).load()["a"].tolist() == [1, 1, 1, 1]
    finally:
        dist.destroy_process_group()


def test_buffers_and_plain_tensors_keep_the_contract(providers):
    check_provider(lambda: raw(5, 7), lambda t: t.zero_(), torch_equal, providers=providers)
    check_provider(
        lambda: torch.nn.Buffer(raw(7, 5)).t(),
        lambda t: t.zero_(),
        torch_equal,
        providers=providers,
    )


def torch_equal(one, other):
    return bits(one) == bits(other)


@given(st.data())
def test_random_strided_views_round_trip_in_random_pieces(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    order = data.draw(st.permutations(range(len(shape))))
    steps = [data.draw(st.integers(1, 3)) for _ in shape]
    cut = tuple(slice(None, None, step) for step in steps)
    tensor = raw(*shape).permute(*order)[cut]
    target = raw(*shape, seed=1).permute(*order)[cut]
    source, sink = TensorSource(tensor), make_sink(target, ("t",))
    at = 0
    while at < source.nbytes:
        size = min(4 * data.draw(st.integers(1, 9)), source.nbytes - at)
        piece = bytearray(size)
        source.copy_out(at, memoryview(piece))
        sink.copy_in(at, memoryview(bytes(piece)))
        at += size
    sink.written()
    assert bits(target) == bits(tensor)


def lines_of(data, itemsize):
    lines = lines_within(len(data), itemsize)
    return b"".join(data[start : start + lines.width] for start in lines.starts(len(data)))


def sampled(tensors, kind=TensorSource):
    """The compared lines of tensors, gathered by the code for devices."""
    sources = [kind(tensor) for tensor in tensors]
    lines = [lines_within(s.nbytes, s.layout.spec.itemsize) for s in sources]
    return TensorSource.sample(sources, lines)


def test_lines_do_not_depend_on_device_or_layout():
    """Whole tensors, some whose lines all fit one view and others, and ones with gaps."""
    for dtype in DTYPES:
        base = raw(7, 13, 41, dtype=dtype)
        tensors = [base, base[:, 0], base[1, 2, 3], raw(16, 64, dtype=dtype)]
        tensors += [base.transpose(0, 2), base[:, 1:, ::2], raw(3, 5, dtype=dtype).t()]
        if dtype.is_complex:
            tensors += [base.conj(), base.real, base.conj().imag]
        read = sampled(tensors)
        expected = [lines_of(bits(tensor), tensor.dtype.itemsize) for tensor in tensors]
        base.untyped_storage().copy_(
            torch.zeros(base.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
        )
        assert read() == expected, dtype


def test_lines_of_freed_memory_are_refused():
    tensor = torch.ones(64, 64).t()
    source = TensorSource(tensor)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(TornSnapshotError, match="freed or shrunk"):
        TensorSource.sample([source], [lines_within(source.nbytes, 4)])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "every other", "empty"])
def test_cuda_lines_are_as_of_the_request(providers, layout):
    from penstock.core.tree.describe import describe_tree

    base = raw(4, 6, 8)
    expected = lines_of(bits(LAYOUTS[layout](base)), 4)
    tensor = LAYOUTS[layout](base.cuda())
    other = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(50_000_000)
    other += 1
    tree = {"t": tensor, "other": other}
    entries = describe_tree(tree, providers=providers, allow_pickle=False).entries
    taken = TakenLines(entry for entry in entries if isinstance(entry, StateObject))
    tensor.zero_()  # in order after the gather
    other.zero_()
    found = taken.read()
    assert found["other",] == lines_of(bits(torch.ones(1 << 20)), 4)
    assert found.get(("t",), b"") == expected


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "every other", "empty"])
def test_cuda_source_gives_the_values_at_its_description(providers, layout):
    from penstock.core.tree.describe import describe_tree

    base = raw(4, 6, 8)
    tensor = LAYOUTS[layout](base.cuda())
    expected = bits(tensor.cpu())
    entry = describe_tree({"t": tensor}, providers=providers, allow_pickle=False).entries[0]
    out = torch.empty(max(entry.source.nbytes, 1), dtype=torch.uint8, pin_memory=True)
    view = memoryview(out.numpy())[: entry.source.nbytes]
    pending = entry.source.copy_out(0, view)
    if pending is not None:
        pending.order()
        tensor.zero_()  # ordered after the copy
        pending.wait()
    assert bytes(view) == expected


@pytest.mark.gpu
def test_cuda_copy_waits_for_work_of_the_describing_stream(providers):
    from penstock.core.tree.describe import describe_tree

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(50_000_000)
        tensor += 1
        entry = describe_tree({"t": tensor}, providers=providers, allow_pickle=False).entries[0]
    out = torch.empty(entry.source.nbytes, dtype=torch.uint8, pin_memory=True)
    entry.source.copy_out(0, memoryview(out.numpy())).wait()
    assert (out.view(torch.float32) == 1).all()


@pytest.mark.gpu
def test_cuda_copies_into_pageable_memory_are_complete_on_return(providers):
    from penstock.core.tree.describe import describe_tree

    tensor = raw(1 << 18).cuda()
    entry = describe_tree({"t": tensor}, providers=providers, allow_pickle=False).entries[0]
    out = bytearray(entry.source.nbytes)
    assert entry.source.copy_out(0, memoryview(out)) is None
    assert bytes(out) == bits(raw(1 << 18))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "every other", "empty"])
def test_cuda_targets_are_filled_in_place(save, layout):
    stored = save({"t": LAYOUTS[layout](raw(4, 6, 8))})
    target = LAYOUTS[layout](torch.zeros(4, 6, 8, device="cuda"))
    stored.restore({"t": target})
    assert bits(target.cpu()) == stored.data["t",]
    assert stored.load(device="cuda")["t"].is_cuda


def test_a_view_that_only_differs_by_its_conjugate_bit_is_not_tied(save):
    tensor = raw(3, dtype=torch.complex64)
    stored = save({"a": tensor, "b": tensor.conj(), "c": tensor.imag, "d": torch._neg_view(tensor)})
    assert not stored.tree.aliases


def test_inference_tensors_have_no_version_and_can_be_written_anywhere(save):
    with torch.inference_mode():
        tensor = torch.zeros(4, 5)
        strided = torch.zeros(5, 4).t()
    stored = save({"t": raw(4, 5), "s": raw(4, 5, seed=2)})
    assert TensorSource(tensor).version() is None
    stored.restore({"t": tensor, "s": strided})
    assert bits(tensor) == bits(raw(4, 5))
    assert torch.equal(strided.clone().view(torch.int32), raw(4, 5, seed=2).view(torch.int32))


def test_another_default_device_or_dtype_changes_nothing(save):
    tensor = raw(3, 4)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        stored = save({"t": tensor})
        loaded = stored.load()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert loaded["t"].device.type == "cpu"
    assert bits(loaded["t"]) == bits(tensor)


def test_loaded_tensors_go_to_the_given_device(save):
    assert save({"t": raw(2, 0)}).load(device="meta")["t"].device.type == "meta"
