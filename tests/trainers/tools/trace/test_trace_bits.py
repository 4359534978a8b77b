"""What the trace plays of bitsandbytes: layouts by hand, and against the package where it is installed."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trace_cases import CASES, HALF, LLAMA, sft

from memtrain.memory.estimate.bitsandbytes_states import blockwise_states
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.model import Adapter
from memtrain.recipes.sections.optim import Optim
from memtrain.trainers.memory_meter.live_tensors import TensorPeak
from memtrain.trainers.tools.trace.bitsandbytes import BlockwiseStates, Packed4bit, Packed8bit
from memtrain.trainers.tools.trace.fake_model import bare_model
from memtrain.trainers.tools.trace.steps import tensors_of
from memtrain.trainers.tools.trace.trace import trace

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="needs bitsandbytes (pip install 'memtrain[quant]')"
)
CUDA = {"device": "cuda", "attention": "torch_varlen"}


def storage_bytes(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def states_of(optimizer, *shapes):
    weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    made = optimizer(weights)
    made.step()
    return storage_bytes(tensors_of([made.state[weight] for weight in weights]))


def played(is_8bit, is_paged=False):
    return lambda weights: BlockwiseStates([{"params": weights}], Optim(), is_8bit=is_8bit, is_paged=is_paged)


def test_8bit_states_are_a_byte_a_number_and_a_scale_for_256():
    """100 x 64 numbers in two states of 25 scales each; two tables of 256; 63 x 64 numbers in float32."""
    tables = 2 * 256 * 4
    assert states_of(played(True), (100, 64)) == 2 * (6400 + 25 * 4) + tables
    assert states_of(played(True), (100, 64), (63, 64)) == 2 * (6400 + 25 * 4) + tables + 2 * 63 * 64 * 4


@needs_bitsandbytes
@pytest.mark.parametrize("shapes", [((100, 64),), ((4096, 3),), ((63, 64), (130, 70), (5,))])
def test_8bit_states_are_laid_out_as_bitsandbytes_lays_them(shapes):
    import bitsandbytes

    real = states_of(lambda weights: bitsandbytes.optim.AdamW8bit(weights, lr=0.0), *shapes)
    assert states_of(played(True), *shapes) == real


@needs_bitsandbytes
def test_4bit_weights_are_packed_as_bitsandbytes_packs_them():
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(
        352, 128, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=True
    )
    layer.load_state_dict({"weight": torch.randn(128, 352, dtype=torch.bfloat16)})
    layer = layer.to("cpu")
    state = layer.weight.quant_state
    if state is None:
        layer.weight._quantize("cpu")
        state = layer.weight.quant_state
    real = [layer.weight.data, state.absmax, state.state2.absmax]
    ours = Packed4bit(nn.Linear(352, 128, bias=False, dtype=torch.bfloat16))
    assert [t.nbytes for t in (ours.weight, ours.absmax, ours.absmax_of_absmax)] == [t.nbytes for t in real]


@needs_bitsandbytes
def test_8bit_weights_keep_the_inputs_of_checkpointed_layers():
    """bfloat16 [64, 128]: held by the product itself, although the layer is checkpointed."""
    from bitsandbytes.nn import Linear8bitLt

    real = Linear8bitLt(128, 256, bias=False, has_fp16_weights=False).to("cpu")
    for layer in (real, Packed8bit(nn.Linear(128, 256, bias=False, dtype=torch.bfloat16))):
        hidden = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
        with torch.no_grad():
            layer(hidden)
        with TensorPeak() as counted:
            out = checkpoint(lambda x, layer=layer: layer(x * 1.0).sum(), hidden, use_reentrant=False)
        assert counted.live_bytes >= 64 * 128 * 2 + out.nbytes


def test_4bit_weights_take_half_a_byte_and_their_scales():
    """352 x 128 weights: 22528 bytes; 704 scales of a byte, 3 of those in float32; tables and an offset."""
    layer = Packed4bit(nn.Linear(352, 128, bias=False, dtype=torch.bfloat16))
    held = [*layer.parameters(), *layer.buffers()]
    assert storage_bytes(held) == 22528 + 704 + 3 * 4 + (16 + 256 + 1) * 4


def test_states_of_large_tensors_are_paged_and_those_of_small_ones_are_not():
    """Of LLAMA only embedding and head (2048 x 128) have 100 000 numbers or more: float32, twice each."""
    changes = {"optimizer": "paged_adamw"} | HALF | CUDA
    case = sft(LLAMA, changes)
    found = trace(case.job)
    on_host = 2 * 2 * 4 * 2048 * 128
    assert found.host["optimizer states"] == on_host
    reported = blockwise_states(case.settings, shape_of(LLAMA))
    assert reported.host == on_host
    weights = sum(p.numel() for p in bare_model(LLAMA, Settings(**vars(case.settings))).parameters())
    assert reported.device == 2 * 4 * weights - on_host


def test_the_arithmetic_knows_packed_weights():
    """As far as tables go, which every one of the fourteen maps has on a GPU: 1092 bytes each."""
    case = replace(CASES["QLoRA"], changes=CASES["QLoRA"].changes | CUDA)
    model = bare_model(LLAMA, case.settings)
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    reported = next(phase.num_bytes for phase in case.estimated().phases if phase.phase == "load")
    assert reported == pytest.approx(held - 14 * 1092, rel=0.002)


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_dora_beside_packed_weights_is_traced(bits):
    """Its norms are taken of unpacked weights: of two halves in a byte they have no such shape."""
    adapter = Adapter(r=8, kind="dora", target_modules=("down_proj",))
    case = sft(LLAMA, HALF | CUDA | {"adapter": adapter, "quantize": bits})
    origins = {(one.operator, one.num_bytes) for one in trace(case.job).recorder.origins}
    unpacked = 128 * 352 * (2 if bits == "4bit" else 4)
    assert ("zeros.default" if bits == "4bit" else "mul.Tensor", unpacked) in origins
