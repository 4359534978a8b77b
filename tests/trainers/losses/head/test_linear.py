"""The tiled head losses against all logits at once in fp64, and what they may allocate."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memtrain.trainers.losses.head import linear, tiles
from memtrain.trainers.losses.head.linear import LogprobOptions, LogprobResult, NllOptions
from memtrain.trainers.losses.head.linear_full import full_logits, full_logprob, full_nll
from memtrain.trainers.losses.head.tiles import LogitRule
from memtrain.trainers.memory_meter.live_tensors import TensorPeak

N, D, V, R = 57, 24, 331, 4
TILE = 16 << 10  # 12 tokens of 331 fp32 logits: five tiles, the last one short
SMALL_TILES = LogitRule(tile_bytes=TILE)


@dataclass
class Head:
    """Leaves of one head: hidden states, weight, an adapter's pair, bias."""

    hidden: Tensor
    weight: Tensor
    low: Tensor
    up: Tensor
    bias: Tensor
    targets: Tensor
    weights: Tensor

    def pairs(self, adapter: bool) -> list[tuple[Tensor, Tensor]]:
        return [(self.hidden, self.weight)] + ([(self.low, self.up)] if adapter else [])

    def leaves(self) -> dict[str, Tensor]:
        return {n: getattr(self, n) for n in ("hidden", "weight", "low", "up", "bias")}


def make_head(dtype: torch.dtype = torch.float32, num_tokens: int = N, seed: int = 0, **dtypes) -> Head:
    g = torch.Generator().manual_seed(seed)
    values = {
        "hidden": torch.randn(num_tokens, D, generator=g),
        "weight": torch.randn(V, D, generator=g) / 3,
        "low": torch.randn(num_tokens, R, generator=g),
        "up": torch.randn(V, R, generator=g) / 3,
        "bias": torch.randn(V, generator=g),
    }
    leaves = {n: v.to(dtypes.get(n, dtype)).requires_grad_() for n, v in values.items()}
    targets = torch.randint(0, V, (num_tokens,), generator=g)
    return Head(**leaves, targets=targets, weights=torch.rand(num_tokens, generator=g))


def in_fp64(head: Head) -> Head:
    leaves = {n: v.detach().double().requires_grad_() for n, v in head.leaves().items()}
    return Head(**leaves, targets=head.targets, weights=head.weights.double())


def worst_gradient_error(head: Head, reference: Head) -> float:
    """Largest |gradient - reference| over the largest |reference| of each leaf that has one."""
    worst = 0.0
    for name, leaf in head.leaves().items():
        expected = reference.leaves()[name].grad
        assert (leaf.grad is None) == (expected is None), name
        if leaf.grad is not None and expected is not None:
            scale = expected.abs().max().clamp_min(1e-12)
            worst = max(worst, ((leaf.grad.double() - expected).abs().max() / scale).item())
    return worst


def relative(value: Tensor, expected: Tensor) -> float:
    return ((value.double() - expected).abs().max() / expected.abs().max()).item()


RULES = [{}, {"temperature": 0.7}, {"softcap": 5.0, "scale": 0.25}, {"softcap": 3.0, "temperature": 1.3}]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "adapter"])
@pytest.mark.parametrize("by_columns", [False, True], ids=["tokens", "columns"])
def test_logprob_and_entropy_gradients_equal_full_logits(rule, adapter, by_columns, monkeypatch):
    if by_columns:
        force_columns(monkeypatch)
    head = make_head()
    reference = in_fp64(head)

    def loss(result: LogprobResult, weights: Tensor) -> Tensor:
        return (-(result.logp_N * weights) + 0.3 * result.entropy_N * weights.flip(0)).sum()

    asked = LogprobOptions(want_entropy=True, want_log_sum_squares=True)
    got = linear.linear_logprob(
        head.pairs(adapter), head.targets, LogitRule(tile_bytes=TILE, **rule), asked, bias=head.bias
    )
    want = full_logprob(
        reference.pairs(adapter), reference.targets, LogitRule(**rule), asked, bias=reference.bias
    )
    assert relative(got.logp_N, want.logp_N) < 1e-6
    assert relative(got.entropy_N, want.entropy_N) < 1e-6
    assert relative(got.log_sum_squares_N, want.log_sum_squares_N) < 1e-6
    assert not got.log_sum_squares_N.requires_grad
    loss(got, head.weights).backward()
    loss(want, reference.weights).backward()
    assert worst_gradient_error(head, reference) < 1e-5


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_entropies_that_nobody_learns_from_are_the_same_bits_and_keep_nothing(rule):
    """The full logits kept their probabilities for a gradient that no loss asked for."""
    heads = [make_head(), make_head()]
    found = [
        full_logprob(
            head.pairs(True),
            head.targets,
            LogitRule(tile_bytes=TILE, **rule),
            LogprobOptions(want_entropy=True, learns_entropy=learns),
            bias=head.bias,
        )
        for head, learns in zip(heads, (True, False), strict=True)
    ]
    assert found[1].entropy_N.equal(found[0].entropy_N)
    assert found[1].logp_N.equal(found[0].logp_N)
    assert found[0].entropy_N.requires_grad
    assert not found[1].entropy_N.requires_grad
    for head, result in zip(heads, found, strict=True):
        (result.logp_N * head.weights).sum().backward()
    assert worst_gradient_error(*heads) == 0


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("extra", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}], ids=str)
@pytest.mark.parametrize("by_columns", [False, True], ids=["in_forward", "columns"])
@pytest.mark.parametrize("want_stats", [False, True], ids=["plain", "stats"])
def test_nll_equals_torch_cross_entropy(rule, extra, by_columns, want_stats, monkeypatch):
    if by_columns:
        force_columns(monkeypatch)
    head = make_head()
    reference = in_fp64(head)
    options = NllOptions(want_stats=want_stats, **extra)
    got = linear.linear_nll(
        head.pairs(True),
        head.targets,
        head.weights,
        LogitRule(tile_bytes=TILE, **rule),
        options,
        bias=head.bias,
    )
    want = full_nll(
        reference.pairs(True),
        reference.targets,
        reference.weights,
        LogitRule(**rule),
        options,
        bias=reference.bias,
    )
    assert relative(got.loss, want.loss) < 1e-6
    (got.loss * 0.5).backward()
    (want.loss * 0.5).backward()
    assert worst_gradient_error(head, reference) < 1e-5
    if not want_stats:
        assert got[1:] == (None, None, None)
        return
    assert relative(got.logp_N, want.logp_N) < 1e-6
    assert relative(got.entropy_N, want.entropy_N) < 1e-6
    assert torch.equal(got.correct_N, want.correct_N)
    assert not got.logp_N.requires_grad


def force_columns(monkeypatch) -> None:
    plain = linear._score_options
    monkeypatch.setattr(linear, "_score_options", lambda *a: plain(*a)._replace(by_columns=True))


def test_nll_of_two_equal_logits_is_log_two():
    """W = [[1], [-1]], hidden 0, weight 3: loss 3 log 2, d hidden = 3 * ((1/2 - 1) * 1 + 1/2 * -1) = -3."""
    hidden = torch.zeros(1, 1, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    loss = linear.linear_nll([(hidden, weight)], torch.tensor([0]), torch.tensor([3.0])).loss
    loss.backward()
    assert loss.item() == pytest.approx(3 * 0.6931471805599453)
    assert hidden.grad.item() == pytest.approx(-3.0)


def test_smoothing_and_z_loss_by_hand():
    """Logits (log 3, 0): Z = 4, log p_0 = log(3/4), log p_1 = log(1/4).

    eps = 0.2: 0.8 * -log(3/4) + 0.2 * (-log(3/4) - log(1/4)) / 2 = 0.8 * 0.287682 + 0.2 * 0.836988
    = 0.397543; z = 0.1: + 0.1 * (log 4)^2 = 0.192181. Together 0.589725.
    """
    hidden = torch.ones(1, 1)
    weight = torch.tensor([[3.0], [1.0]]).log()
    loss = linear.linear_nll(
        [(hidden, weight)], torch.tensor([0]), torch.ones(1), options=NllOptions(0.2, 0.1)
    ).loss
    assert loss.item() == pytest.approx(0.589725, abs=1e-6)


@given(
    num_tokens=st.integers(0, 40),
    tile_bytes=st.sampled_from([1, 3000, 20_000, 1 << 20]),
    seed=st.integers(0, 9),
)
@settings(max_examples=25, deadline=None)
def test_tile_size_never_moves_the_result(num_tokens, tile_bytes, seed):
    head, other = make_head(num_tokens=num_tokens, seed=seed), make_head(num_tokens=num_tokens, seed=seed)
    one = linear.linear_nll(
        head.pairs(True), head.targets, head.weights, LogitRule(tile_bytes=tile_bytes)
    ).loss
    two = -(linear.linear_logprob(other.pairs(True), other.targets).logp_N * other.weights).sum()
    one.backward()
    two.backward()
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    for name, leaf in head.leaves().items():
        if name != "bias":
            torch.testing.assert_close(leaf.grad, other.leaves()[name].grad, rtol=1e-4, atol=1e-5)


def test_statistics_of_all_logits_are_the_same_bits_in_tiles_of_any_size():
    head = make_head(num_tokens=7, seed=3)
    asked = NllOptions(want_stats=True)

    def found(tile_bytes: int) -> linear.NllResult:
        rule = LogitRule(tile_bytes=tile_bytes)
        return full_nll(head.pairs(True), head.targets, head.weights, rule, asked)

    whole, tiled = found(1 << 30), found(1)
    assert whole.entropy_N is not None
    assert whole.entropy_N.shape == (7,)
    for one, other in zip(whole, tiled, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("by_columns", [False, True])
def test_no_token_gives_zero_loss_and_zero_gradients(by_columns, monkeypatch):
    if by_columns:
        force_columns(monkeypatch)
    head = make_head(num_tokens=0)
    loss = linear.linear_nll(head.pairs(True), head.targets, head.weights, bias=head.bias).loss
    loss = loss + linear.linear_logprob(head.pairs(True), head.targets).logp_N.sum()
    loss.backward()
    assert loss.item() == 0
    for leaf in head.leaves().values():
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


# Half precision: logits and sums are wide, so what is left is the rounding of the gradient itself
# (at most 2^-8 = 3.9e-3 relative), once per gradient.
@pytest.mark.parametrize("tile_bytes", [TILE, 64 << 20])
@pytest.mark.parametrize("mode", ["nll", "logprob"])
def test_bf16_is_exact_but_for_one_rounding(mode, tile_bytes):
    head = make_head(torch.bfloat16)
    reference, rule = in_fp64(head), LogitRule(tile_bytes=tile_bytes)
    if mode == "nll":
        got = linear.linear_nll(
            head.pairs(True), head.targets, head.weights, LogitRule(tile_bytes=tile_bytes)
        ).loss
    else:
        logp = linear.linear_logprob(head.pairs(True), head.targets, rule).logp_N
        got = -(logp * head.weights).sum()
    want = full_nll(reference.pairs(True), reference.targets, reference.weights).loss
    got.backward()
    want.backward()
    assert got.dtype == torch.float32
    assert relative(got, want) < 1e-6
    assert worst_gradient_error(head, reference) < 2**-8


@pytest.mark.parametrize("tile_bytes", [TILE, 64 << 20], ids=["columns", "tokens"])
@pytest.mark.parametrize("mode", ["nll", "logprob"])
def test_half_kernels_round_gradients_once_more_and_no_logit(mode, tile_bytes, monkeypatch):
    """The path of devices that add bf16 products to fp32 themselves, with such a kernel written out.

    There the tile of logit gradients is rounded to bf16 too, before its two products.
    """

    def multiply(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
        assert left.dtype == right.dtype, "a kernel takes one dtype"
        product = left.float() @ right.float()
        out.add_(product) if add else out.copy_(product)

    monkeypatch.setattr(tiles, "_multiply_", multiply)
    monkeypatch.setattr(tiles, "sums_half_in_fp32", lambda device, dtype: True)
    head = make_head(torch.bfloat16)
    reference, rule = in_fp64(head), LogitRule(tile_bytes=tile_bytes)
    if mode == "nll":
        got = linear.linear_nll(
            head.pairs(True), head.targets, head.weights, LogitRule(tile_bytes=tile_bytes)
        ).loss
    else:
        logp = linear.linear_logprob(head.pairs(True), head.targets, rule).logp_N
        got = -(logp * head.weights).sum()
    want = full_nll(reference.pairs(True), reference.targets, reference.weights).loss
    got.backward()
    want.backward()
    assert relative(got, want) < 1e-6
    assert worst_gradient_error(head, reference) < 2**-7


def test_bf16_tiles_beat_bf16_logits():
    """The plain model rounds the logits themselves to bf16, before the softmax."""
    tiled, plain = make_head(torch.bfloat16), make_head(torch.bfloat16)
    reference = in_fp64(tiled)
    full_nll(reference.pairs(False), reference.targets, reference.weights).loss.backward()
    linear.linear_nll(tiled.pairs(False), tiled.targets, tiled.weights).loss.backward()
    full_nll(plain.pairs(False), plain.targets, plain.weights).loss.backward()
    assert worst_gradient_error(tiled, reference) < worst_gradient_error(plain, reference)


def test_fp32_adapter_on_a_bf16_head_keeps_its_precision():
    head = make_head(torch.bfloat16, low=torch.float32, up=torch.float32)
    head.weight.requires_grad_(False)
    reference = in_fp64(head)
    reference.weight.requires_grad_(False)
    linear.linear_nll(
        head.pairs(True), head.targets, head.weights, LogitRule(tile_bytes=TILE)
    ).loss.backward()
    full_nll(reference.pairs(True), reference.targets, reference.weights).loss.backward()
    assert relative(head.up.grad, reference.up.grad) < 1e-5
    assert worst_gradient_error(head, reference) < 2**-8
    assert head.weight.grad is None


@pytest.mark.parametrize("form", ["nll", "logprob"])
def test_autocast_multiplies_in_bf16_and_keeps_fp32_gradients(form):
    """Under autocast an fp32 head takes bf16 operands; the result equals that of the rounded operands."""
    head = make_head(hidden=torch.bfloat16)
    rounded = make_head(torch.bfloat16)
    reference = in_fp64(rounded)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if form == "nll":
            loss = linear.linear_nll(
                head.pairs(False), head.targets, head.weights, LogitRule(tile_bytes=TILE)
            ).loss
        else:
            logp = linear.linear_logprob(head.pairs(False), head.targets, SMALL_TILES).logp_N
            loss = -(logp * head.weights).sum()
        loss.backward()
    want = full_nll(reference.pairs(False), reference.targets, reference.weights).loss
    want.backward()
    assert relative(loss, want) < 1e-6
    assert head.weight.grad.dtype == torch.float32
    assert relative(head.weight.grad, reference.weight.grad) < 1e-5


def test_fp16_gradients_survive_a_loss_scale():
    """Gradients of weight 1e-6 underflow fp16 (least 6e-8) unless a loss scale lifts them before rounding."""
    head = make_head(torch.float16)
    reference = in_fp64(head)
    weights = torch.full((N,), 1e-6)
    (linear.linear_nll(head.pairs(False), head.targets, weights).loss * 2**16).backward()
    (full_nll(reference.pairs(False), reference.targets, weights.double()).loss * 2**16).backward()
    assert worst_gradient_error(head, reference) < 2e-3


class Allocations(TorchDispatchMode):
    """Elements of the largest storage that any tensor made inside lives in."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["nll", "logprob"])
def test_logits_are_never_held_whole(form, dtype, frozen):
    num_tokens, tile_bytes = 400, 32 << 10
    head = make_head(dtype, num_tokens=num_tokens)
    head.weight.requires_grad_(not frozen)
    with Allocations() as made:
        if form == "nll":
            rule, options = LogitRule(softcap=3.0, tile_bytes=tile_bytes), NllOptions(0.1, want_stats=True)
            loss = linear.linear_nll(head.pairs(False), head.targets, head.weights, rule, options).loss
        else:
            result = linear.linear_logprob(
                head.pairs(False),
                head.targets,
                LogitRule(tile_bytes=tile_bytes),
                LogprobOptions(want_entropy=True),
            )
            loss = (result.logp_N + result.entropy_N).sum()
        loss.backward()
    allowed = max(num_tokens * D, V * D, tile_bytes // 4)
    assert made.largest <= allowed < num_tokens * V


def test_frozen_weight_and_no_grad_make_no_gradient_buffers(monkeypatch):
    made = []
    plain = linear.HeadGradients.__init__

    def spy(self, operands, needs, products):
        plain(self, operands, needs, products)
        made.append(self)

    monkeypatch.setattr(linear.HeadGradients, "__init__", spy)
    head = make_head()
    head.weight.requires_grad_(False)
    head.bias.requires_grad_(False)
    with torch.no_grad():
        linear.linear_nll(head.pairs(False), head.targets, head.weights, bias=head.bias)
    assert not made
    linear.linear_nll(head.pairs(False), head.targets, head.weights, bias=head.bias)
    assert made[0].weight == [None]
    assert made[0].bias_V is None
    assert made[0].hidden[0].shape == (N, D)


def test_narrow_trainable_weight_goes_by_columns_and_small_ones_do_not():
    head = make_head(torch.bfloat16)
    rule = LogitRule(tile_bytes=TILE)
    assert linear._score_options(head.pairs(False), rule).by_columns
    assert not linear._score_options(head.pairs(False), LogitRule()).by_columns
    head.weight.requires_grad_(False)
    assert not linear._score_options(head.pairs(False), rule).by_columns
    assert not linear._score_options(make_head().pairs(False), rule).by_columns


def test_second_backward_says_what_to_do():
    head = make_head()
    loss = linear.linear_nll(head.pairs(False), head.targets, head.weights).loss
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="backpropagated once"):
        loss.backward()


def test_saved_tensor_hooks_never_see_the_gradients():
    """Hooks that hand back copies (offloading) change nothing; in-forward NLL gives them nothing at all."""
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    hooked, plain = make_head(), make_head()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.clone()):
        loss = linear.linear_nll(hooked.pairs(True), hooked.targets, hooked.weights).loss
        assert not packed
        logp = linear.linear_logprob(hooked.pairs(True), hooked.targets).logp_N.sum()
        (loss + logp).backward()
    (
        linear.linear_nll(plain.pairs(True), plain.targets, plain.weights).loss
        + linear.linear_logprob(plain.pairs(True), plain.targets).logp_N.sum()
    ).backward()
    assert packed
    for name, leaf in hooked.leaves().items():
        if name != "bias":
            assert torch.equal(leaf.grad, plain.leaves()[name].grad), name


@pytest.mark.parametrize("form", ["nll", "logprob"])
def test_tied_weight_gathers_both_gradients(form):
    """One parameter is the embedding and the head: its gradient is the sum of the two uses."""
    g = torch.Generator().manual_seed(1)
    tied = (torch.randn(V, D, generator=g) / 3).requires_grad_()
    reference = tied.detach().double().requires_grad_()
    ids, targets = torch.randint(0, V, (2, N), generator=g)
    weights = torch.rand(N, generator=g)
    pairs = [(torch.nn.functional.embedding(ids, tied), tied)]
    if form == "nll":
        linear.linear_nll(pairs, targets, weights, SMALL_TILES).loss.backward()
    else:
        (-(linear.linear_logprob(pairs, targets, SMALL_TILES).logp_N * weights).sum()).backward()
    full = [(torch.nn.functional.embedding(ids, reference), reference)]
    full_nll(full, targets, weights.double()).loss.backward()
    assert relative(tied.grad, reference.grad) < 1e-5


@pytest.mark.parametrize(
    ("rule", "copies"),
    [({}, 1), ({"temperature": 0.7}, 2), ({"scale": 0.5}, 2), ({"scale": 1.0, "temperature": 1.0}, 1)],
)
def test_full_logits_are_copied_for_no_scale_and_no_temperature_of_one(rule: dict[str, float], copies: int):
    hidden, weight = torch.randn(64, 8), torch.randn(512, 8)
    with TensorPeak() as counted:
        full_logits([(hidden, weight)], LogitRule(**rule))
    assert counted.peak_bytes == pytest.approx(copies * 4 * 64 * 512, rel=0.02)


def test_large_logits_keep_their_digits():
    """Logits near 5000 that differ by 1 and 2: log p = -log(1 + e^-1 + e^-2), though log Z itself is 5002."""
    hidden = torch.ones(1, 1)
    weight = torch.tensor([[5002.0], [5001.0], [5000.0]])
    logp = linear.linear_logprob([(hidden, weight)], torch.tensor([0])).logp_N
    assert logp.item() == pytest.approx(-0.4076059644443804, abs=1e-6)


@pytest.mark.parametrize(
    ("dtype", "trains_head", "most"),
    [
        # The scratch, the gradient of the hidden states, and some numbers a token.
        (torch.float32, False, (128 << 10) + 4 * 64 * 64 + 4096),
        # The weight's gradient, and of one block of columns: its sums, its weights widened, a tile.
        (torch.bfloat16, True, 3 * (128 << 10)),
    ],
)
def test_a_tile_is_gone_before_the_next_one_is_made(dtype, trains_head, most):
    """Four tiles of tokens, or as many blocks of columns, hold no more than one of them."""
    hidden = torch.zeros(64, 64, dtype=dtype, requires_grad=True)
    weight = torch.zeros(1024, 64, dtype=dtype, requires_grad=trains_head)
    rule, options = LogitRule(tile_bytes=128 << 10), NllOptions(want_stats=True)
    with TensorPeak() as counted:
        found = linear.linear_nll(
            [(hidden, weight)], torch.zeros(64, dtype=torch.long), torch.ones(64), rule, options
        )
        found.loss.backward()
    assert counted.peak_bytes <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_head_and_its_adapter_are_summed_in_place(dtype: torch.dtype):
    """Two copies at once; stacked and then summed they were five."""
    hidden, weight = torch.randn(64, 32, dtype=dtype), torch.randn(64, 32, dtype=dtype)
    low, up = torch.randn(64, 4), torch.randn(64, 4)
    with TensorPeak() as counted:
        made = full_logits([(hidden, weight), (low, up)])
    assert counted.peak_bytes == 2 * made.nbytes
    assert torch.equal(made, (hidden @ weight.t()).float() + low @ up.t())
