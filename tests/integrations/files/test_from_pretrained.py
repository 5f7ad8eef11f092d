"""Exports that transformers and PEFT load: equal parameters, and nothing missing or left over."""

import collections
import copy

import pytest
import torch
from tests.integrations.files.conftest import assert_same

import penstock

reason = "needs transformers and peft, which `make test-hosts` installs"
transformers = pytest.importorskip("transformers", reason=reason)
peft = pytest.importorskip("peft", reason=reason)

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_from_pretrained_reads_the_folder(tmp_path, tied, shards):
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=tied
    )
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "original")
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save({"model": model}, 1, mode="blocking")
        report = penstock.export_checkpoint(
            ckpt, tmp_path / "o", to="safetensors", config_from=tmp_path / "original",
            shard_bytes=6_000 if shards == 3 else 10**9,
        )  # fmt: skip
    weights = [name for name in report.files if name.endswith(".safetensors")]
    assert len(weights) >= shards
    assert bool(report.tied) == tied
    found, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "o", output_loading_info=True, dtype="auto"
    )
    assert not any(info.values())
    assert_same(dict(found.named_parameters()), dict(model.named_parameters()))


def test_adapter_round_trips_through_peft(tmp_path):
    torch.manual_seed(0)
    layers = {"default": torch.nn.Linear(6, 5), "middle": torch.nn.Linear(5, 5)}
    head = torch.nn.Sequential(torch.nn.Linear(5, 4))
    base = torch.nn.Sequential(collections.OrderedDict(layers, head=head))
    config = peft.LoraConfig(
        r=2, target_modules=["default", "middle"], modules_to_save=["head"], use_dora=True,
        init_lora_weights=False,
    )  # fmt: skip
    model = peft.get_peft_model(copy.deepcopy(base), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    model.save_pretrained(tmp_path / "original")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save({"model": trained}, 1, mode="blocking")
        penstock.export_checkpoint(
            ckpt, tmp_path / "o", to="safetensors", config_from=tmp_path / "original"
        )
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "o")
    assert_same(dict(again.named_parameters()), dict(model.named_parameters()))
