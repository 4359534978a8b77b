"""Noise on the embeddings: its size by the tokens of each row, in training alone.

Source: Jain et al. 2023, arXiv:2310.05914, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.row_layout import Layout, packed_layout, shared_layout
from memtrain.trainers.model.loading.neftune import add_noise

ALPHA = 5.0
WIDTH = 512


@pytest.fixture
def model(tiny_llama: Callable[..., Any]) -> Any:
    """One thin layer on wide embeddings: noise is looked at, not attention."""
    made = tiny_llama(num_hidden_layers=1, hidden_size=WIDTH, intermediate_size=8)
    set_attention(made, "torch_cpu")
    return made


def noise_of(model: Any, **inputs: Any) -> Tensor:
    """[T, D]: embeddings of a pass less the plain ones."""
    table, seen = model.get_input_embeddings(), []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    model(**inputs, use_cache=False)
    handle.remove()
    return (seen[0] - table.weight[inputs["input_ids"]]).detach()[0]


def assert_uniform(noise: Tensor, bound: float) -> None:
    """Numbers of Uniform(-bound, bound): none beyond it, some near it, and its variance."""
    assert float(noise.abs().max()) <= bound * 1.0001
    assert float(noise.abs().max()) > 0.98 * bound
    assert float(noise.square().mean()) == pytest.approx(bound**2 / 3, rel=0.1)
    assert abs(float(noise.mean())) < 0.1 * bound


def passed(model: Any, layout: Layout) -> Tensor:
    ids = torch.randint(0, 128, (1, layout.num_tokens), generator=torch.Generator().manual_seed(0))
    return noise_of(model, input_ids=ids, position_ids=layout.position_ids, layout=layout)


def test_each_row_of_a_packed_one_has_the_noise_of_its_own_length(model: Any):
    lengths = [4, 40, 9]
    undo = add_noise(model.train(), ALPHA)
    torch.manual_seed(0)
    noise = passed(model, packed_layout(lengths))
    for part, length in zip(noise.split(lengths), lengths, strict=True):
        assert_uniform(part, ALPHA / math.sqrt(length * WIDTH))
    undo()
    assert not passed(model, packed_layout(lengths)).any()


def test_a_prompt_that_is_shared_has_the_mean_variance_of_its_rows(model: Any):
    """A prompt of 12 with answers of 4 and 20, and one of 6 with an answer of 10."""
    add_noise(model.train(), ALPHA)
    torch.manual_seed(0)
    noise = passed(model, shared_layout([(12, [4, 20]), (6, [10])]))
    prompt, other, *answers = noise.split([12, 6, 4, 20, 10])
    for part, row in zip(answers, (16, 32, 16), strict=True):
        assert_uniform(part, ALPHA / math.sqrt(row * WIDTH))
    variance = (ALPHA**2 / (16 * WIDTH) + ALPHA**2 / (32 * WIDTH)) / 2
    assert_uniform(prompt, math.sqrt(variance))
    assert_uniform(other, ALPHA / math.sqrt(16 * WIDTH))


def test_there_is_none_where_nothing_is_learned(model: Any):
    add_noise(model, ALPHA)
    layout = packed_layout([7])
    assert not passed(model.eval(), layout).any()
    with torch.no_grad():
        assert not passed(model.train(), layout).any()
    torch.manual_seed(1)
    first = passed(model, layout)
    torch.manual_seed(1)
    assert torch.equal(passed(model, layout), first)
    assert not torch.equal(passed(model, layout), first)
