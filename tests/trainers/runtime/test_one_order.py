"""Deterministic kernels, as a plan turns them on."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic as filling

from memtrain.memory.plan.settings import Settings
from memtrain.trainers.build.engine import make_accelerator
from memtrain.trainers.runtime.one_order import WORKSPACE, refusal_of, unordered_operator


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WORKSPACE, raising=False)
    was = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(was[0])
    filling.fill_uninitialized_memory = was[1]


@pytest.mark.parametrize("is_asked", [False, True])
def test_the_accelerator_turns_them_on_where_the_plan_says_so(is_asked: bool):
    """Strictly: torch's kernels of attention keep their own order under a flag that only warns."""
    said = {"device": "cpu", "threads": torch.get_num_threads(), "num_processes": 1}
    make_accelerator(Settings.model_construct(**said, deterministic=is_asked))
    assert torch.are_deterministic_algorithms_enabled() is is_asked
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ.get(WORKSPACE) == (":4096:8" if is_asked else None)
    assert filling.fill_uninitialized_memory is not is_asked


def test_an_operator_without_an_order_is_named_with_the_way_out():
    """In torch's words for a sum over the vocabulary."""
    said = "cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.use_...'"
    assert unordered_operator(RuntimeError(said)) == "cumsum_cuda_kernel"
    assert unordered_operator(RuntimeError("CUDA out of memory")) == ""
    text = refusal_of("cumsum_cuda_kernel").text()
    assert "no kernel of cumsum_cuda_kernel" in text
    assert "train.deterministic: false" in text
