"""Every attention back end against the masked reference, and the guards of transformers' functions."""

import sys
from functools import partial
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from trace_cases import BASE

from memtrain.errors import LaunchError
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention import (
    NAMES,
    attend_of,
    attention_switched,
    flex,
    masked,
    register,
    set_attention,
)
from memtrain.trainers.model.attention import torch_cpu as cpu_backend
from memtrain.trainers.model.attention import torch_varlen as cuda_backend
from memtrain.trainers.model.attention.probe import Outcome, probe, probe_one
from memtrain.trainers.model.attention.row_layout import Layout, Part, packed_layout, shared_layout
from memtrain.trainers.model.attention.two_part import ScoreRule, attend_in_parts
from memtrain.trainers.tools.trace.fake_model import bare_model

LAYOUTS = {
    "packed": packed_layout([5, 1, 33, 12]),
    "shared": shared_layout([(7, [4, 1, 9]), (1, [3]), (20, [6, 6])]),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


def drawn(
    layout: Layout, dtype: torch.dtype = torch.float32, heads: int = 4, key_heads: int = 2, width: int = 16
):
    """Query, key, value and the gradient of the output, from one seed."""
    generator = torch.Generator().manual_seed(3)
    counts = (heads, key_heads, key_heads, heads)
    return [
        torch.randn(layout.num_tokens, count, width, generator=generator, dtype=torch.float64).to(dtype)
        for count in counts
    ]


def by_hand(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """One query at a time over the keys that the layout's words allow: the slow, independent form."""
    heads_per_key = query.shape[1] // key.shape[1]
    out = []
    segments = list(pairwise(layout.within.query_bounds))
    for start, end in segments:
        prompt = range(0)
        if layout.to_prompt is not None and start >= layout.num_prompt_tokens:
            for q0, q1, k0, k1 in layout.to_prompt.spans():
                if q0 <= start - layout.num_prompt_tokens < q1:
                    prompt = range(k0, k1)
        for row in range(start, end):
            rows = [*prompt, *range(start, row + 1)]
            keys = key[rows].repeat_interleave(heads_per_key, 1)
            values = value[rows].repeat_interleave(heads_per_key, 1)
            weight = (torch.einsum("hd,jhd->hj", query[row], keys) * scale).softmax(-1)
            out.append(torch.einsum("hj,jhd->hd", weight, values))
    return torch.stack(out)


def with_gradients(attend, tensors: list[Tensor], layout: Layout, scale: float = 0.3) -> list[Tensor]:
    """Output and gradients of query, key, value under the drawn output gradient."""
    query, key, value = (tensor.detach().clone().requires_grad_() for tensor in tensors[:3])
    out = attend(query, key, value, layout, scale)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), tensors[3])]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        error = ((a.double() - b.double()).norm() / b.double().norm()).item()
        assert error < tolerance, f"{name} is off by {error:.1e}"


def test_dense_is_attention_written_out_row_by_row(layout: Layout):
    tensors = drawn(layout, torch.float64)
    assert_close(
        with_gradients(masked.attend, tensors, layout), with_gradients(by_hand, tensors, layout), 1e-12
    )


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_the_segment_loop_equals_dense_with_grouped_heads(layout: Layout, heads: tuple[int, int]):
    tensors = drawn(layout, torch.float64, *heads)
    found = with_gradients(attend_of(AttentionBackend.TORCH_CPU), tensors, layout)
    assert_close(found, with_gradients(masked.attend, tensors, layout), 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_the_segment_loop_is_as_exact_as_its_dtype(layout: Layout, dtype: torch.dtype, tolerance: float):
    found = with_gradients(attend_of(AttentionBackend.TORCH_CPU), drawn(layout, dtype), layout)
    assert found[0].dtype == dtype
    rounded = [tensor.double() for tensor in drawn(layout, dtype)]
    assert_close(found, with_gradients(masked.attend, rounded, layout), tolerance)


def test_merging_parts_in_autograd_without_the_gradient_of_lse_is_wrong_and_ours_is_not():
    """The trap: kernels drop d lse, so the forward is right and dq, dk are far off."""
    layout = LAYOUTS["shared"]
    tensors = drawn(layout, torch.float64)
    P = layout.num_prompt_tokens
    allowed = masked.mask_of(layout)

    def part(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        score = torch.einsum("ihd,jhd->hij", query, key.repeat_interleave(2, 1)) * scale
        score = score.masked_fill(~mask, -1e30)
        out = torch.einsum("hij,jhd->ihd", score.softmax(-1), value.repeat_interleave(2, 1))
        return out, score.logsumexp(-1).t()[..., None].detach()

    def naive(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        own, own_lse = part(query, key[P:], value[P:], allowed[:, P:], scale)
        prompt, prompt_lse = part(query, key[:P], value[:P], allowed[:, :P], scale)
        lse = torch.logaddexp(own_lse, prompt_lse)
        return own * (own_lse - lse).exp() + prompt * (prompt_lse - lse).exp()

    expected = with_gradients(masked.attend, tensors, layout)
    trapped = with_gradients(naive, tensors, layout)
    assert_close(trapped[:1] + expected[1:], expected, 1e-12)
    assert (trapped[1] - expected[1]).norm() / expected[1].norm() > 0.05
    assert_close(with_gradients(attend_of(AttentionBackend.TORCH_CPU), tensors, layout), expected, 1e-12)


def test_nothing_the_size_of_the_row_squared_is_saved():
    """Saved: q and out of 512 x 64, k and v of half the heads, lse of 512 x 4; 4 bytes each."""
    layout = packed_layout([256, 256])
    query, key, value, _ = drawn(layout)
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        attend_of(AttentionBackend.TORCH_CPU)(query.requires_grad_(), key, value, layout, 0.25)
    assert sum(saved.values()) == 4 * (2 * 32768 + 2 * 16384 + 512 * 4)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_the_flex_mask_is_the_dense_mask(layout: Layout, monkeypatch: pytest.MonkeyPatch):
    """FlexAttention differentiates on CPU only with its device guard off. Its kernel still needs a GPU."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    tensors = drawn(layout)
    found = with_gradients(flex.attend, tensors, layout)
    assert_close(found, with_gradients(masked.attend, tensors, layout), 2e-6)


def segments_of(cumulative: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(cumulative.tolist()))


def stand_in_forward(query, key, value, cu_query, cu_key, max_query, max_key, dropout, causal, scale):
    """A varlen flash forward in plain fp64, with the real kernels' shapes: out [T, H, D], lse fp32 [H, T]."""
    assert dropout == 0.0
    assert cu_query.dtype == cu_key.dtype == torch.int32
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], query.shape[0])
    for (q0, q1), (k0, k1) in zip(segments_of(cu_query), segments_of(cu_key), strict=True):
        assert q1 - q0 <= max_query
        assert k1 - k0 <= max_key
        score = scores(query[q0:q1], key[k0:k1], causal, scale)
        repeated = value[k0:k1].double().repeat_interleave(query.shape[1] // value.shape[1], 1)
        out[q0:q1] = torch.einsum("hij,jhd->ihd", score.softmax(-1), repeated).to(out.dtype)
        lse[:, q0:q1] = score.logsumexp(-1)
    return out, lse


def stand_in_backward(grad, query, key, value, out, lse, cu_query, cu_key, causal, scale):
    """The flash backward from out and lse: P = exp(s - lse), dS = P * (dP - rowsum(dO * O))."""
    assert lse.is_contiguous()
    assert lse.shape == (query.shape[1], query.shape[0])
    group = query.shape[1] // key.shape[1]
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for (q0, q1), (k0, k1) in zip(segments_of(cu_query), segments_of(cu_key), strict=True):
        do, o = grad[q0:q1].double(), out[q0:q1].double()
        weight = (scores(query[q0:q1], key[k0:k1], causal, scale) - lse[:, q0:q1, None].double()).exp()
        values = value[k0:k1].double().repeat_interleave(group, 1)
        d_score = (
            weight * (torch.einsum("ihd,jhd->hij", do, values) - (do * o).sum(-1).t()[..., None]) * scale
        )
        keys = key[k0:k1].double().repeat_interleave(group, 1)
        dq[q0:q1] = torch.einsum("hij,jhd->ihd", d_score, keys)
        dk_full = torch.einsum("hij,ihd->jhd", d_score, query[q0:q1].double())
        dk[k0:k1] = dk_full.unflatten(1, (-1, group)).sum(2)
        dv[k0:k1] = torch.einsum("hij,ihd->jhd", weight, do).unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


def scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    keys = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    score = torch.einsum("ihd,jhd->hij", query.double(), keys) * scale
    if causal:
        score = score.masked_fill(torch.ones(score.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    return score


def test_the_cuda_back_end_hands_torchs_varlen_kernels_what_they_take(layout: Layout, monkeypatch):
    """The operators need a GPU; in their place stand their meaning, with their signatures."""

    class Operators:
        @staticmethod
        def _flash_attention_forward(q, k, v, cq, ck, mq, mk, dropout, causal, return_debug_mask, *, scale):
            out, lse = stand_in_forward(q, k, v, cq, ck, mq, mk, dropout, causal, scale)
            return out, lse, None, None, None

        @staticmethod
        def _flash_attention_backward(
            do, q, k, v, out, lse, cq, ck, mq, mk, dropout, causal, rng_state, unused, *, scale
        ):
            return stand_in_backward(do, q, k, v, out, lse, cq, ck, causal, scale)

    monkeypatch.setattr(cuda_backend, "aten", Operators)
    tensors = drawn(layout)
    found = with_gradients(cuda_backend.attend, tensors, layout)
    assert_close(found, with_gradients(masked.attend, tensors, layout), 2e-6)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_cuda_back_end_fits_the_operators_signatures(is_causal: bool):
    """Fake CUDA tensors go through the real operators' schemas and shape rules; nothing is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensors = [torch.empty(8, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2, 4)]
        cu = torch.tensor([0, 5, 8], dtype=torch.int32, device="cuda")
        part = Part((0, 5, 8), (0, 5, 8), cu, cu, max_query=5, max_key=5, is_causal=is_causal)
        query, key, value, grad = tensors
        out, lse = cuda_backend.TorchFlash.forward(query, key, value, part, 0.1)
        gradients = cuda_backend.TorchFlash.backward(grad, query, key, value, out, lse, part, 0.1)
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((4, 8), torch.float32)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


def test_the_flash_attn_back_end_hands_the_package_what_it_takes(layout: Layout, monkeypatch):
    """A stand-in package with the signatures of flash-attn 2.8."""

    def forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        softcap,
    ):  # fmt: skip
        assert softcap == 0.0
        out, lse = stand_in_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, softmax_scale
        )
        return out, lse, None, None

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        deterministic, rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert (window_size_left, window_size_right, softcap, alibi_slopes) == (-1, -1, 0.0, None)
        found = stand_in_backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale
        )
        for into, value in zip((dq, dk, dv), found, strict=True):
            into.copy_(value)

    interface = ModuleType("flash_attn.flash_attn_interface")
    interface.__dict__.update(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    tensors = drawn(layout)
    found = with_gradients(attend_of(AttentionBackend.FLASH), tensors, layout)
    assert_close(found, with_gradients(masked.attend, tensors, layout), 2e-6)


HOPPER_OPERATORS = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
    "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, "
    "int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, "
    "int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float softcap=0.0, "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""The schemas that flash-attention's hopper/flash_api.cpp registers."""


def test_the_flash3_back_end_calls_the_operators_by_their_schemas(layout: Layout, monkeypatch):
    """Operators of the package's own schemas, computed on the CPU; one that splits its sums is not asked."""

    def forward(q, k, v, *others):
        cu_query, cu_key, max_query, max_key = others[4], others[5], others[9], others[10]
        scale, is_causal, softcap, num_splits = others[20], others[21], others[25], others[28]
        assert (softcap, num_splits) == (0.0, 1)
        out, lse = stand_in_forward(q, k, v, cu_query, cu_key, max_query, max_key, 0.0, is_causal, scale)
        return out, lse, torch.empty(0), torch.empty(0)

    def backward(do, q, k, v, out, lse, dq, dk, dv, cu_query, cu_key, *others):
        # torch leaves out what is at its default at the end: the window, the cap, and `is_causal: False`.
        scale, causal = others[4], others[5:] == (True,)
        found = stand_in_backward(do, q, k, v, out, lse, cu_query, cu_key, causal, scale)
        for into, value in zip((dq, dk, dv), found, strict=True):
            into.copy_(value)
        return tuple(torch.empty(0) for _ in range(5))

    with torch.library._scoped_library("flash_attn_3", "FRAGMENT") as library:
        for schema, meaning in zip(HOPPER_OPERATORS, (forward, backward), strict=True):
            library.impl(library.define(schema), meaning, "CPU")
        monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
        tensors = drawn(layout)
        found = with_gradients(attend_of(AttentionBackend.FLASH3), tensors, layout)
    assert_close(found, with_gradients(masked.attend, tensors, layout), 2e-6)


def call(
    layout: Layout | None, *, rows: int = 1, keys: int | None = None, backend="torch_cpu", **kwargs: object
) -> Tensor:
    """The attention function as a model's layer calls it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register()
    tokens = 6
    query = torch.ones(rows, 2, tokens, 8)
    key = torch.ones(rows, 2, keys or tokens, 8)
    function = ALL_ATTENTION_FUNCTIONS[NAMES[AttentionBackend(backend)]]
    return function(
        nn.Identity(), query, key, key, kwargs.pop("attention_mask", None), layout=layout, **kwargs
    )[0]


@pytest.mark.parametrize(
    ("kwargs", "meaning"),
    [
        ({"softcap": 50.0}, "soft-capped attention scores by torch_cpu"),
        ({"s_aux": torch.zeros(2), "backend": "flex"}, "sinks"),
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"sliding_window": 3, "backend": "flex"}, "sliding window of 3"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_what_no_back_end_computes_is_refused_with_a_way_out(kwargs: dict[str, object], meaning: str):
    with pytest.raises(LaunchError, match=meaning) as refused:
        call(packed_layout([4, 2]), **kwargs)
    assert refused.value.faults[0].fix


@pytest.mark.parametrize("window", [4, 4096])
def test_a_window_as_long_as_the_longest_span_changes_nothing(window: int):
    layout = packed_layout([4, 2])
    assert torch.equal(call(layout, sliding_window=window), call(layout))


WINDOWS = (None, 1, 2, 5, 8, 19, 25)
"""Shorter than a segment, than a prompt, than both together, and longer."""


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_and_sinks_are_put_together_from_kernels_that_know_none(
    layout: Layout, window: int | None, has_sinks: bool
):
    tensors = drawn(layout, torch.float64)
    sinks = [torch.linspace(-1, 2, 4, dtype=torch.float64)] if has_sinks else []

    def run(backend: ModuleType) -> list[Tensor]:
        inputs = [one.detach().clone().requires_grad_() for one in (*tensors[:3], *sinks)]
        rule = ScoreRule(window, None, inputs[3] if has_sinks else None)
        out = backend.attend(*inputs[:3], layout, 0.3, rule)
        return [out.detach(), *torch.autograd.grad(out, inputs, tensors[3])]

    for found, expected in zip(run(cpu_backend), run(masked), strict=True):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("window", [2, 8, 19])
def test_windows_and_sinks_are_put_together_in_half_precision(layout: Layout, window: int):
    """A merge of two parts sums in float32, and its rows go back to a bfloat16 output."""
    tensors = drawn(layout, torch.bfloat16)
    rule = ScoreRule(window, None, torch.linspace(-1, 2, 4))
    exact = ScoreRule(window, None, torch.linspace(-1, 2, 4, dtype=torch.float64))
    found = with_gradients(partial(cpu_backend.attend, rule=rule), tensors, layout)
    rounded = [tensor.double() for tensor in tensors]
    assert found[0].dtype == torch.bfloat16
    assert_close(found, with_gradients(partial(masked.attend, rule=exact), rounded, layout), 1.5e-2)


def test_a_window_of_the_reference_is_one_query_at_a_time(layout: Layout):
    """The mask by places in a row, against a loop: the newest keys of all that a query may look at."""
    window = 5
    allowed = masked.mask_of(layout, window)
    for whole, row in zip(masked.mask_of(layout), allowed, strict=True):
        seen = whole.nonzero()[:, 0].tolist()
        own = sorted(seen, key=lambda key: int(layout.places[key]))[-window:]
        assert sorted(own) == row.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("window", [None, 6])
def test_capped_scores_have_the_reference_gradients(layout: Layout, window: int | None):
    tensors = drawn(layout, torch.float64)
    rule = ScoreRule(window, 0.7)

    def in_parts(*inputs):
        return attend_in_parts(*inputs, rule, masked.MaskedScores)

    expected = with_gradients(partial(masked.attend, rule=rule), tensors, layout)
    assert_close(with_gradients(in_parts, tensors, layout), expected, 1e-12)


@pytest.mark.parametrize(
    ("layout", "kwargs", "sentence"),
    [
        (packed_layout([4, 2]), {"rows": 2}, "not a batch of 2"),
        (packed_layout([4, 3]), {}, "6 tokens and its layout 7"),
        (packed_layout([4, 2]), {"keys": 9}, "9 keys"),
    ],
)
def test_a_call_that_would_mix_rows_is_stopped(
    layout: Layout | None, kwargs: dict[str, object], sentence: str
):
    with pytest.raises(AssertionError, match=sentence):
        call(layout, **kwargs)


@pytest.mark.parametrize(
    ("layout", "kwargs", "sentence"),
    [
        (None, {}, "no layout"),
        (packed_layout([4, 2]), {"attention_mask": torch.ones(1, 1, 6, 6)}, "makes its own attention mask"),
    ],
)
def test_a_class_that_passes_no_layout_or_makes_a_mask_is_refused(
    layout: Layout | None, kwargs: dict[str, object], sentence: str
):
    with pytest.raises(LaunchError, match=sentence):
        call(layout, **kwargs)


def test_values_narrower_than_keys_are_served():
    """Latent attention has narrower values; the flash kernels want one width."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register()
    layout = packed_layout([4, 2])
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 2, 6, 16, generator=generator) for _ in range(2))
    value = torch.randn(1, 2, 6, 8, generator=generator)
    found = [
        ALL_ATTENTION_FUNCTIONS[NAMES[backend]](nn.Identity(), query, key, value, None, layout=layout)[0]
        for backend in (AttentionBackend.TORCH_CPU, AttentionBackend.MASKED)
    ]
    assert found[0].shape == (1, 6, 2, 8)
    assert torch.allclose(*found, atol=1e-6)


def test_a_model_is_switched_and_switched_back(tiny_llama):
    model = tiny_llama("sdpa")
    with attention_switched(model, "memtrain_torch_cpu"):
        assert model.config._attn_implementation == "memtrain_torch_cpu"
    assert model.config._attn_implementation == "sdpa"
    set_attention(model, AttentionBackend.MASKED)
    assert model.config._attn_implementation == "memtrain_masked"
    set_attention(model, AttentionBackend.TRANSFORMERS)
    assert model.config._attn_implementation == "sdpa"


def test_the_probe_runs_what_runs_here_and_says_why_the_rest_does_not():
    found = {probed.backend: probed for probed in probe("cpu", torch.float32)}
    assert {backend for backend, probed in found.items() if probed.outcome is Outcome.WORKS} == {
        "torch_cpu",
        "masked",
    }
    assert "does not run on cpu" in found[AttentionBackend.TORCH_VARLEN].words
    assert found[AttentionBackend.TORCH_VARLEN].outcome is Outcome.NOT_HERE


def test_the_probe_finds_wrong_numbers_and_quotes_a_kernels_failure(monkeypatch: pytest.MonkeyPatch):
    kernel = cpu_backend.TorchCpu
    backward = kernel.backward

    def without_dq(*arguments: object):
        dq, dk, dv = backward(*arguments)  # pyright: ignore
        return dq * 0.8, dk, dv

    monkeypatch.setattr(kernel, "backward", staticmethod(without_dq))
    wrong = probe_one(AttentionBackend.TORCH_CPU, "cpu", torch.bfloat16)
    assert wrong.outcome is Outcome.BROKEN
    assert "off by 2.0e-01" in wrong.words

    def fails(*_: object):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(kernel, "backward", staticmethod(fails))
    failed = probe_one(AttentionBackend.TORCH_CPU, "cpu", torch.float32)
    assert (failed.outcome, failed.words) == (Outcome.BROKEN, "RuntimeError: no kernel image")


def test_capped_scores_are_eagers_where_the_class_would_let_sdpa_leave_the_cap_out(monkeypatch):
    """So transformers 5.17 has it: Gemma 2's rows with a mask were computed without their cap."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 16, "head_dim": 8}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    settings = Settings(**(BASE | {"attention": "transformers"}))
    made = bare_model({"model_type": "gemma2", **sizes}, settings)
    assert made.config._attn_implementation == "eager"
