"""Growth of memory: a steady rise is reported once, with what grew; normal runs say nothing."""

import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

from memtrain.trainers.loop.observers import BLOCK_STEPS, NUM_BLOCKS, GrowthWatch, Place, steady_growth
from memtrain.trainers.memory_meter.object_census import ObjectCensus

MIB, GIB = 2**20, 2**30
WINDOW = BLOCK_STEPS * NUM_BLOCKS


class Nobody:
    """A census that finds nothing."""

    def grown(self) -> list[str]:
        return []


def notes_of(
    used: Callable[[int], float], tokens: Callable[[int], int] = lambda step: 100, steps: int = 2000
) -> list[tuple[int, str]]:
    """Notes of a run whose memory is `used` after each step."""
    found: list[tuple[int, str]] = []
    at = [0]
    place = Place("host", lambda: int(used(at[0])), lambda: 4 * GIB)
    watch = GrowthWatch([place], steps, Nobody, lambda step, text: found.append((step, text)))
    for step in range(1, steps + 1):
        at[0] = step
        watch.stepped(step, tokens(step))
    return found


def noise(step: int, most: int) -> int:
    """The same for every call with a step."""
    return random.Random(step).randrange(most)


def test_a_leak_is_reported_once_and_early_with_its_rate_and_its_end():
    """2 MiB a step under noise of 64 MiB: 4 GiB are full after some 2,000 steps, the end of the run."""
    ((step, text),) = notes_of(lambda step: GIB + 4 * MIB * step + noise(step, 16 * MIB))
    assert step <= 2 * WINDOW
    assert "host memory grows by 4.0 MiB a step" in text or "host memory grows by 3." in text
    assert "is used up after" in text
    assert "no Python object" in text


def test_a_leak_below_what_matters_is_not_reported():
    assert notes_of(lambda step: GIB + step * MIB // 8) == []


@pytest.mark.parametrize("seed", range(5))
def test_normal_runs_are_silent(seed: int):
    """Noise of freed blocks; longest batches so far; saves and evaluations; a start that levels off."""
    made = random.Random(seed)
    lengths = [int(made.lognormvariate(6, 1)) for _ in range(2001)]
    longest = [max(lengths[: step + 1]) for step in range(2001)]
    assert notes_of(lambda step: GIB + noise(step + 3000 * seed, 2 * GIB)) == []
    assert notes_of(lambda step: GIB + longest[step] * MIB, lambda step: lengths[step]) == []
    assert notes_of(lambda step: GIB + (step // 50) * 16 * MIB + noise(step, 8 * MIB)) == []
    assert notes_of(lambda step: 4 * GIB * (1 - 0.5 ** (step / 20)) + noise(step + seed, 64 * MIB)) == []
    assert notes_of(lambda step: GIB + step * 10 * MIB, lambda step: step) == [], "Rows grow longer."


def test_the_rate_is_the_slope_and_a_step_up_is_no_growth():
    assert steady_growth([10 * step for step in range(WINDOW)]) == 10
    assert steady_growth([0] * 24 + [1000] * 24) is None
    assert steady_growth([5] * WINDOW) is None


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """The module of a reward file."""
    made = ModuleType("memtrain_reward_leaky")
    made.__file__ = "/somewhere/leaky.py"
    made.__spec__ = None
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


LEAKY = """
SEEN, TEXTS = [], {}

class Cache:
    def __init__(self):
        self.rows = [0]

cache = Cache()
"""


def test_the_containers_that_grew_are_named_with_their_entries(module: ModuleType):
    exec(LEAKY, vars(module))
    steady = [torch.zeros(2**20) for _ in range(20)]
    census = ObjectCensus()
    for number in range(20):
        module.SEEN.append(torch.zeros(2**18))
        module.TEXTS[chr(97 + number) * 2**17] = number
        module.cache.rows.append(np.zeros(2**15))
    del steady
    first, second, third = census.grown()
    assert first == "a list, leaky.py: SEEN (+20 entries: float32 [262144] on cpu, 20.0 MiB)"
    assert second == "a list, leaky.py: cache.rows (+20 entries: numpy float64 [32768], 5.00 MiB)"
    assert third == "a dict, leaky.py: TEXTS (+20 entries: str: int, 2.50 MiB)"


def test_tensors_in_no_container_are_reported_by_type():
    class Link:
        def __init__(self, before: object) -> None:
            self.before, self.tensor = before, torch.zeros(2**17)

    chain: object = None
    census = ObjectCensus()
    for _ in range(20):
        chain = Link(chain)
    (text,) = census.grown()
    assert text == "tensors, float32 [131072] on cpu (+20, 10.0 MiB)"
    assert chain is not None
