"""Numbers on a GPU: wide sums of half-precision products, optimizers, random states, kernels of others."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from memtrain.memory.plan.plan import Plan
from memtrain.recipes.sections.model import Model
from memtrain.trainers.data.tokenize.tiny_tokenizer import NUM_TOKENS
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of
from memtrain.trainers.losses.head.linear import NllOptions, linear_nll
from memtrain.trainers.losses.head.linear_liger import liger_nll
from memtrain.trainers.losses.head.tiles import sums_half_in_fp32
from memtrain.trainers.model.loading.load import load_model
from memtrain.trainers.runtime.random_states import random_states
from memtrain.trainers.runtime.seed import random_state, restore_random_state, seed_everything

pytestmark = pytest.mark.gpu
NEEDS_LIGER = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger-kernel")
NEEDS_BITSANDBYTES = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_matrices_are_summed_in_float32(cuda: torch.device, dtype: torch.dtype):
    assert sums_half_in_fp32(cuda, dtype)
    total = torch.zeros(64, 64, device=cuda)
    left, right = (torch.randn(64, 4096, device=cuda).to(dtype) for _ in range(2))
    torch.addmm(total, left, right.t(), out_dtype=torch.float32, out=total)
    expected = left.double() @ right.double().t()
    assert ((total - expected).norm() / expected.norm()).item() < 1e-5


def test_the_head_of_a_half_precision_model_has_the_loss_and_gradients_of_a_wide_one(device: torch.device):
    """A thousand tokens and 5,000 words: bfloat16 operands, gradients rounded once at their end."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 64, generator=generator) * 0.3 for size in (1000, 5000))
    targets = torch.randint(0, 5000, (1000,), generator=generator).to(device)
    weights = torch.full((1000,), 1e-3, device=device)
    made: list[tuple[torch.Tensor, ...]] = []
    for dtype in (torch.bfloat16, torch.float32):
        pair = [one.bfloat16().to(device, dtype).requires_grad_() for one in (hidden, weight)]
        loss = linear_nll([(pair[0], pair[1])], targets, weights).loss
        made.append((loss.detach(), *torch.autograd.grad(loss, pair)))
    (half, *half_grads), (wide, *wide_grads) = made
    assert half.item() == pytest.approx(wide.item(), rel=1e-4)
    for found, expected in zip(half_grads, wide_grads, strict=True):
        assert ((found.float() - expected).norm() / expected.norm()).item() < 1e-2


@NEEDS_LIGER
@pytest.mark.parametrize("weight_of_all", [None, 1e-2])
def test_ligers_loss_is_ours(weight_of_all: float | None, cuda: torch.device):
    hidden, weight = (torch.randn(size, 256, device=cuda).mul(0.1).requires_grad_() for size in (100, 1000))
    targets = torch.randint(0, 1000, (100,), device=cuda)
    weights = torch.full((100,), 1e-2, device=cuda)
    ours = linear_nll([(hidden, weight)], targets, weights).loss
    theirs = liger_nll(
        [(hidden, weight)], targets, weights, options=NllOptions(weight_of_all=weight_of_all)
    ).loss
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-4)
    found, expected = (torch.autograd.grad(one, (hidden, weight)) for one in (theirs, ours))
    pairs = zip(found, expected, strict=True)
    assert all(((a - b).norm() / b.norm()).item() < 1e-3 for a, b in pairs)


@NEEDS_LIGER
def test_ligers_kernels_keep_the_loss(plan_of: Callable[..., Plan], steps_of: Callable, cuda: torch.device):
    plain, fused = (steps_of(plan_of("sft", f"model.liger={switch}")) for switch in ("off", "on"))
    assert fused.losses == pytest.approx(plain.losses, rel=2e-2)


OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "sgd": ("optim.kind=sgd",),
    "adafactor": ("optim.kind=adafactor",),
    "muon": ("optim.kind=muon",),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_on_a_cpu(name: str, device: torch.device, plan_of: Callable[..., Plan]):
    """The same weights and gradients in float32: five steps of each device."""
    from memtrain.trainers.optim.build import build_optimizer

    plan = plan_of("sft", *OPTIMIZERS[name], dtype="float32")
    ends: list[torch.Tensor] = []
    for place in (device, torch.device("cpu")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).to(place)
        settings = plan.settings.model_copy(update={"device": place.type})
        optimizer = build_optimizer(model, plan.recipe.optim, settings)
        for _ in range(5):
            model(torch.ones(4, 32, device=place)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([one.detach().flatten().cpu() for one in model.parameters()]))
    assert torch.allclose(ends[0], ends[1], atol=2e-3 if name == "muon" else 1e-5)


FORMS: dict[str, tuple[str, ...]] = {
    "float32 copies": (),
    "split copies": ("optim.copies=split",),
    "stochastic rounding": ("optim.copies=stochastic", "memory.allow=stochastic_rounding"),
    "compressed moments": ("optim.compressed_moments=true", "memory.allow=compressed_moments"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_half_precision_training_learns_and_is_the_same_twice(
    name: str, plan_of: Callable[..., Plan], steps_of: Callable
):
    plan = plan_of("sft", *FORMS[name])
    first, again = (steps_of(plan, 4) for _ in range(2))
    assert first.losses == again.losses
    assert first.losses[-1] < first.losses[0]
    assert all(torch.isfinite(one).all() for one in first.weights.values())


@NEEDS_BITSANDBYTES
@pytest.mark.parametrize("kind", ["adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_bitsandbytes_optimizers_learn(
    kind: str, plan_of: Callable[..., Plan], steps_of: Callable, cuda: torch.device
):
    stepped = steps_of(plan_of("sft", f"optim.kind={kind}", f"memory.allow={kind}"), 4)
    assert stepped.losses[-1] < stepped.losses[0]


@NEEDS_BITSANDBYTES
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_quantized_model_trains_its_adapter(
    bits: str, plan_of: Callable[..., Plan], steps_of: Callable, tmp_path, cuda: torch.device
):
    config = _config() | {"vocab_size": NUM_TOKENS}
    recipe = Model(config=config, tokenizer="builtin:tiny")
    plain = load_model(recipe, plan_of("sft").settings, seed=0, vocab_size=NUM_TOKENS)
    plain.save_pretrained(tmp_path / "model")
    tokenizer_of(Model(path="builtin:tiny")).save_pretrained(tmp_path / "model")
    words = [f"model.path={tmp_path}/model", "model.config=null", "model.tokenizer=null"]
    stepped = steps_of(plan_of("sft", *words, f"model.quantize={bits}", "model.adapter={r: 8, alpha: 16}"), 4)
    assert stepped.losses[-1] < stepped.losses[0]


def _config() -> dict[str, object]:
    return {
        "model_type": "qwen3",
        "vocab_size": 600,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }


def test_random_weights_are_made_on_their_device_the_same_for_a_seed(
    plan_of: Callable[..., Plan], device: torch.device
):
    """And the run's own random numbers go on where they were."""
    settings = plan_of("sft").settings
    recipe = Model(config=_config(), tokenizer="builtin:tiny")
    seed_everything(3, "run")
    before = torch.randn(4, device=device)
    seed_everything(3, "run")
    models = [load_model(recipe, settings, seed=7, vocab_size=600) for _ in range(2)]
    assert torch.equal(torch.randn(4, device=device), before)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a, b) and a.device == device for a, b in pairs)


def test_weights_of_a_folder_go_straight_to_the_device(
    tmp_path, plan_of: Callable[..., Plan], device: torch.device
):
    settings = plan_of("sft").settings
    made = load_model(Model(config=_config(), tokenizer="builtin:tiny"), settings, seed=0, vocab_size=600)
    made.save_pretrained(tmp_path / "model")
    found = load_model(
        Model(path=str(tmp_path / "model"), tokenizer="builtin:tiny"), settings, seed=1, vocab_size=600
    )
    assert {one.device for one in found.parameters()} == {device}
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), found.parameters(), strict=True))


def test_random_states_of_the_gpu_go_on(device: torch.device):
    seed_everything(1)
    state, of_slice = random_state(), random_states(device)
    drawn = torch.randn(8, device=device)
    restore_random_state(state)
    assert torch.equal(torch.randn(8, device=device), drawn)
    of_slice.restore()
    assert torch.equal(torch.randn(8, device=device), drawn)
