"""Captured passes of the native sampler on a GPU: tokens of passes by hand, and no harm by a broken one."""

from collections.abc import Callable

import pytest
import torch

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.build.components import build
from memtrain.trainers.online.generation.backend import build_sampler, sampling_of
from memtrain.trainers.online.generation.decode_graphs import DecodeGraphs
from memtrain.trainers.online.generation.protocol import Group
from memtrain.trainers.runtime.cuda_graphs import CudaGraphs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("words", [(), ("model.adapter={r: 4}",)], ids=["whole", "adapter"])
def test_captured_passes_write_the_same_tokens(
    words: tuple[str, ...], plan_of: Callable[..., Plan], cuda: torch.device
):
    """Groups of several lengths, ends in the middle of a block, rows that are refilled."""
    plan = plan_of("grpo", "generate.backend=native", "generate.max_tokens=40", *words, dtype="float32")
    assert plan.settings.cuda_graphs
    built = build(plan)
    told: list[str] = []
    groups = [Group(tuple(range(3, 5 + 4 * number)), 3, seed=number) for number in range(5)]
    found = [
        build_sampler(plan, built, max_rows=6, graphs=graphs).generate(groups, sampling_of(plan, built))
        for graphs in (DecodeGraphs(CudaGraphs, told.append), None)
    ]
    assert told == []
    for captured, by_hand in zip(sum(found[0], []), sum(found[1], []), strict=True):
        assert captured.token_ids == by_hand.token_ids
        assert captured.logprobs == pytest.approx(by_hand.logprobs, abs=1e-4)


def test_a_broken_capture_leaves_stream_memory_and_random_numbers_as_they_were(cuda: torch.device):
    held = torch.ones(4, device=cuda)
    graphs = DecodeGraphs(CudaGraphs, lambda text: None)
    stream = torch.cuda.current_stream()
    torch.cuda.manual_seed(5)
    expected = torch.randn(8, device=cuda)
    torch.cuda.manual_seed(5)
    assert graphs.record(lambda: held.add_(held.sum().item())) is None
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.randn(8, device=cuda), expected)
    torch.cuda.empty_cache()
    start = CudaGraphs().record(lambda: held.add_(1.0))
    start()
    assert held.tolist() == [2.0] * 4


def test_a_pass_that_waits_is_seen_before_it_is_captured(cuda: torch.device):
    held, told = torch.ones(4, device=cuda), []
    graphs = DecodeGraphs(CudaGraphs, told.append)
    graphs.rehearse(lambda: held.add_(1.0))
    assert graphs.is_rehearsed
    graphs.rehearse(lambda: held.add_(held.sum().item()))
    assert not graphs.is_on
    assert "waits for the device" in told[0]
