"""Memory that successive saves reuse, and a thread that prepares it for the next."""

from types import SimpleNamespace

from penstock.core.concurrency.workers import Workers
from penstock.core.config.model import load_config
from penstock.core.save.pending import Pending
from penstock.core.save.prepare import KeptStaging

MIB = 1 << 20


class Late(Workers):
    """Keeps the tasks of separate threads, to run them later."""

    def __init__(self):
        super().__init__(1)
        self.tasks = []

    def spawn(self, name, task):
        self.tasks.append(task)


def kept():
    workers = Late()
    return KeptStaging(load_config({"backend": "memory://"}), workers, Pending()), workers.tasks


def test_memory_is_prepared_for_the_next_save():
    staging, tasks = kept()
    staging.touch(64 * MIB)
    tasks[0]()
    assert staging.staging.budget_bytes >= 64 * MIB
    staging.close()


def test_memory_of_a_save_begun_meanwhile_is_left_alone():
    staging, tasks = kept()
    staging.touch(64 * MIB)
    request = SimpleNamespace(staging_bytes=8 * MIB, copied_from=None, mode="blocking")
    of_save = staging.get(request, skip=())
    before = of_save.budget_bytes
    tasks[0]()
    assert staging.staging is of_save
    assert of_save.budget_bytes == before
    staging.close()
