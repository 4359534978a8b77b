"""Attention back ends: the choice among the runnable, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import cast

from memtrain.errors import Fault, RecipeError
from memtrain.memory.model_shape.config_names import canonical
from memtrain.memory.model_shape.config_parts import head_dim_of
from memtrain.memory.model_shape.families import FAMILIES
from memtrain.memory.model_shape.length_rules import length_rules, own_layers
from memtrain.memory.rules.tested_models import PACKING_TESTED_MODELS


class AttentionBackend(StrEnum):
    """A way to attend. All but `transformers` keep the rows of one flattened row apart and share prompts."""

    TORCH_CPU = "torch_cpu"
    FLASH = "flash"
    FLASH3 = "flash3"
    TORCH_VARLEN = "torch_varlen"
    FLEX = "flex"
    TORCH_EFFICIENT = "torch_efficient"
    MASKED = "masked"
    TRANSFORMERS = "transformers"


PREFERENCE: Mapping[str, tuple[AttentionBackend, ...]] = {
    "cpu": (AttentionBackend.TORCH_CPU, AttentionBackend.MASKED, AttentionBackend.TRANSFORMERS),
    "cuda": (
        AttentionBackend.FLASH3,
        AttentionBackend.FLASH,
        AttentionBackend.TORCH_VARLEN,
        AttentionBackend.FLEX,
        AttentionBackend.TORCH_EFFICIENT,
        AttentionBackend.MASKED,
        AttentionBackend.TRANSFORMERS,
    ),
}
"""Back ends of a device kind, the one to take first first."""

MERGED = (
    AttentionBackend.TORCH_CPU,
    AttentionBackend.FLASH3,
    AttentionBackend.FLASH,
    AttentionBackend.TORCH_VARLEN,
    AttentionBackend.TORCH_EFFICIENT,
    AttentionBackend.MASKED,
)
"""Back ends that tell the log-sum-exp of their scores: by it windows, sinks and slices of a row are put
together."""
NOT_SLICED = "slices are merged by the log-sum-exp of their scores, which this back end does not return"

CAPPED = (AttentionBackend.FLASH3, AttentionBackend.FLASH, AttentionBackend.MASKED)
"""Back ends whose kernels cap scores."""

HALF = ("bfloat16", "float16")
PACKAGES = ("flash_attn_interface", "flash_attn", "triton")
"""Modules that the choice looks for; FlashAttention-3 is `flash_attn_interface`."""
PACKAGE_OF: Mapping[str, str] = {
    AttentionBackend.FLASH3: "flash_attn_interface",
    AttentionBackend.FLASH: "flash_attn",
}
"""The module of a back end that torch does not bring."""
REASONS: Mapping[AttentionBackend, str] = {
    AttentionBackend.TORCH_CPU: "segment by segment on torch's CPU flash kernel",
    AttentionBackend.FLASH3: "variable-length kernels of FlashAttention-3, for Hopper",
    AttentionBackend.FLASH: "variable-length kernels of the flash-attn package",
    AttentionBackend.TORCH_VARLEN: "torch's own variable-length flash kernels",
    AttentionBackend.FLEX: "FlexAttention with a block mask, compiled",
    AttentionBackend.TORCH_EFFICIENT: "segment by segment on torch's memory-efficient kernel",
    AttentionBackend.MASKED: "last resort: a mask, and scores of row length squared in every layer",
    AttentionBackend.TRANSFORMERS: "the model's own attention, one example to a row and no packing",
}


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """Facts on which the choice depends.

    device: "cuda" or "cpu". compute_capability: of the oldest GPU, None on CPU. dtype: of queries and keys,
    e.g. "bfloat16". in_slices: rows are attended to in slices. packages: importable ones among `PACKAGES`.
    longest_row_tokens: the most tokens that one token may look back on (`max_length`), None when unbounded.
    The rest are facts of the model's configuration; `own_layers` names the kinds of layer that are not plain
    attention ("linear_attention", "mamba", ...).
    """

    device: str
    dtype: str
    compute_capability: tuple[int, int] | None = None
    packages: frozenset[str] = frozenset()
    longest_row_tokens: int | None = None
    head_dim: int | None = None
    sliding_window_tokens: int | None = None
    chunk_tokens: int | None = None
    top_keys_tokens: int | None = None
    softcap: float | None = None
    attention_dropout: float = 0.0
    has_sinks: bool = False
    in_slices: bool = False
    own_layers: tuple[str, ...] = ()
    untried: str = ""
    """The model type, where its rows were never seen to stay apart; empty where they were."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The chosen back end with its reason, and a sentence for each that cannot run."""

    backend: AttentionBackend
    reason: str
    refused: tuple[tuple[AttentionBackend, str], ...]

    @property
    def can_pack(self) -> bool:
        """Whether several examples may share a row."""
        return self.backend is not AttentionBackend.TRANSFORMERS


def choose_attention(facts: AttentionFacts, asked: AttentionBackend | None = None) -> AttentionChoice:
    """First back end of `PREFERENCE` that fits `facts`, or the one asked for.

    Raises:
        RecipeError: the one asked for cannot run here; the error says why and names those that can.
    """
    order = PREFERENCE[facts.device]
    if asked is not None:
        # Whoever asks may try: the worker checks its model before the first step.
        facts = replace(facts, untried="")
    refused = {backend: why for backend in order if (why := refusal(backend, facts))}
    usable = [backend for backend in order if backend not in refused]
    listed = tuple(refused.items())
    if asked is None:
        return AttentionChoice(usable[0], REASONS[usable[0]], listed)
    if asked in usable:
        return AttentionChoice(asked, f"asked for: {REASONS[asked]}", listed)
    why = refused.get(asked, f"it does not run on {facts.device}")
    fix = f"use one of {', '.join(usable)}, or leave the choice out"
    raise RecipeError([Fault(f"attention {asked}: {why}", "model.attention", fix)])


def refusal(backend: AttentionBackend, facts: AttentionFacts) -> str | None:
    """Reason that `backend` cannot run under `facts`, as a clause without a full stop; None when it can."""
    if backend is AttentionBackend.TRANSFORMERS:
        return None
    return _model_refusal(backend, facts) or _device_refusal(backend, facts)


def _model_refusal(backend: AttentionBackend, facts: AttentionFacts) -> str | None:
    """Property of the model that a back end does not compute: the result would differ from the model's
    own."""
    if facts.own_layers:
        return f"the model's {', '.join(facts.own_layers)} layers carry state from one row into the next"
    if facts.softcap and backend not in CAPPED:
        return f"the model caps attention scores at {facts.softcap:g}, which {backend} does not compute"
    if facts.has_sinks and backend not in MERGED:
        return f"the model has attention sinks, which {backend} does not compute"
    if facts.in_slices and backend not in MERGED:
        return NOT_SLICED
    if facts.attention_dropout:
        return f"attention dropout {facts.attention_dropout:g} needs the scores; set it to 0"
    if facts.untried:
        return f"packing is untested with {facts.untried} models; to try it, name this back end"
    for tokens, name in (
        (None if backend in MERGED else facts.sliding_window_tokens, "slides over"),
        (facts.chunk_tokens, "is cut into chunks of"),
        (facts.top_keys_tokens, "picks, of all tokens before one,"),
    ):
        if tokens is None:
            continue
        if facts.longest_row_tokens is None:
            return f"the model's attention {name} {tokens:,} tokens and max_length is not bounded"
        if tokens < facts.longest_row_tokens:
            span = f"max_length is {facts.longest_row_tokens:,}"
            return f"the model's attention {name} {tokens:,} tokens and {span}; lower max_length to {tokens}"
    return None


def own_scores(config: Mapping[str, object], longest: int | None) -> str | None:
    """A rule of the model's scores for rows of `longest` tokens (None: of any length), as a noun; None where
    attention is plain."""
    facts = model_facts(config)
    window = cast(int | None, facts["sliding_window_tokens"])
    if facts["has_sinks"]:
        return "attention sinks"
    if facts["softcap"]:
        return f"scores capped at {facts['softcap']:g}"
    if window is not None and (longest is None or longest > window):
        return f"attention that slides over {window:,} tokens"
    return None


def shown(capability: tuple[int, int]) -> str:
    """Compute capability as CUDA writes it."""
    return f"{capability[0]}.{capability[1]}"


def _device_refusal(backend: AttentionBackend, facts: AttentionFacts) -> str | None:
    if backend in (AttentionBackend.TORCH_CPU, AttentionBackend.MASKED):
        return None
    capability = facts.compute_capability or (0, 0)
    if backend is AttentionBackend.TORCH_EFFICIENT:
        if facts.dtype == "bfloat16" and capability < (8, 0):
            return f"{backend} takes bfloat16 from compute capability 8.0 on, this is {shown(capability)}"
        return None if capability >= (5, 0) else f"{backend} needs a CUDA device"
    if capability < (8, 0):
        return f"{backend} needs compute capability 8.0, this is {shown(capability)}"
    if backend is AttentionBackend.FLEX:
        return (
            None if "triton" in facts.packages else "triton, which compiles FlexAttention, is not installed"
        )
    if backend is AttentionBackend.FLASH3:
        # Its kernels are compiled for this one capability (hopper/setup.py: arch=compute_90a).
        if capability[0] != 9:
            return f"{backend} needs a Hopper GPU (compute capability 9.0), this is {shown(capability)}"
        if "flash_attn_interface" not in facts.packages:
            return "FlashAttention-3 (flash_attn_3, which brings flash_attn_interface) is not installed"
    if backend is AttentionBackend.FLASH and "flash_attn" not in facts.packages:
        return "the flash-attn package is not installed"
    if facts.dtype not in HALF:
        return f"{backend} computes in bfloat16 or float16, this is {facts.dtype}"
    if facts.head_dim is not None and (facts.head_dim > 256 or facts.head_dim % 8):
        return f"{backend} takes head widths up to 256 in steps of 8, this is {facts.head_dim}"
    return None


def model_facts(config: Mapping[str, object]) -> dict[str, object]:
    """The keyword arguments of `AttentionFacts` that a `config.json` (or `config.to_dict()`) settles."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text  # pyright: ignore[reportUnknownVariableType]
    config = canonical(config)
    model_type = str(config.get("model_type") or "")
    reach = {rule.kind: rule.tokens for rule in length_rules(config) if rule.depends == "reach"}
    # A config.json may leave out what its family has by default: Gemma 2 caps its scores at 50.
    own = (FAMILIES[model_type].defaults or {}) if model_type in FAMILIES else {}
    return {
        "head_dim": head_dim_of(config),
        "sliding_window_tokens": reach.get("window"),
        "chunk_tokens": reach.get("chunk"),
        "top_keys_tokens": reach.get("top_keys"),
        "softcap": _positive({**own, **config}, "attn_logit_softcapping"),
        "attention_dropout": _positive(config, "attention_dropout") or 0.0,
        "has_sinks": config.get("model_type") in MODELS_WITH_SINKS,
        "own_layers": own_layers(config),
        "untried": "" if model_type in PACKING_TESTED_MODELS or not model_type else model_type,
    }


MODELS_WITH_SINKS = ("gpt_oss",)
"""Sinks are weights and no key of the configuration; the self-check finds those not named here."""


def _positive(config: Mapping[str, object], key: str) -> float | None:
    number = config.get(key)
    return float(number) if isinstance(number, int | float) and number > 0 else None
