import random

import numpy as np
import pytest
import torch

from penstock.core.errors import UnsupportedStateError
from penstock.core.markers import Rng
from penstock.testing.providers import check_provider


def draw():
    return (random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(),
            torch.rand(3).tolist(), torch.randperm(5).tolist())  # fmt: skip


@pytest.fixture(autouse=True)
def seeded():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def test_the_process_redraws_the_same(save):
    draw()
    stored = save({"rng": Rng()})
    expected = [draw() for _ in range(3)]
    stored.restore({"rng": Rng()})
    assert [draw() for _ in range(3)] == expected


class Drawer:
    """An object that draws during its load."""

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        draw()


def test_random_state_is_set_after_everything_else_is_loaded(save):
    stored = save({"rng": Rng(), "drawer": Drawer()})
    expected = draw()
    stored.restore({"rng": Rng(), "drawer": Drawer()})
    assert draw() == expected


class Looker:
    """Draws when asked for its state, like torchdata's loader before its first batch."""

    def __init__(self, generator=None):
        self.generator = generator

    def state_dict(self):
        torch.rand(1, generator=self.generator)
        return {"a": random.random()}

    def load_state_dict(self, state):
        pass


def test_random_state_is_captured_after_all_that_may_draw(save):
    generator = torch.Generator()
    state = {
        "rng": Rng(),
        "first": [generator, Looker(generator)],
        "deep": {"own": random.Random(1), "last": [Looker()]},
    }
    stored = save(state)
    expected = draw(), torch.rand(1, generator=generator)
    stored.restore(state)
    assert (draw(), torch.rand(1, generator=generator)) == expected
    tree = stored.load()
    assert list(tree) == list(state)
    assert list(tree["deep"]) == ["own", "last"]
    assert list(tree["first"][0]) == ["state"]


def test_random_state_inside_another_object_is_captured_with_it(save):
    class Holder:
        """Has a generator in its state."""

        def __init__(self):
            self.generator = torch.Generator()

        def state_dict(self):
            return {"list": [self.generator, torch.ones(1)], "n": 1}

        def load_state_dict(self, state):
            self.generator.set_state(state["list"][0]["state"])

    holder = Holder()
    stored = save({"h": holder, "rng": Rng()})
    expected = torch.rand(2, generator=holder.generator)
    stored.restore({"h": holder, "rng": Rng()})
    assert torch.equal(torch.rand(2, generator=holder.generator), expected)


GENERATORS = {
    "torch": (
        lambda: torch.Generator().manual_seed(5),
        lambda g: torch.rand(3, generator=g).tolist(),
    ),
    "python": (lambda: random.Random(5), lambda g: [g.random(), g.gauss(0, 1)]),
    "pcg": (lambda: np.random.default_rng(5), lambda g: g.normal(size=3).tolist()),
    "mt": (lambda: np.random.Generator(np.random.MT19937(5)), lambda g: g.normal(size=3).tolist()),
    "philox": (
        lambda: np.random.Generator(np.random.Philox(5)),
        lambda g: g.integers(9, size=3, dtype=np.int32).tolist(),
    ),
    "sfc": (lambda: np.random.Generator(np.random.SFC64(5)), lambda g: g.normal(size=3).tolist()),
    "random state": (lambda: np.random.RandomState(5), lambda g: [g.normal(), *g.rand(2)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_resume_exactly(save, providers, kind):
    make, use = GENERATORS[kind]
    generator = make()
    use(generator)
    stored = save({"g": generator})
    expected = [use(generator) for _ in range(3)]
    target = make()
    state = {"g": target}
    stored.restore(state)
    assert state["g"] is target
    assert [use(target) for _ in range(3)] == expected

    def equal(one, other):
        return save({"g": one}).data == save({"g": other}).data

    check_provider(make, use_only(use), equal, providers=providers)


def use_only(use):
    return lambda generator: use(generator) and None


def test_reading_cuda_state_does_not_start_cuda(save):
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use already")
    stored = save({"rng": Rng()})
    assert not torch.cuda.is_initialized()
    assert not any(o.path[1].startswith("cuda") for o in stored.tree.objects)


@pytest.mark.gpu
def test_cuda_redraws_the_same(save):
    torch.rand(1, device="cuda")
    stored = save({"rng": Rng()})
    expected = torch.rand(4, device="cuda").tolist()
    stored.restore({"rng": Rng()})
    assert torch.rand(4, device="cuda").tolist() == expected


def test_describing_and_planning_draw_nothing(save):
    expected = (random.getstate(), torch.get_rng_state().tolist())
    stored = save({"rng": Rng()})
    stored.plan({"rng": Rng()})
    assert (random.getstate(), torch.get_rng_state().tolist()) == expected


def test_one_generator_kind_can_be_restored_alone(save):
    stored = save({"rng": Rng()})
    expected = draw()
    elsewhere = draw()
    del elsewhere
    state = np.random.get_state(legacy=False)
    stored.restore({"rng": Rng()}, include=["rng/torch", "rng/python"])
    assert torch.rand(3).tolist() == expected[4]
    assert random.random() == expected[0]
    assert str(np.random.get_state(legacy=False)) == str(state)


def test_generators_of_another_kind_are_a_problem(save):
    stored = save({"g": np.random.default_rng(1), "t": torch.ones(1)})
    (problem,) = stored.plan({"g": np.random.Generator(np.random.SFC64(1))}).problems
    assert problem.startswith("g is stored as a numpy.random")
    placement = stored.plan({"t": random.Random(), "new": Rng()})
    assert placement.missing == [("new",)]
    assert placement.problems == [
        "t is a random generator in the template, but is not stored as one"
    ]
    assert not stored.plan({"new": Rng()}, include="t").missing


def test_generators_without_state_are_refused(save):
    with pytest.raises(UnsupportedStateError, match="a/g is a SystemRandom"):
        save({"a": {"g": random.SystemRandom()}})
