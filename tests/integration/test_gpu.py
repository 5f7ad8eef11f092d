"""State on a CUDA device: the state at `save` is stored, and restored in place.

Changes are queued right after `save`, on the same stream and on others. A `StreamGate` holds the
stream of a copy that must not start yet.
"""

from __future__ import annotations

import copy
import ctypes
import threading
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from tests.integration.support import memory, same
from tests.integration.training import SMALL, TINY_BUDGET, differences
from tests.providers.test_tensor import DTYPES, raw
from torch import nn

import penstock
from penstock import Checkpointer, TornSnapshotError

pytestmark = pytest.mark.gpu

MODES = pytest.mark.parametrize("mode", ["blocking", "async", "lazy"])
AMPLE = {"staging_bytes": "64 MiB"}
AdamW = torch.optim.AdamW
OPTIMIZERS = {
    "foreach": lambda p: AdamW(p, foreach=True),
    "one by one": lambda p: AdamW(p, foreach=False),
    "fused": lambda p: AdamW(p, fused=True),
    "capturable": lambda p: AdamW(p, capturable=True),
    "learning rate on the device": lambda p: AdamW(p, lr=torch.tensor(0.01).cuda(), fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
RULES = {
    "raw": [],
    "zstd": [{"match": "**", "codecs": ["zstd"]}],
    "floatsplit": [{"match": "**", "codecs": ["floatsplit"]}],
    "delta": [{"match": "optimizer/**", "codecs": ["delta", "floatsplit"]}],
}


class Model(nn.Module):
    """Has tied weights, statistics that change in forward, and dropout."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 300)
        self.norm = nn.BatchNorm1d(300)
        self.last = nn.Linear(64, 300)
        self.last.weight = self.first.weight

    def forward(self, batch):
        hidden = nn.functional.dropout(self.norm(self.first(batch)), 0.1)
        return hidden - self.last(batch)


class Job:
    """A training job on the device, with one tensor in host memory."""

    def __init__(self, optimizer="foreach", seed=0):
        torch.manual_seed(seed)
        self.model = Model().cuda()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.on_host = torch.full((6000,), float(seed))
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "generator": self.generator,
            "rng": penstock.Rng(),
            "on_host": self.on_host,
        }
        self.train(2)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            batch = torch.randn(32, 64, device="cuda", generator=self.generator)
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.on_host += 1

    def snapshot(self):
        """Copies of all its state in host memory, made without Penstock."""
        random = [self.generator.get_state(), torch.cuda.get_rng_state()]
        return on_host([self.model.state_dict(), self.optimizer.state_dict(), random, self.on_host])

    def places(self):
        """The address of each tensor."""
        states = self.optimizer.state.values()
        moments = [t for s in states for t in s.values() if isinstance(t, torch.Tensor)]
        return [(t.device, t.data_ptr()) for t in [*self.model.state_dict().values(), *moments]]


def on_host(tree):
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {key: on_host(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [*map(on_host, tree)]
    return copy.deepcopy(tree)


class StreamGate:
    """Makes later work of a stream wait until this is opened."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._round = count(1)

    @contextmanager
    def closed(self):
        """Hold the stream, which is current within; after 30 s it is released anyway."""
        number = next(self._round)
        wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        words = ctypes.c_void_p(self.stream.cuda_stream), ctypes.c_uint64(self._flag.data_ptr())
        torch.cuda.synchronize()
        timer = threading.Timer(30, self._flag.fill_, [number])
        timer.start()
        try:
            with torch.cuda.stream(self.stream):
                assert wait(*words, ctypes.c_uint32(number), ctypes.c_uint(0)) == 0
                yield
        finally:
            self._flag.fill_(number)
            timer.cancel()

    @property
    def holds(self):
        return not self.stream.query()


@pytest.fixture
def stream_gate():
    return StreamGate()


def checkpointer(store, **options):
    return Checkpointer(store, **{**SMALL, **AMPLE, **options})


def keep_stream_busy():
    torch.cuda._sleep(100_000_000)


# -- training --------------------------------------------------------------------------------------


def save_and_resume(store, mode, optimizer="foreach", **options):
    """Save, train on at once, and train on from the checkpoint: both must be equal."""
    job = Job(optimizer)
    with checkpointer(store, **options) as ckpt:
        ckpt.save(job.state, 1, mode=mode)
        job.train(1)
        expected = job.snapshot()
        keep_stream_busy()
        handle = ckpt.save(job.state, 2, mode=mode)
        job.train(3)
        report = handle.result()
        final = job.snapshot()
        resumed = Job(optimizer, seed=9)
        places = resumed.places()
        keep_stream_busy()
        resumed.train(1)  # is still in flight when the restore begins
        ckpt.restore(resumed.state, 2)
        assert not differences(resumed.snapshot(), expected)
        assert resumed.places() == places
        resumed.train(3)
        assert not differences(resumed.snapshot(), final)
    return report


@MODES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_resumes_bit_by_bit(mode, optimizer):
    report = save_and_resume(memory(), mode, optimizer)
    assert bool(report.deferred_bytes) is (mode == "lazy" and optimizer != "capturable")


@MODES
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("budget", [AMPLE, TINY_BUDGET], ids=["ample", "tiny"])
def test_training_resumes_with_any_codec_and_little_staging(mode, rules, budget):
    save_and_resume(memory(), mode, rules=RULES[rules], **budget)


@pytest.mark.parametrize("mode", ["async", "lazy"])
def test_replay_of_a_captured_step_changes_no_save(mode):
    """A replay runs without Python: no hook holds it back."""
    model = nn.Linear(256, 256).cuda()
    optimizer = AdamW(model.parameters(), capturable=True)
    batch = torch.randn(8, 256, device="cuda")

    def step():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    state = {"model": model, "optimizer": optimizer}
    with checkpointer(memory()) as ckpt:
        for number in (1, 2):
            graph.replay()
            expected = on_host(model.state_dict()), on_host(optimizer.state_dict())
            keep_stream_busy()
            handle = ckpt.save(state, number, mode=mode)
            graph.replay()
            handle.result()
            tree = ckpt.load(number)
            assert not differences(dict(tree["model"]), dict(expected[0]))
            assert not differences(tree["optimizer"]["state"], expected[1]["state"])


# -- the fence -------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_stream", [True, False])
def test_fence_orders_changes_after_copies_without_waiting(stream_gate, same_stream):
    tensor = torch.zeros(1 << 20, device="cuda")
    changing = stream_gate.stream if same_stream else torch.cuda.Stream()
    with checkpointer(memory(), defer="t") as ckpt:
        ckpt.save({"t": tensor}, 1, mode="lazy").result()  # makes the staging memory
        tensor.add_(1).fill_(1)
        with stream_gate.closed():
            tensor.add_(1)
            handle = ckpt.save({"t": tensor}, 2, mode="lazy")
            with torch.cuda.stream(changing):
                ckpt.fence()
                tensor.fill_(7)
            assert stream_gate.holds
            assert not handle.captured.done()
        handle.result()
        assert (ckpt.load(2)["t"] == 2).all()
        assert (tensor == 7).all()


@pytest.mark.parametrize("optimizer", ["foreach", "fused", "momentum"])
def test_optimizer_step_waits_only_on_the_device(stream_gate, optimizer):
    model = nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 64)).cuda()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    with checkpointer(memory()) as ckpt:
        ckpt.save(state, 1, mode="lazy").result()
        optimizer.step()
        expected = on_host([dict(model.state_dict()), optimizer.state_dict()["state"]])
        with stream_gate.closed():
            handle = ckpt.save(state, 2, mode="lazy")
            optimizer.step()
            assert stream_gate.holds
            assert not handle.captured.done()
        handle.result()
        tree = ckpt.load(2)
        assert not differences([dict(tree["model"]), tree["optimizer"]["state"]], expected)
        assert not same(on_host(dict(model.state_dict())), expected[0])


def test_memory_freed_before_its_copy_is_not_reused(stream_gate):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # two blocks, so the allocator need not ask the device
        pair = [torch.ones(1 << 22, device="cuda") for _ in range(2)]
    tensor = min(pair, key=torch.Tensor.data_ptr)  # reused first
    del pair
    # Few chunks: at some number of copies below 1,024 CUDA makes the host wait for the stream.
    with checkpointer(memory(), defer="t", chunk_bytes=1 << 24) as ckpt:
        ckpt.save({"t": tensor}, 1, mode="lazy").result()
        with stream_gate.closed():
            handle = ckpt.save({"t": tensor}, 2, mode="lazy")
            ckpt.fence()
            tensor.untyped_storage().resize_(0)
            with torch.cuda.stream(stream):
                torch.full((1 << 22,), 7.0, device="cuda")
            assert stream_gate.holds
        handle.result()
        assert (ckpt.load(2)["t"] == 1).all()


def test_change_before_the_fence_fails_the_save():
    job = Job()
    with checkpointer(memory()) as ckpt:
        handle = ckpt.save(job.state, 1, mode="lazy")
        with torch.no_grad():
            job.model.first.weight.add_(1)
        with pytest.raises(TornSnapshotError, match=r"first\.weight"):
            handle.result()
        assert ckpt.latest() is None


@pytest.mark.parametrize("budget", [AMPLE, TINY_BUDGET], ids=["ample", "tiny"])
def test_async_save_leaves_no_device_work_on_return(budget):
    tensor = torch.zeros(1 << 18, device="cuda")
    with checkpointer(memory(), **budget) as ckpt:
        for number in (1, 2):
            tensor.fill_(0)
            torch.cuda.synchronize()
            keep_stream_busy()
            tensor.add_(number)
            handle = ckpt.save({"t": tensor}, number)
            with torch.cuda.stream(torch.cuda.Stream()):
                tensor.fill_(7)
            handle.result()
            assert (ckpt.load(number)["t"] == number).all()


# -- tensors ---------------------------------------------------------------------------------------


def every_kind():
    """Tensors of all dtypes and layouts, and enough small ones to fill several slabs."""
    base = torch.randn(30, 40, 50, device="cuda")
    numbers = torch.randn(50, 60, dtype=torch.complex64, device="cuda")
    return {
        "dtypes": {str(d): raw(3, 5 * d.itemsize, dtype=torch.uint8).cuda().view(d) for d in PLAIN},
        "layouts": {
            "transposed": base.transpose(0, 2),
            "cut": base[::2, 1:, ::3],
            "channels last": base[None].clone(memory_format=torch.channels_last),
            "one element": base[1, 2, 3].clone(),
            "empty": base[:, 3:3].clone(),
            "expanded": base[:1, :, :1].clone().expand(30, 40, 5),
            "conjugate": numbers.conj(),
            "negated": numbers.clone().conj().imag,
        },
        "small": [torch.full((n % 7 + 1,), float(n), device="cuda") for n in range(3000)],
        "host": [torch.arange(5000.0), torch.arange(3.0)],
    }


PLAIN = [d for d in DTYPES if d not in {torch.bool, torch.complex32}]


def plain(tree):
    """The same tree in host memory, each tensor as its bytes."""
    if isinstance(tree, torch.Tensor):
        tensor = tree.resolve_conj().resolve_neg().contiguous()
        return tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes(), tuple(tree.shape)
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [*map(plain, tree)]


def blank(tree):
    """A tree of the same tensors with other contents, in memory of the same layout."""
    if isinstance(tree, torch.Tensor):
        wiped = copy.deepcopy(tree)
        wiped.untyped_storage().fill_(0)
        return wiped
    if isinstance(tree, dict):
        return {key: blank(value) for key, value in tree.items()}
    return [*map(blank, tree)]


@MODES
@pytest.mark.parametrize("budget", [AMPLE, TINY_BUDGET], ids=["ample", "tiny"])
def test_every_kind_of_tensor_resumes(mode, budget):
    state = every_kind()
    expected = plain(state)
    with checkpointer(memory(), defer=["layouts/**", "small/**"], **budget) as ckpt:
        handle = ckpt.save(state, 1, mode=mode)
        ckpt.fence()
        for tensor in [state["layouts"]["cut"], *state["small"]]:
            tensor.fill_(-1)
        handle.result()
        for device in ("cpu", "cuda"):
            tree = ckpt.load(1, device=device)
            assert plain(tree) == expected
            assert tree["dtypes"]["torch.float8_e4m3fn"].device.type == device
        target = blank(state)
        cut = target["layouts"]["cut"]
        ckpt.restore(target, 1)
        assert plain(target) == expected
        assert target["layouts"]["cut"] is cut


@MODES
def test_rounded_weights_are_derived_and_unchanged_ones_shared(mode):
    master = torch.randn(600, 500, device="cuda")
    state = {"model": {"w": master.bfloat16()}, "master": {"w": master}}
    with checkpointer(memory(), share=True, chunk_bytes=1 << 20) as ckpt:
        first, second = (ckpt.save(state, n, mode=mode).result() for n in (1, 2))
        assert [o.derived for o in ckpt.open(1).objects() if o.derived] == [("master", "w")]
        assert second.bytes_stored < first.bytes_stored / 10
        assert plain(ckpt.load(2)) == plain(state)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["async", "lazy"])
def test_one_rank_of_fsdp_over_nccl(mode, tmp_path):
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    def make(seed):
        torch.manual_seed(seed)
        model = fully_shard(nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 64)).cuda())
        return model, AdamW(model.parameters())

    def step(model, optimizer):
        model(torch.ones(4, 64, device="cuda")).square().mean().backward()
        optimizer.step()

    def whole(model, optimizer):
        states = [{k: getattr(t, "_local_tensor", t) for k, t in model.state_dict().items()}]
        states += [
            {k: getattr(t, "_local_tensor", t) for k, t in state.items()}
            for state in optimizer.state_dict()["state"].values()
        ]
        return on_host(states)

    meet = f"file://{tmp_path}/meet"
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", init_method=meet, rank=0, world_size=1, device_id=device)
    try:
        model, optimizer = make(0)
        step(model, optimizer)
        expected = whole(model, optimizer)
        with checkpointer(memory()) as ckpt:
            handle = ckpt.save({"model": model, "optimizer": optimizer}, 1, mode=mode)
            step(model, optimizer)
            handle.result()
            fresh, other = make(1)
            ckpt.restore({"model": fresh, "optimizer": other}, 1)
            assert not differences(whole(fresh, other), expected)
    finally:
        dist.destroy_process_group()
