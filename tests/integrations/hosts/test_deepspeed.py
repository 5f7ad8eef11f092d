"""DeepSpeed saves to Penstock, and finds the checkpoints of a killed job in its own way."""

import pytest
from tests.integrations.hosts.harness import check_exact_resume, needs, program_of, run

pytestmark = [pytest.mark.process, needs("deepspeed")]

# On a CPU, DeepSpeed would compile an operator that nothing here needs, for minutes.
PRELUDE = """
import sys
import deepspeed
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
"""
PROGRAM = PRELUDE + program_of("trainers/deepspeed.md")

DIE = """
import os, pathlib, signal
from penstock.integrations.deepspeed import PenstockEngine

def die():
    if rank == 0 and engine.global_steps == 4 and not pathlib.Path("died").exists():
        pathlib.Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
BEFORE_THE_TAG_LEADS_THERE = """
lead = PenstockEngine._lead
PenstockEngine._lead = lambda *words: die() or lead(*words)
"""
BEFORE_LATEST = """
commit = PenstockEngine.commit
PenstockEngine.commit = lambda self, info: commit(self, info) and not die()
"""

# One rank, to inspect its files.
LOOK = """
import json, os, pathlib
import pytest, torch
import penstock
from penstock.core.cli.main import main
from penstock.integrations.deepspeed import use

config = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
deepspeed.init_distributed("gloo")

def make():
    return deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)[0]

def train(engine):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()

def weight(engine):
    return engine.module.weight.detach().clone()

MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
engine = make()
"""

TAGS = """
def tags():
    with penstock.Checkpointer("out/penstock", ranks="alone") as ckpt:
        return {step: ckpt.info(step).metadata["deepspeed_tag"] for step in ckpt.steps()}

use(engine)
train(engine)
one = weight(engine)
engine.save_checkpoint("out")
engine.save_checkpoint("out", tag="best")
assert tags() == {1: "global_step1", 2: "best"}
train(engine)
train(engine)
engine.save_checkpoint("out", tag="best")
assert tags() == {1: "global_step1", 3: "best"}  # 2 was overwritten, as its files would be
engine.save_checkpoint("out")
assert tags() == {1: "global_step1", 3: "best", 4: "global_step3"}
engine.load_checkpoint("out", tag="global_step1")
assert weight(engine).equal(one)
train(engine)
engine.save_checkpoint("out")
assert tags() == {1: "global_step1", 2: "global_step2", 3: "best", 4: "global_step3"}

engine.save_16bit_model("weights", "model.bin")  # for other programs, which open it
assert torch.load("weights/model.bin", weights_only=True)["weight"].equal(weight(engine))
assert len(tags()) == 4

with penstock.Checkpointer("out/penstock", ranks="alone") as ckpt:
    uid = ckpt.info(2).uid
    assert "float32" in ckpt.open(2).specs()[f"{MODEL}/module/weight"].dtype
for name, keys in {MODEL: {"module", "global_steps"}, OPTIMIZER: {"optimizer_state_dict"}}.items():
    text = pathlib.Path("out/global_step2", name).read_text()
    assert json.loads(text.splitlines()[1]).items() >= {"step": 2, "uid": uid}.items()
    sys.argv = text.splitlines()[-1].split()
    with pytest.raises(SystemExit, match="^0$"):
        main()
    assert torch.load("OUT.pt", weights_only=True).keys() >= keys
    os.unlink("OUT.pt")

os.rename("out", "moved")
engine.load_checkpoint("moved", tag="global_step1")
assert weight(engine).equal(one)
"""

DAMAGE = """
train(engine)
engine.save_checkpoint("theirs")  # by DeepSpeed itself
use(engine)
with pytest.raises(penstock.ConfigError, match="call `use` once"):
    use(engine)
with pytest.raises(penstock.ConfigError, match="retention"):
    use(make(), retentions={"keep_last": 1})
with pytest.raises(penstock.ConfigError, match="allow_pickle=True"):
    engine.load_checkpoint("theirs")
trusting = make()
use(trusting, allow_pickle=True)
trusting.load_checkpoint("theirs")
assert weight(trusting).equal(weight(engine))

engine.save_checkpoint("out", tag="it")
stub, place = pathlib.Path("out/it", MODEL), pathlib.Path("out/it/penstock.json")
good = place.read_text()
for bad in ("", "[]", '{"step": 1}', good[:20]):
    place.write_text(bad)
    with pytest.raises(penstock.FormatError, match="begins with {"):
        engine.load_checkpoint("out")
place.unlink()
with pytest.raises(penstock.FormatError, match="penstock.json is missing"):
    engine.load_checkpoint("out")
place.write_text(stub.read_text().splitlines()[1])  # what the errors advise
engine.load_checkpoint("out")

text = stub.read_text()
stub.write_bytes(pathlib.Path("theirs/global_step1", MODEL).read_bytes())
with pytest.raises(penstock.FormatError, match="penstock.json is beside it"):
    engine.load_checkpoint("out")
stub.write_text(text)
with penstock.Checkpointer("out/penstock", ranks="alone") as ckpt:
    ckpt.save({"x": 1}, 1, overwrite=True)
with pytest.raises(penstock.CheckpointNotFoundError, match="no longer"):
    engine.load_checkpoint("out")
with penstock.Checkpointer("out/penstock", ranks="alone") as ckpt:
    ckpt.delete(1)
with pytest.raises(penstock.CheckpointNotFoundError, match="no checkpoint of step 1"):
    engine.load_checkpoint("out")
"""

# ZeRO-3 merges weights from the files of all ranks to load them alone.
WEIGHTS_ALONE = """
def gathered(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return weight(engine)

config["zero_optimization"]["stage"] = 3
engine = make()
own = engine.checkpoint_engine
use(engine)
train(engine)
engine.save_checkpoint("out")
fresh = make()
use(fresh)
assert not gathered(fresh).equal(gathered(engine))
fresh.load_checkpoint("out", load_optimizer_states=False)
assert gathered(fresh).equal(gathered(engine))

engine.checkpoint_engine = own
engine.save_checkpoint("theirs")
fresh.checkpoint_engine = own
train(fresh)
assert not gathered(fresh).equal(gathered(engine))
fresh.load_checkpoint("theirs", load_optimizer_states=False)
assert gathered(fresh).equal(gathered(engine))
"""


@pytest.mark.multirank
@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_job_resumes_exactly(stage, tmp_path):
    program = PROGRAM.replace('"stage": 1', f'"stage": {stage}')
    check_exact_resume(program, tmp_path, ranks=2)


@pytest.mark.multirank
@pytest.mark.parametrize("tag", [None, "last"])
def test_a_kill_between_the_commit_and_latest_leaves_a_whole_checkpoint(tag, tmp_path):
    # With `keep_last`, retention does not keep the step that `latest` still names.
    program = PROGRAM.replace("use(engine)", 'use(engine, retention={"keep_last": 1})')
    program = program.replace(
        'engine.save_checkpoint("checkpoints")',
        f'engine.save_checkpoint("checkpoints", tag={tag!r})',
    )
    unbroken = run(program, tmp_path / "unbroken", ranks=2)
    assert unbroken.text.count("(logged once)") == 1
    program = DIE + (BEFORE_THE_TAG_LEADS_THERE if tag else BEFORE_LATEST) + program
    killed = run(program, tmp_path / "killed", ranks=2)
    assert set(killed.losses) == {1, 2, 3, 4}, killed.text
    resumed = run(program, tmp_path / "killed", ranks=2)
    assert set(resumed.losses) == {4, 5, 6}, resumed.text
    assert killed.losses | resumed.losses == unbroken.losses


@pytest.mark.parametrize(
    "checks", [TAGS, DAMAGE, WEIGHTS_ALONE], ids=["tags", "damage", "weights_alone"]
)
def test_one_rank_writes_and_reads(checks, tmp_path):
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = run(PRELUDE + LOOK + checks, tmp_path, environment=one_rank | where)
    assert ended.returncode == 0, ended.text
