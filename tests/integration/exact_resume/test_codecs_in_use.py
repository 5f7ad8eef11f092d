"""Checkpoints written through codecs of every kind: lossy, typed, declining, out of memory."""

import os
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
import zstandard
from tests.core.cli.command import caller

import penstock
from penstock.codecs.zstd import ZstdCodec
from penstock.core.abc import DECLINED, Codec, CodecOutput, PluginConfig
from penstock.core.errors import ConfigError, DamagedError, PenstockError, PluginError
from penstock.core.plugins.registry import Registry

SMALL = {"chunk_bytes": 16384, "block_bytes": 4096}
contexts = []


class Half(Codec):
    """Lossy: keeps the upper half of each float32."""

    api_version = 1
    name = "half"
    lossless = False

    def __init__(self, config=None, /):
        super().__init__(config or PluginConfig())

    def max_encoded_size(self, raw_length, /):
        return raw_length

    def output(self, context, /):
        return CodecOutput("bfloat16", 2, elementwise=True)

    def encode(self, chunk, out, /, *, context):
        contexts.append(context)
        if context.dtype != "float32":
            return DECLINED
        words = np.frombuffer(chunk, "<u4") >> 16
        out[: chunk.nbytes // 2] = words.astype("<u2").tobytes()
        return chunk.nbytes // 2

    def decode(self, frame, out, /, *, context):
        words = np.frombuffer(frame, "<u2").astype("<u4") << 16
        out[:] = words.tobytes()


class Careless(Half):
    """Lossy, and takes any chunk."""

    name = "careless"

    def output(self, context, /):
        return CodecOutput()

    def encode(self, chunk, out, /, *, context):
        out[: chunk.nbytes] = bytes(byte & 0xFE for byte in bytes(chunk))
        return chunk.nbytes

    def decode(self, frame, out, /, *, context):
        out[:] = frame


class Against(Careless):
    """Needs a base, which core does not have."""

    name = "against"
    lossless = True
    needs_base = True


class Never(Half):
    """Declines every chunk after writing to the output."""

    name = "never"
    lossless = True

    def encode(self, chunk, out, /, *, context):
        out[: chunk.nbytes] = bytes(chunk.nbytes)
        return DECLINED


class Starved(Careless):
    """Finds no memory to decode with."""

    name = "starved"
    lossless = True

    def encode(self, chunk, out, /, *, context):
        out[: chunk.nbytes] = chunk
        return chunk.nbytes

    def decode(self, frame, out, /, *, context):
        raise MemoryError


@pytest.fixture(autouse=True)
def _no_contexts():
    contexts.clear()


@pytest.fixture
def registry():
    from importlib.metadata import entry_points

    groups = ("penstock.providers", "penstock.codecs", "penstock.backends")
    ours = [e for group in groups for e in entry_points(group=group)]
    own = [
        EntryPoint(cls.name, f"{__name__}:{cls.__name__}", "penstock.codecs")
        for cls in (Half, Careless, Against, Never, Starved)
    ]
    return Registry([*ours, *own])


@pytest.fixture
def opened(tmp_path, registry):
    """Opens the run with rules."""

    def opened(*rules, **options):
        return penstock.Checkpointer(
            f"posix://{tmp_path}/run",
            registry=registry,
            rules=[{"match": match, "codecs": list(codecs)} for match, *codecs in rules],
            **options,
        )

    return opened


def rounded(tensor):
    """The lossy codec's result for float32."""
    return ((tensor.view(torch.int32) >> 16) << 16).view(torch.float32)


@pytest.mark.parametrize(
    ("chain", "size"),
    [(["half"], 100), (["half", "zstd"], 10_000), (["careless"], 10_000)],  # a slab, and chunks
)
def test_lossy_data_is_read_with_its_neighbors(opened, chain, size):
    torch.manual_seed(0)
    state = {"w": torch.randn(size), "other": torch.ones(3), "epoch": 7}
    with opened(("w", *chain), **SMALL) as ckpt:
        ckpt.save(state, step=1, mode="blocking")
        tree = ckpt.load(1)
        assert torch.equal(tree["other"], state["other"])
        assert tree["epoch"] == 7
        if chain[0] == "half":
            assert torch.equal(tree["w"], rounded(state["w"]))
        assert not torch.equal(tree["w"], state["w"])
        assert ckpt.verify(1).ok


def test_a_weight_is_never_derived_from_a_lossy_master(opened):
    master = torch.randn(300, 300)
    state = {"model": {"w": master.bfloat16()}, "master": {"w": master}}
    with opened(("master", "half"), share=True) as ckpt:
        ckpt.save(state, step=1, mode="blocking")
        tree = ckpt.load(1)
    assert not torch.equal(tree["master"]["w"].bfloat16(), state["model"]["w"])
    assert torch.equal(tree["model"]["w"], state["model"]["w"])


def test_a_value_never_goes_through_a_lossy_codec(opened):
    state = {"w": torch.arange(40.0), "note": "a text of some length", "epoch": 1}
    with opened((list(state), "careless", "zstd")) as ckpt:
        ckpt.save(state, step=1, mode="blocking")
        tree = ckpt.load(1)
    assert (tree["note"], tree["epoch"]) == (state["note"], 1)


def test_a_tensor_of_no_dimensions_never_goes_through_a_lossy_codec(opened):
    state = {"state": {"step": torch.tensor(100_001.0), "m": torch.randn(300)}}
    with opened(("state", "half")) as ckpt:
        ckpt.save(state, step=1, mode="blocking")
        tree = ckpt.load(1)
    assert tree["state"]["step"] == 100_001
    assert torch.equal(tree["state"]["m"], rounded(state["state"]["m"]))


@pytest.mark.parametrize(
    ("first", "codecs_of_model"),
    [
        ("best", None),
        ("model", []),
        ("best", "auto"),
        ("model", [{"type": "cast", "to": "float8_e5m2"}]),
    ],
)
def test_tied_tensor_is_rounded_only_if_every_name_is(tmp_path, first, codecs_of_model):
    """`state_dict()` returns the model's own memory, so "best" is no copy of the model."""
    model = torch.nn.Linear(300, 3)
    state = {"best": model.state_dict(), "model": model}
    rules = [{"match": "best", "codecs": [{"type": "cast", "to": "bfloat16"}]}]
    if codecs_of_model is not None:
        rules.append({"match": "model", "codecs": codecs_of_model})
    with penstock.Checkpointer(f"posix://{tmp_path}", rules=rules) as ckpt:
        ckpt.save(dict(sorted(state.items(), key=lambda item: item[0] != first)), 1).result()
        tree = ckpt.load(1)
        assert ckpt.verify(1).lossy == ()
    assert torch.equal(tree["model"]["weight"], model.weight)
    assert torch.equal(tree["best"]["weight"], model.weight)


def test_tied_tensor_is_rounded_if_equal_codecs_round_each_of_its_names(opened):
    weight = torch.randn(300)
    with opened(("a", "half", "zstd"), ("b", "half", "zstd")) as ckpt:
        ckpt.save({"a": weight, "b": weight}, step=1).result()
        assert torch.equal(ckpt.load(1)["b"], rounded(weight))


def test_a_lossy_codec_is_refused_if_a_rule_names_nothing(opened):
    for pattern in ("**", "?*/**", "[a-z]*", "[!x]*/[]a-z_]*", "**/*.*", "*_*"):
        with pytest.raises(ConfigError, match=r"codec half is lossy, .* nearly any name"):
            opened((pattern, "half", "zstd"))


@pytest.mark.parametrize("sizes", [[300, 300, 300], [30_001]])
def test_chunks_that_all_codecs_decline_are_raw(opened, sizes):
    state = {f"{n}": torch.randn(size) for n, size in enumerate(sizes)}
    with opened(("**", "never"), **SMALL) as ckpt:
        ckpt.save(state, step=1, mode="blocking")
        template = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        ckpt.restore(template)
        assert ckpt.verify(1).ok
        part = ckpt.open(1).read("0", slice(10, 20))
    assert all(torch.equal(template[name], state[name]) for name in state)
    assert torch.equal(part, state["0"][10:20])


def test_the_rest_of_a_chain_stores_a_declined_chunk(opened):
    state = {"zeros": torch.zeros(9000, dtype=torch.int64), "w": torch.randn(9000)}
    with opened((list(state), "half", "zstd"), **SMALL) as ckpt:
        report = ckpt.save(state, step=1, mode="blocking").result()
        tree = ckpt.load(1)
    assert torch.equal(tree["zeros"], state["zeros"])
    assert torch.equal(tree["w"], rounded(state["w"]))
    assert report.bytes_stored < report.bytes_raw / 2  # zstd took the chunks that `half` declined


@pytest.mark.parametrize("size", [300, 10_001])
def test_a_float_codec_after_one_that_makes_floats_gets_these(opened, size):
    torch.manual_seed(0)
    state = {"w": torch.randn(size), "m": torch.randn(70, 90), "n": torch.arange(9000)}
    with opened((list(state), "half", "floatsplit"), **SMALL) as ckpt:
        ckpt.save(state, step=1, mode="blocking")
        tree = ckpt.load(1)
        assert ckpt.verify(1).ok
        part = ckpt.open(1)
        chains = {tuple(c.name for c in chain) for chain in part.contents.manifest.head(0).chains}
    assert ("half", "floatsplit") in chains  # it declines non-floats
    for name, tensor in state.items():
        wanted = rounded(tensor) if tensor.dtype == torch.float32 else tensor
        assert torch.equal(tree[name], wanted), name


class First(Careless):
    """Version 1 of a codec: stores the chunk unchanged."""

    name = "grown"
    lossless = True

    def encode(self, chunk, out, /, *, context):
        out[: chunk.nbytes] = chunk
        return chunk.nbytes


class Second(First):
    """Version 2: stores the chunk backwards."""

    version = 2

    def encode(self, chunk, out, /, *, context):
        out[: chunk.nbytes] = bytes(chunk)[::-1]
        return chunk.nbytes

    def decode(self, frame, out, /, *, context):
        out[:] = bytes(frame)[:: 1 if context.version == 1 else -1]


class Third(Second):
    """Version 3, which no longer reads version 1."""

    version = 3
    oldest_readable = 2


def with_codec(root, codec, *, codecs=("grown",)):
    registry = Registry()
    registry.register(codec)
    rules = [{"match": "w", "codecs": list(codecs)}]
    return penstock.Checkpointer(f"posix://{root}/run", registry=registry, rules=rules)


def test_a_codec_reads_what_its_older_version_wrote(tmp_path):
    codecs = ["zstd", "grown", "lz4"]
    state = {"w": torch.arange(9000.0)}
    for step, codec in enumerate((First, Second), start=1):
        with with_codec(tmp_path, codec, codecs=codecs) as ckpt:
            ckpt.save(state, step, mode="blocking")
    with with_codec(tmp_path, Second) as ckpt:
        for step in (1, 2):
            assert torch.equal(ckpt.load(step)["w"], state["w"])
            assert ckpt.verify(step).ok
            assert ckpt.info(step).codecs["grown"] == step


def test_a_base_is_decoded_by_the_version_that_wrote_it(tmp_path, caplog):
    weights = torch.randn(9000, generator=torch.Generator().manual_seed(1))
    for step, codec in enumerate((First, Second), start=1):
        with with_codec(tmp_path, codec, codecs=("delta", "grown")) as ckpt:
            ckpt.save({"w": weights + 1e-6 * step}, step, mode="blocking")
            assert torch.equal(ckpt.load(step)["w"], weights + 1e-6 * step)
    with with_codec(tmp_path, Second) as ckpt:
        assert ckpt.info(2).references == (ckpt.info(1).uid,)
    assert not caplog.records


@pytest.mark.parametrize(
    ("codec", "step", "why"),
    [
        (First, 2, "written by version 2 of codec 'grown', but .* has version 1: upgrade it"),
        (Third, 1, "written by version 1 of codec 'grown', .* reads versions 2 to 3: install"),
    ],
)
def test_a_version_that_cannot_be_read_is_refused_before_any_data_is_read(
    tmp_path, codec, step, why
):
    state = {"w": torch.arange(9000.0)}
    for number, version in enumerate((First, Second), start=1):
        with with_codec(tmp_path, version) as ckpt:
            ckpt.save(state, number, mode="blocking")
    for blob in (tmp_path / "run").glob("data/*/blobs/*"):
        blob.unlink()  # a reader of data finds none
    target = {"w": torch.ones(9000)}
    with with_codec(tmp_path, codec) as ckpt:
        for read in (ckpt.load, lambda step: ckpt.restore(target, step)):
            with pytest.raises(PluginError, match=why):
                read(step)
    assert torch.equal(target["w"], torch.ones(9000))


def test_too_little_memory_in_decoding_is_no_damage(opened):
    with opened(("w", "zstd")) as ckpt:
        ckpt.save({"w": torch.ones(5000)}, step=1, mode="blocking")
    with opened(("w", "starved")) as ckpt:
        ckpt.save({"w": torch.ones(5000)}, step=2, mode="blocking")
        with pytest.raises(PenstockError, match="MemoryError") as raised:
            ckpt.load(on_damage="fallback")
        assert not isinstance(raised.value, DamagedError)


def test_zstd_memory_errors_are_not_damage(monkeypatch):
    from penstock.codecs.zstd import ZstdCodec, ZstdConfig
    from penstock.core.abc import CodecContext
    from penstock.core.format.compressed import decompress

    def starved(*_, **__):
        raise zstandard.ZstdError("zstd decompress error: Allocation error : not enough memory")

    frame = zstandard.compress(bytes(100))
    monkeypatch.setattr(zstandard, "frame_content_size", starved)
    monkeypatch.setattr(zstandard, "get_frame_parameters", starved)
    with pytest.raises(MemoryError):
        decompress(frame, "a record")
    context = CodecContext("uint8", 1, (100,), 0, 100)
    codec = ZstdCodec(ZstdConfig())
    with pytest.raises(MemoryError):
        codec.decode(memoryview(frame), memoryview(bytearray(100)), context=context)


def saved_with_a_missing_codec(tmp_path):
    class Own(ZstdCodec):
        api_version = 1
        name = "own"

    registry = Registry()
    registry.register(Own)
    rules = [{"match": "w", "codecs": ["own"]}]
    with penstock.Checkpointer(f"posix://{tmp_path}/run", registry=registry, rules=rules) as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"w": torch.arange(9000.0), "b": torch.ones(9)}, step, mode="blocking")
    return tmp_path / "run"


def test_verify_continues_past_a_missing_codec(capsys, monkeypatch, tmp_path):
    call = caller(capsys, monkeypatch)
    run = saved_with_a_missing_codec(tmp_path)
    blobs = sorted((tmp_path / "run").glob("data/*/blobs/*.enc"), key=os.path.getmtime)
    blobs[1].write_bytes(blobs[1].read_bytes()[:-1] + b"?")
    found = call("verify", run, "--all")
    assert found.code == 1
    whole = f"://{run}: stored bytes are whole; decoding not checked: no codec called 'own'"
    assert [x for x in found.out.splitlines() if x.startswith("step 1 of ") and whole in x]
    assert "checksum of the frame at" in found.out
    assert "step 2 is damaged" in found.out
    assert "step 3 of" in found.out
    assert "3 checkpoints verified, 1 damaged, 2 not decoded" in found.out
    reports = call("verify", run, "--all", "--json").json["reports"]
    assert [report["ok"] for report in reports] == [True, False, True]
    assert "no codec called 'own' is installed" in reports[0]["not_decoded"][0]
