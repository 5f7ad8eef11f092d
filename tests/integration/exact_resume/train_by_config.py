"""Trains, saves and resumes as its first argument, a configuration file, says: nothing else does.

    python train_by_config.py penstock.toml 6

Prints the losses and the weights' digest as one JSON line.
"""

import hashlib
import json
import sys

import torch

import penstock


def main(config, steps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.Dropout(), torch.nn.Linear(256, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": penstock.Rng(), "step": 0}
    losses = {}
    with penstock.Checkpointer.from_config(config) as ckpt:
        resumed = None
        if ckpt.latest() is not None:
            resumed = ckpt.restore(state).step
        while state["step"] < steps:
            loss = model(torch.randn(16, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["step"] += 1
            losses[state["step"]] = loss.item().hex()
            if state["step"] % 2 == 0:
                handle = ckpt.save(state, step=state["step"])
        handle.result()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(json.dumps({"resumed": resumed, "losses": losses, "weights": digest.hexdigest()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
