"""Words about the host: its share of a step, its memory beside the prediction."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from memtrain.memory.plan.plan import Owned, Plan
from memtrain.trainers.protocols.events import HostEvent, HostMemoryEvent
from memtrain.trainers.run_folder.report.time_words import host_memory_words, host_words

GIB = 2**30


def on(plan: Plan, device: str) -> Plan:
    return plan.model_copy(update={"settings": plan.settings.model_copy(update={"device": device})})


@pytest.mark.parametrize(
    ("is_on_gpu", "words"),
    [
        (True, "GPU waited for the host: 12.3% of step 1,204"),
        (False, "12.3% of step 1,204 is Python, not torch's operators"),
    ],
)
def test_the_hosts_share_of_a_step_is_told(is_on_gpu: bool, words: str):
    event = HostEvent(step=1204, waited=0.1234, seconds=0.5)
    assert host_words(event, is_on_gpu=is_on_gpu) == words
    several = replace(event, micro_batches=64)
    last = "step 1,204 (the last of its 64 micro-batches)"
    assert host_words(several, is_on_gpu=is_on_gpu) == words.replace("step 1,204", last)
    assert host_words(None, is_on_gpu=is_on_gpu) == ""


def test_the_hosts_memory_stands_beside_its_prediction_and_largest_owners(make_plan: Callable[..., Plan]):
    """8 + 2 + 1 GiB are predicted; the third owner is not named."""
    sizes = {"weights": 8 * GIB, "gradients": 2 * GIB, "dataset index": GIB}
    owners = tuple(Owned(owner=name, num_bytes=size) for name, size in sizes.items())
    plan, found = (
        on(make_plan(), "cuda").model_copy(update={"host": owners}),
        HostMemoryEvent(step=3, resident=12 * GIB, processes=2),
    )
    assert host_memory_words(found, plan) == (
        "12.00 GiB measured in 2 processes, 11.00 GiB predicted: weights 8.00 GiB, gradients 2.00 GiB"
    )
    tiny = Owned(owner="dataset index", num_bytes=GIB // 100)
    alone = plan.model_copy(update={"host": (owners[0], tiny)})
    assert host_memory_words(found, alone).endswith("8.01 GiB predicted: weights 8.00 GiB")
    assert host_memory_words(found, None) == "12.00 GiB measured in 2 processes"
    assert host_memory_words(None, plan) == ""


@pytest.mark.parametrize(
    ("device", "resident", "is_told"), [("cpu", 12, True), ("cpu", 11, False), ("cuda", 12, False)]
)
def test_a_run_on_a_cpu_says_that_freed_blocks_are_not_predicted_where_it_needed_more(
    make_plan: Callable[..., Plan], device: str, resident: int, is_told: bool
):
    owners = (Owned(owner="the run itself", num_bytes=11 * GIB),)
    plan = on(make_plan(), device).model_copy(update={"host": owners})
    words = host_memory_words(HostMemoryEvent(step=3, resident=resident * GIB, processes=1), plan)
    assert ("freed blocks" in words) is is_told
