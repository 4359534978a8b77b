"""The back ends as attention functions of transformers: guards, registration, and switching a model to one.

No mask function is registered beside them, so that a model builds no mask at all; the row's `Layout` travels
as the keyword argument `layout`, which survives gradient checkpointing, PEFT and autocast:
`model(input_ids=..., position_ids=layout.position_ids, layout=layout, use_cache=False)`.
"""

# T: tokens, H: query heads, K: key heads, D: head width.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memtrain.errors import LaunchError
from memtrain.memory.rules.attention import CAPPED, MERGED, AttentionBackend
from memtrain.trainers.model.attention.by_heads import attend_by_heads
from memtrain.trainers.model.attention.row_layout import Layout
from memtrain.trainers.model.attention.sliced import attend_sliced
from memtrain.trainers.model.attention.two_part import PLAIN, ScoreRule, rule_of
from memtrain.trainers.model.context_parallel.row_slices import RowPart, SlicedLayout
from memtrain.trainers.model.streamed.attention import attend_streamed
from memtrain.trainers.model.streamed.layer_keys import SliceLayout

Attend = Callable[[Tensor, Tensor, Tensor, Layout, float], Tensor]
RuledAttend = Callable[[Tensor, Tensor, Tensor, Layout, float, ScoreRule], Tensor]
RowLayout = Layout | SlicedLayout | RowPart | SliceLayout
"""Layout that a pass is given: a whole row, a rank's part of a row, or a slice of a layer's pass."""

# Upstream treats any name with "flash" in it as its own flash path.
NAMES = {
    AttentionBackend.TORCH_CPU: "memtrain_torch_cpu",
    AttentionBackend.FLASH3: "memtrain_fa3",
    AttentionBackend.FLASH: "memtrain_fa2",
    AttentionBackend.TORCH_VARLEN: "memtrain_torch_varlen",
    AttentionBackend.FLEX: "memtrain_flex",
    AttentionBackend.TORCH_EFFICIENT: "memtrain_efficient",
    AttentionBackend.MASKED: "memtrain_masked",
}
"""The name that transformers knows each back end by (`attn_implementation`)."""

RULES = {"softcap": "soft-capped attention scores", "s_aux": "attention sinks"}
"""Keyword arguments of transformers that some back ends compute (memory/rules/attention.py)."""

UNSUPPORTED = {
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "block_indices": "block-sparse attention",
    "indices": "sparse attention",
}
"""Keyword arguments of transformers that change the result and that no back end here computes."""

FIX = "set model.attention: transformers and length.packing: none, which is one example to a row"


def register() -> None:
    """Make every back end known to transformers under its name in `NAMES`. Imports no back end yet.

    A function that is known stays: compiled layers have one that the compiler leaves alone.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for backend, name in NAMES.items():
        if name not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(name, _attention_function(backend))


def attend_of(backend: AttentionBackend) -> Attend:
    """`attend(query_THD, key_TKD, value_TKD, layout, scale) -> out_THD` of a back end."""
    attend: Attend = import_module(f"memtrain.trainers.model.attention.{backend}").attend
    return attend


def attend_by_rule(backend: AttentionBackend, rule: ScoreRule) -> Attend:
    """The same under a rule of the scores, which the back end must compute."""
    if rule is PLAIN:
        return attend_of(backend)
    attend: RuledAttend = import_module(f"memtrain.trainers.model.attention.{backend}").attend

    def ruled(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, layout: Layout, scale: float) -> Tensor:
        return attend(query_THD, key_TKD, value_TKD, layout, scale, rule)

    return ruled


def set_attention(model: nn.Module, backend: AttentionBackend) -> None:
    """From now on `model` attends by `backend`; `transformers` is SDPA where the class allows it, else eager.

    Raises:
        LaunchError: the model's class does not take attention functions.
    """
    if backend is AttentionBackend.TRANSFORMERS:
        # A class that takes no attention functions (Bloom, Mamba) has but its own.
        if model._can_set_attn_implementation():  # pyright: ignore
            implementation = own_implementation(model)
            # transformers has taken it as the model was made, but for capped scores.
            if model.config._attn_implementation != implementation:  # pyright: ignore
                _switch(model, implementation)
        return
    register()
    _switch(model, NAMES[backend])


def own_implementation(model: nn.Module) -> str:
    """The model's own attention for rows with a mask: SDPA where its class allows it, else eager.

    Capped scores are eager's: transformers before 5.23 lets Gemma 2 take SDPA, which leaves the cap out.
    """
    config: Any = model.config
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return "eager"
    return model.get_correct_attn_implementation(None)  # pyright: ignore


@contextmanager
def attention_switched(model: nn.Module, implementation: str) -> Iterator[None]:
    """`model` attends by `implementation`, a name transformers knows, until the block ends.

    With `eager`, a class that takes no attention functions (Falcon) keeps its own.
    """
    if implementation == "eager" and not model._can_set_attn_implementation():  # pyright: ignore
        yield
        return
    register()
    before: str = model.config._attn_implementation  # pyright: ignore
    _switch(model, implementation)
    try:
        yield
    finally:
        _switch(model, before)


def _switch(model: nn.Module, implementation: str) -> None:
    model.set_attn_implementation(implementation)  # pyright: ignore
    taken: str = model.config._attn_implementation  # pyright: ignore
    if taken != implementation:
        what = f"{type(model).__name__} does not allow another attention function (it keeps {taken})"
        raise LaunchError(what, "model.attention", FIX)


def _attention_function(backend: AttentionBackend) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        layout: RowLayout | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """transformers' form: query [1, H, T, D] to output [1, T, H, D]; no attention weights."""
        if layout is None:
            what = f"{type(module).__name__} gets no layout of its rows: the model does not pass it on"
            raise LaunchError(what, "model.attention", FIX)
        rule = rule_of(others, layout.longest_span)
        _check(module, query, key, attention_mask, layout)
        _check_rule(module, backend, dropout, layout, rule, others)
        if is_tempered(module):
            query = tempered(module, query, layout.places)
        if torch.is_autocast_enabled(query.device.type):
            # SDPA has a casting rule, raw kernels do not: norms on queries and keys leave these in fp32.
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        D, D_value = query.shape[-1], value.shape[-1]
        if D_value != D and backend is not AttentionBackend.MASKED:
            # The flash kernels want one width; zeros add nothing.
            query, key, value = (
                F.pad(one, (0, max(D, D_value) - one.shape[-1])) for one in (query, key, value)
            )
        # Views both ways: the gradient of `tensor[0]` would be written into zeros.
        query_THD, key_TKD, value_TKD = (one.squeeze(0).transpose(0, 1) for one in (query, key, value))
        scale = scaling if scaling is not None else D**-0.5
        if isinstance(layout, SlicedLayout):
            out_THD = attend_sliced(query_THD, key_TKD, value_TKD, layout, scale, backend, rule)
        elif isinstance(layout, SliceLayout):
            out_THD = attend_streamed(query_THD, key_TKD, value_TKD, layout, scale, backend, rule)
        else:
            if isinstance(layout, RowPart):
                attend = attend_by_rule(backend, rule.of_rank(layout.ranks.index, layout.ranks.size))
                out_THD = attend_by_heads(query_THD, key_TKD, value_TKD, layout, scale, attend)
            else:
                attend = attend_by_rule(backend, rule)
                out_THD = attend(query_THD, key_TKD, value_TKD, layout, scale)
        return out_THD[None, ..., :D_value], None

    return attention


def is_tempered(module: nn.Module) -> bool:
    """Whether an attention scales its queries by their place (Llama 4's layers without positions)."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def tempered(module: nn.Module, query: Tensor, position_T: Tensor) -> Tensor:
    """`query` [1, H, T, D] scaled by the places `position_T` in their own rows.

    As it comes, Llama 4 has scaled it by 0, 1, 2, ... over the whole flattened row. Up to `floor_scale`
    tokens both are 1, and not a bit changes.
    """
    counted_T = torch.arange(len(position_T), device=position_T.device)
    ratio_T = _temperature(module, position_T) / _temperature(module, counted_T)
    return (query * ratio_T[:, None]).to(query.dtype)


def _temperature(module: Any, position_T: Tensor) -> Tensor:
    """Source: Nakanishi 2025, arXiv:2501.19399, in the form of Llama 4 (modeling_llama4.py)."""
    return torch.log1p(torch.floor((position_T.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0


def _check(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, layout: RowLayout
) -> None:
    """Make sure that the row is the layout's, and that its mask is the layout alone."""
    if attention_mask is not None:
        what = (
            f"{type(module).__name__} makes its own attention mask, which packed attention does not support"
        )
        raise LaunchError(what, "model.attention", FIX)
    assert query.shape[0] == 1, f"Packed attention takes one flattened row, not a batch of {query.shape[0]}."
    assert query.shape[2] == layout.num_tokens, (
        f"The row has {query.shape[2]} tokens and its layout {layout.num_tokens}."
    )
    assert key.shape[2] == query.shape[2], (
        f"The row has {query.shape[2]} tokens and {key.shape[2]} keys: call the model with an empty cache."
    )


def _check_rule(
    module: nn.Module,
    backend: AttentionBackend,
    dropout: float,
    layout: RowLayout,
    rule: ScoreRule,
    others: dict[str, Any],
) -> None:
    """Make sure that nothing is asked that the back end would silently not do."""
    found = _unsupported(module, dropout, others) or _not_by_rule(backend, layout, rule)
    if found:
        what = f"{type(module).__name__} has {found}, which packed attention does not compute"
        raise LaunchError(what, "model.attention", FIX)


def _unsupported(module: nn.Module, dropout: float, others: dict[str, Any]) -> str | None:
    if dropout:
        return f"attention dropout {dropout:g}"
    for key, meaning in UNSUPPORTED.items():
        if others.get(key) is not None:
            return meaning
    is_causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return "attention that is not causal"
    return None


def _not_by_rule(backend: AttentionBackend, layout: RowLayout, rule: ScoreRule) -> str | None:
    """A rule that the back end cannot follow."""
    if rule is PLAIN:
        return None
    if rule.softcap is not None and backend not in CAPPED:
        return f"{RULES['softcap']} by {backend}"
    if backend in MERGED:
        return None
    if rule.sinks_H is not None:
        return f"{RULES['s_aux']} by {backend}"
    if rule.window is not None:
        span = layout.longest_span
        return (
            f"a sliding window of {rule.window:,} tokens and a row that looks back on {span:,} by {backend}"
        )
    return None
