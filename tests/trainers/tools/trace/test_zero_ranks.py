"""The arithmetic of DeepSpeed's stage 2 against traces of every rank; another may need the most each time."""

from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch.distributed as dist
from trace_cases import EVERY, HALF, LLAMA, QWEN, sft, zero

from memtrain.trainers.tools.trace import trace as run

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.filterwarnings("ignore"),
]
LARGE = LLAMA | {"vocab_size": 8192}
"""A vocabulary whose embedding is several layers."""
COPIES = HALF | {"master_weights": True}


def highest_of_ranks(case, monkeypatch):
    """Highest traced peak of any rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    peaks, count = [], case.settings.num_processes
    for rank in range(count):

        @contextmanager
        def as_rank(settings, rank=rank):
            dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
            try:
                yield
            finally:
                dist.destroy_process_group()

        monkeypatch.setattr(run, "as_fake_ranks", as_rank)
        peaks.append(run.trace(case.job).recorder.peak_bytes)
    return max(peaks)


ON_GPU = {"device": "cuda", "attention": "torch_varlen"}


def slowly(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("config", "num_ranks", "num_micro_batches", "changes"),
    [
        (LARGE, 3, 1, {}),
        (LARGE, 3, 2, EVERY),
        (LARGE, 2, 1, COPIES),
        (QWEN, 3, 2, EVERY | COPIES),
        slowly(LLAMA, 4, 1, {}),
        slowly(LLAMA, 4, 2, EVERY | COPIES),
        slowly(QWEN, 5, 1, EVERY),
        slowly(LARGE, 5, 2, COPIES),
        slowly(LARGE | {"tie_word_embeddings": True}, 3, 2, EVERY),
        slowly(LLAMA | {"num_hidden_layers": 6, "vocab_size": 512}, 3, 2, EVERY | COPIES),
    ],
)
def test_the_rank_that_needs_the_most_is_predicted(
    config, num_ranks, num_micro_batches, changes, monkeypatch
):
    """Whole weights are laid out for every part of them, and a bucket is summed in copies: 5 to 12 % too low
    without; parts in float32 were counted as whole weights, and twice: up to 30 % too high."""
    case = sft(config, zero(2, config) | {"num_processes": num_ranks} | changes, num_micro_batches)
    peak = case.estimated().peak
    batch = sum(one.num_bytes for one in peak.owners if one.owner == "batch")
    found = highest_of_ranks(case, monkeypatch)
    assert found * 0.999 <= peak.num_bytes - batch <= found * 1.04


@pytest.mark.parametrize(
    ("config", "num_ranks", "num_micro_batches"),
    [
        (LLAMA | {"num_hidden_layers": 6}, 3, 1),
        slowly(LLAMA | {"num_hidden_layers": 6}, 8, 1),
        slowly(LARGE | {"tie_word_embeddings": True}, 5, 1),
    ],
)
def test_stage_1_lets_gradients_go_as_they_are_summed_in_steps_of_one_micro_batch(
    config, num_ranks, num_micro_batches, monkeypatch
):
    """On a GPU; they were counted until the last was there: up to 31 % too high."""
    case = sft(config, zero(1, config) | ON_GPU | {"num_processes": num_ranks} | EVERY, num_micro_batches)
    peak = case.estimated().peak
    batch = sum(one.num_bytes for one in peak.owners if one.owner == "batch")
    found = highest_of_ranks(case, monkeypatch)
    assert found * 0.999 <= peak.num_bytes - batch <= found * 1.01
