"""The shape of a model from its config.json alone: layers, widths, and how many parameters each part has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from memtrain.errors import RecipeError
from memtrain.recipes.model import Adapter


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear map of a decoder layer."""

    name: str
    num_inputs: int
    num_outputs: int
    has_bias: bool = False

    @property
    def num_parameters(self) -> int:
        """Weight and bias."""
        return self.num_outputs * (self.num_inputs + self.has_bias)


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of a layer: a router and expert MLPs stored as two stacked tensors."""

    num_experts: int
    num_per_token: int
    mlp_width: int

    def num_parameters(self, width: int) -> int:
        """Router, gates, up and down projections."""
        return self.num_experts * width * (1 + 3 * self.mlp_width)

    def num_adapter(self, width: int, rank: int) -> int:
        """What PEFT's `all-linear` adds: router, fused gate and up (at twice the rank), down."""
        gate_up = 2 * (width + 2 * self.mlp_width)
        return rank * (width + self.num_experts + self.num_experts * (gate_up + width + self.mlp_width))


@dataclass(frozen=True, slots=True)
class Family:
    """What the code of a model type does that its config does not say."""

    qk_norm: Literal["none", "head", "whole"] = "none"
    """Norms on queries and keys: none, one scale for all heads, or one over the whole width."""
    num_wide_norms: int = 2
    """RMS norms of the model's width in a layer."""
    bias: Literal["none", "config", "qkv"] = "config"
    """Biases of the attention: never, `attention_bias` of the config, or always on q, k and v."""
    fused: bool = False
    """q, k and v are one linear map, gate and up another."""
    norms_in_float: bool = False
    """The norm multiplies by its scale in float32 (others round first)."""
    sliding: Literal["none", "all", "types"] = "none"
    """Which layers a `sliding_window` concerns when `layer_types` does not say."""
    defaults: Mapping[str, Any] | None = None
    """What transformers fills in for keys a config.json leaves out."""


def _defaults(vocab: int, width: int, mlp: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    } | more


# Source: configuration_*.py and modeling_*.py of transformers 5.23; held by tests/memory/test_shape.py.
_QWEN = _defaults(151936, 4096, 22016, 32, 32, num_key_value_heads=32)
_OLMO = _defaults(50304, 4096, 11008, 32, 32)
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_CAPPED = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0} | _GEMMA
_GEMMA2 = _defaults(256000, 2304, 9216, 26, 8, num_key_value_heads=4, sliding_window=4096, **_CAPPED)
_GEMMA3 = _defaults(262208, 2304, 9216, 26, 8, num_key_value_heads=4, sliding_window=4096, **_GEMMA)
_MISTRAL = _defaults(32000, 4096, 14336, 32, 32, num_key_value_heads=8, sliding_window=4096)
_MOE = {"moe_intermediate_size": 768, "num_local_experts": 128, "num_experts_per_tok": 8}
FAMILIES: dict[str, Family] = {
    "llama": Family(defaults=_defaults(32000, 4096, 11008, 32, 32)),
    "mistral": Family(bias="none", sliding="all", defaults=_MISTRAL),
    "mixtral": Family(
        bias="none",
        sliding="all",
        defaults=_MISTRAL | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2": Family(bias="qkv", defaults=_QWEN),
    "qwen3": Family(qk_norm="head", defaults=_QWEN | {"head_dim": 128}),
    "qwen3_moe": Family(
        qk_norm="head", defaults=_defaults(151936, 2048, 6144, 24, 32, num_key_value_heads=4, **_MOE)
    ),
    "smollm3": Family(
        defaults=_defaults(128256, 2048, 11008, 36, 16, num_key_value_heads=4, tie_word_embeddings=True)
    ),
    "phi3": Family(bias="none", fused=True, sliding="all", defaults=_defaults(32064, 3072, 8192, 32, 32)),
    "granite": Family(defaults=_defaults(32000, 4096, 11008, 32, 32)),
    "olmo2": Family(qk_norm="whole", norms_in_float=True, defaults=_OLMO),
    "olmo3": Family(
        qk_norm="whole", norms_in_float=True, sliding="types", defaults=_OLMO | {"sliding_window": 4096}
    ),
    "gemma": Family(
        norms_in_float=True,
        defaults=_defaults(256000, 3072, 24576, 28, 16, num_key_value_heads=16, **_GEMMA),
    ),
    "gemma2": Family(num_wide_norms=4, norms_in_float=True, sliding="types", defaults=_GEMMA2),
    "gemma3_text": Family(
        qk_norm="head", num_wide_norms=4, norms_in_float=True, sliding="types", defaults=_GEMMA3
    ),
}
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}
"""Every n-th layer attends to everything where `layer_types` is not written."""


# No slots: sums over all layers are remembered, and a search asks for them thousands of times.
@dataclass(frozen=True)
class ModelShape:
    """A decoder-only language model, in numbers."""

    model_type: str
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    """Of a dense layer."""
    vocab_size: int
    tied: bool
    """The LM head is the embedding."""
    family: Family
    linears: tuple[Linear, ...]
    """Linear maps of one layer, in order of use; a mixture of experts is not among them."""
    experts: Experts | None
    num_expert_layers: int
    """Layers whose MLP is a mixture of experts."""
    sliding_window: int | None
    num_sliding_layers: int
    logit_softcap: bool
    attention_softcap: bool
    note: str
    """What is uncertain about these numbers; empty when nothing is."""
    ends_in: Literal["lm", "score"] = "lm"
    """The LM head, or one number for a sequence."""

    @property
    def query_width(self) -> int:
        """All query heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """All key heads side by side; values have as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_embedding(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab_size * self.width

    @property
    def num_head(self) -> int:
        """Parameters of the head that are not the embedding's."""
        if self.ends_in == "score":
            return self.width
        return 0 if self.tied else self.vocab_size * self.width

    @property
    def num_norms_per_layer(self) -> int:
        """Scales of all norms of one layer."""
        qk = {"none": 0, "head": 2 * self.head_dim, "whole": self.query_width + self.kv_width}
        return self.family.num_wide_norms * self.width + qk[self.family.qk_norm]

    @property
    def num_biases_per_layer(self) -> int:
        """Biases of the linear maps of one layer."""
        return sum(part.num_outputs for part in self.linears if part.has_bias)

    @property
    def num_attention_per_layer(self) -> int:
        """Parameters of the attention's linear maps in one layer."""
        return sum(part.num_parameters for part in self.linears if part.name not in MLP_NAMES)

    def num_per_layer(self, *, expert: bool) -> int:
        """Parameters of one layer: with a mixture of experts, or dense."""
        shared = self.num_norms_per_layer + self.num_attention_per_layer
        if expert and self.experts is not None:
            return shared + self.experts.num_parameters(self.width)
        return shared + sum(part.num_parameters for part in self.linears if part.name in MLP_NAMES)

    @cached_property
    def num_layer_parameters(self) -> int:
        """Parameters of all layers."""
        dense = self.num_layers - self.num_expert_layers
        return dense * self.num_per_layer(expert=False) + self.num_expert_layers * self.num_per_layer(
            expert=True
        )

    @cached_property
    def num_parameters(self) -> int:
        """Every parameter, tied ones once."""
        return self.num_embedding + self.num_layer_parameters + self.width + self.num_head

    @cached_property
    def num_linear_weights(self) -> int:
        """Weights of the layers' linear maps: what quantization stores in 4 or 8 bits."""
        dense = self.num_layers - self.num_expert_layers
        attention = sum(p.num_inputs * p.num_outputs for p in self.linears if p.name not in MLP_NAMES)
        mlp = sum(p.num_inputs * p.num_outputs for p in self.linears if p.name in MLP_NAMES)
        return self.num_layers * attention + dense * mlp

    def adapted(self, adapter: Adapter) -> tuple[Linear, ...]:
        """The linear maps of a dense layer that get an adapter."""
        if "all-linear" in adapter.target_modules:
            return self.linears
        names = {target.rsplit(".", 1)[-1] for target in adapter.target_modules}
        return tuple(part for part in self.linears if part.name in names)

    def num_adapter_per_layer(self, adapter: Adapter, *, expert: bool = False) -> int:
        """Trained parameters that an adapter adds to one layer."""
        parts = [part for part in self.adapted(adapter) if not (expert and part.name in MLP_NAMES)]
        magnitudes = sum(part.num_outputs for part in parts) if adapter.kind == "dora" else 0
        added = adapter.r * sum(part.num_inputs + part.num_outputs for part in parts) + magnitudes
        if expert and self.experts is not None and "all-linear" in adapter.target_modules:
            added += self.experts.num_adapter(self.width, adapter.r)
        return added

    def num_adapter(self, adapter: Adapter) -> int:
        """Trained parameters of an adapter, without `modules_to_save`."""
        dense = self.num_layers - self.num_expert_layers
        head = self.vocab_size + self.width if "lm_head" in adapter.target_modules else 0
        layers = dense * self.num_adapter_per_layer(adapter)
        return (
            layers
            + self.num_expert_layers * self.num_adapter_per_layer(adapter, expert=True)
            + adapter.r * head
        )

    def num_saved_modules(self, adapter: Adapter) -> int:
        """Parameters of `modules_to_save`: trained copies beside the frozen originals."""
        sizes = {"embed_tokens": self.num_embedding, "lm_head": self.vocab_size * self.width}
        return sum(sizes.get(name.rsplit(".", 1)[-1], 0) for name in adapter.modules_to_save)


MLP_NAMES = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})


def read_config(folder: Path) -> ModelShape:
    """The shape of the model in a folder with a config.json.

    Raises: RecipeError when there is none or it is no decoder's.
    """
    file = folder / "config.json" if folder.is_dir() else folder
    if not file.is_file():
        raise RecipeError(
            f"there is no config.json at {folder}", fix="model.path is a folder in the Hugging Face format"
        )
    return shape_of(json.loads(file.read_text()), where=str(file))


def shape_of(config: Mapping[str, Any], where: str = "", head: Literal["lm", "score"] = "lm") -> ModelShape:
    """The shape that a transformers config (as a mapping) describes, with the `head` of a method.

    A model type that is not in FAMILIES is read like a Llama with what its config says, and noted.

    Raises: RecipeError when the numbers of a decoder are missing.
    """
    notes: list[str] = []
    if isinstance(config.get("text_config"), Mapping):
        notes.append("only the text part of the model is counted")
        config = config["text_config"]
    model_type = str(config.get("model_type", ""))
    family = FAMILIES.get(model_type)
    if family is None:
        family = Family()
        notes.append(f"model type '{model_type}' is not in the table: counted like a Llama of its sizes")
    known = dict(family.defaults or {}) | dict(config)
    try:
        width, heads = int(known["hidden_size"]), int(known["num_attention_heads"])
        layers, vocab = int(known["num_hidden_layers"]), int(known["vocab_size"])
        mlp_width = int(known.get("intermediate_size") or 4 * width)
    except (KeyError, TypeError) as missing:
        raise RecipeError(
            f"the model's config does not say {missing}",
            where,
            "a decoder has hidden_size, num_attention_heads, num_hidden_layers and vocab_size",
        ) from None
    kv_heads = int(known.get("num_key_value_heads") or heads)
    head_dim = int(known.get("head_dim") or width // heads)
    window, num_sliding = _window(model_type, family, known, layers)
    experts = _experts(known)
    return ModelShape(
        model_type=model_type,
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        vocab_size=vocab,
        tied=head == "lm" and bool(known.get("tie_word_embeddings", False)),
        ends_in=head,
        family=family,
        linears=_linears(family, known, width, heads * head_dim, kv_heads * head_dim, mlp_width),
        experts=experts,
        num_expert_layers=0 if experts is None else _num_expert_layers(known, layers),
        sliding_window=window,
        num_sliding_layers=num_sliding,
        logit_softcap=bool(known.get("final_logit_softcapping")),
        attention_softcap=bool(known.get("attn_logit_softcapping")),
        note="; ".join(notes),
    )


def _linears(
    family: Family, config: Mapping[str, Any], width: int, query: int, kv: int, mlp: int
) -> tuple[Linear, ...]:
    all_biased = family.bias == "config" and bool(config.get("attention_bias", False))
    qkv_biased = all_biased or family.bias == "qkv"
    mlp_biased = bool(config.get("mlp_bias", False))
    if family.fused:
        return (
            Linear("qkv_proj", width, query + 2 * kv),
            Linear("o_proj", query, width),
            Linear("gate_up_proj", width, 2 * mlp),
            Linear("down_proj", mlp, width),
        )
    return (
        Linear("q_proj", width, query, qkv_biased),
        Linear("k_proj", width, kv, qkv_biased),
        Linear("v_proj", width, kv, qkv_biased),
        Linear("o_proj", query, width, all_biased),
        Linear("gate_proj", width, mlp, mlp_biased),
        Linear("up_proj", width, mlp, mlp_biased),
        Linear("down_proj", mlp, width, mlp_biased),
    )


def _experts(config: Mapping[str, Any]) -> Experts | None:
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count or int(count) < 2:
        return None
    width = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
    return Experts(int(count), int(config.get("num_experts_per_tok") or 2), int(width))


def _num_expert_layers(config: Mapping[str, Any], num_layers: int) -> int:
    dense: Any = config.get("mlp_only_layers") or ()
    step = int(config.get("decoder_sparse_step") or 1)
    return sum(1 for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)


def _window(
    model_type: str, family: Family, config: Mapping[str, Any], num_layers: int
) -> tuple[int | None, int]:
    """(sliding window, layers that it concerns)."""
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return None, 0
    types = config.get("layer_types")
    if types is not None:
        count = sum(1 for kind in types if kind == "sliding_attention")
    elif family.sliding == "types":
        count = num_layers - num_layers // _FULL_EVERY[model_type]
    else:
        count = num_layers if family.sliding == "all" else 0
    return (int(window), count) if count else (None, 0)
