"""Compiled layers: the same numbers, few compilations for many lengths, and those are reported."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memtrain.errors import LaunchError
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.functions import attention_switched
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.loading.compiled_layers import (
    CompiledGraphs,
    compile_layers,
    recompute_compiled,
)
from memtrain.trainers.model.loading.lora_layers import round_together
from memtrain.trainers.model.offload.checkpointing import checkpoint_layers
from memtrain.trainers.online.generation.native_sampler import NativeSampler
from memtrain.trainers.online.generation.protocol import Group, Sampling

ROWS = [(5, 9, 9), (4, 4, 4, 4), (17,), (2, 3, 11, 6), (8, 8)]


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def made(tiny, dtype=torch.float32, *, lora: bool = False) -> nn.Module:
    model = tiny(seed=1).to(dtype)
    set_attention(model, AttentionBackend.TORCH_CPU)
    if lora:
        torch.manual_seed(0)
        model = add_adapter(model, Adapter.model_validate({"r": 4, "alpha": 8.0}))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.05)
    return model.train()


def gradients(model: nn.Module, lengths: tuple[int, ...]) -> list[Tensor]:
    """Of the mean log-prob of rows that lie end to end."""
    layout = packed_layout(lengths)
    ids = torch.randint(0, 128, (1, sum(lengths)), generator=torch.Generator().manual_seed(sum(lengths)))
    model.zero_grad()
    logits = model(input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False).logits
    logits.float().log_softmax(-1)[..., 0].mean().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.slow  # Minutes of compiling.
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_compiled_layers_have_the_same_gradients_at_every_length(tiny_qwen3, lora, checkpointed, dtype):
    """Captured and differentiated by torch's compiler, but not fused: only the order of sums differs."""
    model = made(tiny_qwen3, dtype, lora=lora)
    round_together(model, False)
    if checkpointed:
        checkpoint_layers(model, 1)
    expected = [gradients(model, lengths) for lengths in ROWS]
    compile_layers(model, backend="aot_eager")
    if checkpointed:
        checkpoint_layers(model, 1, recompute_compiled())
    reported = []
    watch = CompiledGraphs(lambda step, text: reported.append((step, text)))
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for step, lengths in enumerate(ROWS, 1):
        for grad, plain in zip(gradients(model, lengths), expected[step - 1], strict=True):
            assert (grad - plain).float().norm() <= limit * plain.float().norm() + 1e-9
        watch.stepped(step)
    assert 0 < watch.num_reported <= 8
    assert reported[0][0] == 1
    assert "layers were compiled: " in reported[0][1]
    assert len(reported) == 1, "Other lengths were compiled again."


def test_completions_are_written_by_the_layers_as_they_are(tiny_llama):
    model = tiny_llama().eval()
    groups = [Group((5, 9, 2), 3, seed=1)]
    plain = NativeSampler(model, AttentionBackend.TORCH_CPU, 4).generate(groups, Sampling(max_tokens=6))
    compile_layers(model, backend="aot_eager")
    again = NativeSampler(model, AttentionBackend.TORCH_CPU, 4).generate(groups, Sampling(max_tokens=6))
    assert again == plain
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_attention_stays_outside_of_compiled_layers_whatever_model_comes_after(tiny_llama):
    """A reward model, or a sampler that attends otherwise while it writes, must not bring it back."""
    model = made(tiny_llama)
    compile_layers(model, backend="aot_eager")
    set_attention(tiny_llama(), AttentionBackend.TORCH_CPU)
    with attention_switched(model, "eager"):
        pass
    attention: Any = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    assert attention._torchdynamo_disable


def test_models_that_cannot_be_compiled_are_refused(tiny_llama):
    with pytest.raises(LaunchError, match="cannot be compiled one by one"):
        compile_layers(nn.Linear(2, 2))
    model = tiny_llama()
    model.config.attention_dropout = 0.1
    with pytest.raises(LaunchError, match="drops numbers at random"):
        compile_layers(model)


@dataclass
class Doubled:
    """A layer of one weight, whose other input may want gradients."""

    weight: Tensor

    def __call__(self, hidden: Tensor, other: Tensor) -> Tensor:
        return hidden * self.weight + other


def test_a_recomputed_layer_keeps_its_inputs_alone_and_gives_every_gradient():
    """Of h * w + o: 8 ones for w, the weight for h, 2 rows for o; nothing but h and o is kept."""
    weight, hidden, other = (
        torch.full(shape, value, requires_grad=True)
        for shape, value in (((), 3.0), ((1, 2, 4), 1.0), ((4,), 5.0))
    )
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = recompute_compiled()(Doubled(weight), hidden, other)
    assert {one.data_ptr() for one in kept} == {hidden.data_ptr(), other.data_ptr()}
    made.sum().backward()
    assert weight.grad == 8
    assert torch.equal(hidden.grad, torch.full((1, 2, 4), 3.0))
    assert torch.equal(other.grad, torch.full((4,), 2.0))


def test_a_layer_that_keeps_other_tensors_when_it_is_computed_again_is_refused():
    factors = [torch.ones(2), 1.0]
    made = recompute_compiled()(
        lambda hidden: hidden.exp() * factors.pop(), torch.ones(2, requires_grad=True)
    )
    with pytest.raises(LaunchError, match="kept 1 tensors and 2 when it was computed again"):
        made.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_inductors_kernels_are_within_rounding(tiny_qwen3, lora, checkpointed):
    """Needs a C++ compiler. Relative error of all gradients in float32; measured 4e-7."""
    model = made(tiny_qwen3, lora=lora)
    expected = torch.cat([one.flatten() for one in gradients(model, ROWS[0])])
    compile_layers(model)
    if checkpointed:
        checkpoint_layers(model, 1, recompute_compiled())
    assert all(
        layer._compiled_call_impl
        for layer in model.modules()
        if isinstance(layer, GradientCheckpointingLayer)
    )
    found = torch.cat([one.flatten() for one in gradients(model, ROWS[0])])
    assert (found - expected).norm() / expected.norm() < 2e-6
