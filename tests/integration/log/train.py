"""Trains, logs every step, and prints each loss once its step is logged; run until it is killed."""

import sys

from tests.integration.log.trainings import Training

import penstock

root, last, save_every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
training = Training("AdamW fused", "clip")
sync = int(sys.argv[4]) if sys.argv[4:] else None
with penstock.Checkpointer(root, log_sync=sync) as ckpt:
    first = ckpt.resume(training.state)
    print("from", first, flush=True)
    for step in range(first, last):
        (loss,) = training.step(step)
        if step % save_every == 0:
            ckpt.save(training.state, step, mode=None if step else "blocking")
        else:
            assert ckpt.log(training.state, step)
        print(step, loss.hex(), flush=True)
