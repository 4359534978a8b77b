"""Words about the host: its memory beside the prediction."""

from collections.abc import Callable

from memtrain.memory.plan.plan import Owned, Plan
from memtrain.trainers.protocols.events import HostMemoryEvent
from memtrain.trainers.run_folder.report.time_words import host_memory_words

GIB = 2**30


def test_the_hosts_memory_stands_beside_its_prediction_and_largest_owners(make_plan: Callable[..., Plan]):
    """8 + 2 + 1 GiB are predicted; the third owner is not named."""
    sizes = {"weights": 8 * GIB, "gradients": 2 * GIB, "dataset index": GIB}
    owners = tuple(Owned(owner=name, num_bytes=size) for name, size in sizes.items())
    plan, found = (
        make_plan().model_copy(update={"host": owners}),
        HostMemoryEvent(step=3, resident=12 * GIB, processes=2),
    )
    assert host_memory_words(found, plan) == (
        "12.00 GiB measured in 2 processes, 11.00 GiB predicted: weights 8.00 GiB, gradients 2.00 GiB"
    )
    assert host_memory_words(found, None) == "12.00 GiB measured in 2 processes"
    assert host_memory_words(None, plan) == ""
