"""Ranks as threads of one process, with torch's threaded process group."""

import threading

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg


def run_ranks(count, work):
    """Return what `work(rank)` returns on each of `count` ranks, which may communicate."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()
    results, errors = [None] * count, []

    def rank_thread(rank):
        dist.init_process_group("threaded", rank=rank, world_size=count, store=store)
        try:
            results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)  # wakes the others
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return results
