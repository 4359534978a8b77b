"""The shape of a model from its config.json alone: layers, widths, and how many parameters each part has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from memtrain.errors import RecipeError
from memtrain.memory.model_shape.config_names import canonical
from memtrain.memory.model_shape.config_parts import (
    experts_of,
    head_dim_of,
    linears_of,
    num_expert_layers_of,
    window_of,
)
from memtrain.memory.model_shape.families import FAMILIES, Family
from memtrain.memory.model_shape.layer_parts import (
    Counts,
    Experts,
    ExpertStack,
    Linear,
    is_adapted,
    is_named,
    stack_rank,
    takes_experts,
)
from memtrain.memory.model_shape.layer_record import ModelRecord
from memtrain.memory.model_shape.length_rules import ROTARY, length_rules, own_layers
from memtrain.memory.model_shape.looked_up import looked_up
from memtrain.recipes.sections.model import Adapter

NO_RUN = "no run of it can start here"
"""Words of a note on a model that this machine's transformers does not know."""


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
    note: str
    """Doubts about these numbers; empty when there are none."""
    makes_scores: bool = False
    """Attention keeps its scores: they are capped, or the class has no fused form."""
    drops_scores: bool = False
    """Scores are dropped at random, which torch's fused attention does on GPUs alone."""
    hidden_dropout: bool = False
    """Numbers are dropped between layers."""
    counts: Counts | None = None
    """Counts from the modules of a model whose family has no formula here; None where the formulas hold."""
    ends_in: Literal["lm", "score"] = "lm"
    """The LM head, or one number for a sequence."""
    angles_follow_rows: bool = False
    """Rotary positions depend on the length of the row."""
    own_layers: tuple[str, ...] = ()
    """Kinds of layers that are neither attention nor an MLP, whose activations no formula knows."""
    record: ModelRecord | None = None
    """What its layers hold, measured in passes without data; None where formulas know them."""
    unmeasured: str = ""
    """Reason that it was not measured."""

    @property
    def is_floor(self) -> bool:
        """Whether activations are known to be more than the numbers say."""
        return bool(self.own_layers) and self.record is None

    @property
    def starts_no_run(self) -> bool:
        """Whether this machine can build no such model: its numbers are arithmetic alone."""
        return NO_RUN in self.note

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
        if self.counts is not None:
            return self.counts.num_embedding
        return self.vocab_size * self.width

    @property
    def num_head(self) -> int:
        """Parameters of the head that are not the embedding's."""
        if self.counts is not None:
            return self.counts.num_head
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
        """Parameters of one layer: with a mixture of experts, or dense; of the largest that was counted."""
        if self.counts is not None:
            return max(self.counts.layers)
        shared = self.num_norms_per_layer + self.num_attention_per_layer
        if expert and self.experts is not None:
            return shared + self.experts.num_parameters(self.width)
        return shared + sum(part.num_parameters for part in self.linears if part.name in MLP_NAMES)

    @cached_property
    def num_layer_parameters(self) -> int:
        """Parameters of all layers."""
        if self.counts is not None:
            return self.counts.num_layer_parameters
        dense = self.num_layers - self.num_expert_layers
        return dense * self.num_per_layer(expert=False) + self.num_expert_layers * self.num_per_layer(
            expert=True
        )

    @cached_property
    def num_parameters(self) -> int:
        """Every parameter, tied ones once."""
        if self.counts is not None:
            return self.counts.num_trunk + self.num_head
        return self.num_embedding + self.num_layer_parameters + self.width + self.num_head

    @cached_property
    def num_linear_weights(self) -> int:
        """Weights of the layers' linear maps, which quantization stores in 4 or 8 bits; experts are apart."""
        if self.counts is not None:
            return self.counts.num_linear_weights
        dense = self.num_layers - self.num_expert_layers
        attention = sum(p.num_inputs * p.num_outputs for p in self.linears if p.name not in MLP_NAMES)
        mlp = sum(p.num_inputs * p.num_outputs for p in self.linears if p.name in MLP_NAMES)
        return self.num_layers * attention + dense * mlp

    @cached_property
    def stacks(self) -> tuple[tuple[ExpertStack, int], ...]:
        """Every kind of stacked experts with how often it is there."""
        if self.counts is not None:
            return self.counts.stacks
        kinds = () if self.experts is None else self.experts.stacks(self.width)
        return tuple((kind, self.num_expert_layers) for kind in kinds)

    @cached_property
    def num_expert_weights(self) -> int:
        """Weights of stacked experts, which quantization stores in 4 or 8 bits too."""
        return sum(count * stack.num_weights for stack, count in self.stacks)

    @property
    def num_positions(self) -> int | None:
        """Rows of a table of positions: no token may stand later in its row. None where there is none."""
        return None if self.counts is None else self.counts.num_positions

    @cached_property
    def num_vectors(self) -> int:
        """Parameters that are no matrices: scales and biases."""
        if self.counts is not None:
            return self.counts.num_vectors
        return self.width + self.num_layers * (self.num_norms_per_layer + self.num_biases_per_layer)

    @cached_property
    def num_rows_and_columns(self) -> int:
        """Of the matrices of all layers: an expert's are not among them."""
        if self.counts is not None:
            return self.counts.num_rows_and_columns
        return sum(part.num_inputs + part.num_outputs for part in self.linears) * self.num_layers

    @cached_property
    def largest_tensor(self) -> int:
        """Numbers in the largest parameter."""
        if self.counts is not None:
            return self.counts.largest_tensor
        stacked = max((stack.num_weights for stack, _ in self.stacks), default=0)
        return max(self.num_embedding, stacked, self.largest_linear)

    @cached_property
    def plain_linears(self) -> tuple[Linear, ...]:
        """The linear maps that a layer has, stacks of experts aside."""
        is_mixed = self.counts is None and self.num_expert_layers == self.num_layers
        return tuple(part for part in self.linears if not (is_mixed and part.name in MLP_NAMES))

    @cached_property
    def largest_linear(self) -> int:
        """Weights of the largest linear map that a layer has, stacks of experts aside; 0: none."""
        return max((part.num_inputs * part.num_outputs for part in self.plain_linears), default=0)

    @cached_property
    def _by_adapter(self) -> dict[tuple[str, Adapter], Any]:
        """Counts of adapters that were asked for: a search asks a million times for the same few."""
        return {}

    def adapted(self, adapter: Adapter) -> tuple[Linear, ...]:
        """The linear maps of a dense layer that get an adapter."""
        key = ("adapted", adapter)
        if key not in self._by_adapter:
            self._by_adapter[key] = self._adapted(adapter)
        return self._by_adapter[key]

    def _adapted(self, adapter: Adapter) -> tuple[Linear, ...]:
        # Maps that PEFT takes for experts' stand here for what the adapters of these and of routers keep.
        return tuple(part for part in self.linears if is_named(adapter, part.name))

    def num_adapter_per_layer(self, adapter: Adapter, *, expert: bool = False) -> int:
        """Trained parameters that an adapter adds to one layer."""
        parts = [
            part
            for part in self.adapted(adapter)
            if not (expert and part.name in MLP_NAMES) and is_adapted(adapter, self.model_type, part.name)
        ]
        magnitudes = sum(part.num_outputs for part in parts) if adapter.kind == "dora" else 0
        added = adapter.r * sum(part.num_inputs + part.num_outputs for part in parts) + magnitudes
        if expert:
            added += self._num_router_adapter(adapter)
            added += sum(stack.num_adapter(self.rank_of(adapter, stack)) for stack, _ in self.stacks)
        return added

    def rank_of(self, adapter: Adapter, stack: ExpertStack) -> int:
        """Rank of an adapter on a stack of experts; 0 where it gets none."""
        return stack_rank(adapter, self.model_type, stack.name)

    def num_stack_adapter(self, adapter: Adapter) -> int:
        """Trained parameters that an adapter adds to all stacks of experts and their routers."""
        of_routers = self.num_expert_layers * self._num_router_adapter(adapter)
        of_stacks = (count * stack.num_adapter(self.rank_of(adapter, stack)) for stack, count in self.stacks)
        return of_routers + sum(of_stacks)

    def _num_router_adapter(self, adapter: Adapter) -> int:
        """Of one router: adapted where PEFT takes it for a linear map."""
        if self.experts is None or not takes_experts(adapter, self.model_type):
            return 0
        return adapter.r * (self.width + self.experts.num_experts)

    def num_adapter(self, adapter: Adapter) -> int:
        """Trained parameters of an adapter, without `modules_to_save`."""
        key = ("trained", adapter)
        if key not in self._by_adapter:
            self._by_adapter[key] = self._num_adapter(adapter)
        return self._by_adapter[key]

    def _num_adapter(self, adapter: Adapter) -> int:
        if self.counts is not None:
            return self._num_counted_adapter(adapter, self.counts)
        dense = self.num_layers - self.num_expert_layers
        layers = dense * self.num_adapter_per_layer(adapter)
        return (
            layers
            + self.num_expert_layers * self.num_adapter_per_layer(adapter, expert=True)
            + self.num_outer_adapter(adapter)
        )

    def num_outer_adapter(self, adapter: Adapter) -> int:
        """Trained parameters that an adapter adds to the embeddings and to the language model's head."""
        num_named = sum(name in adapter.target_modules for name in ("embed_tokens", "lm_head"))
        return num_named * adapter.r * (self.vocab_size + self.width)

    def _num_counted_adapter(self, adapter: Adapter, counts: Counts) -> int:
        is_dora = adapter.kind == "dora"
        parts = [
            (part, count)
            for part, count in counts.all_linears
            if is_adapted(adapter, self.model_type, part.name)
        ]
        maps = sum(
            count * (adapter.r * (part.num_inputs + part.num_outputs) + is_dora * part.num_outputs)
            for part, count in parts
        )
        return maps + self.num_stack_adapter(adapter) + self.num_outer_adapter(adapter)

    def num_saved_modules(self, adapter: Adapter) -> int:
        """Parameters of `modules_to_save`: trained copies beside the frozen originals."""
        sizes = {"embed_tokens": self.num_embedding, "lm_head": self.vocab_size * self.width}
        return sum(sizes.get(name.rsplit(".", 1)[-1], 0) for name in adapter.modules_to_save)


MLP_NAMES = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})
ENTERING = ("q_proj", "k_proj", "v_proj", "qkv_proj")
"""Maps before a layer's attention."""


def is_measured(shape: ModelShape, adapter: Adapter | None) -> bool:
    """Whether what layers hold is measured: of model types and adapters that no arithmetic is known of."""
    return shape.counts is not None or (adapter is not None and adapter.kind == "dora")


def has_formula(config: Mapping[str, Any]) -> bool:
    """Whether the parts of a model follow from its config alone; else they are counted in its modules."""
    return "text_config" not in config and config.get("model_type") in FAMILIES


def read_config(folder: Path) -> ModelShape:
    """The shape of the model in a folder with a config.json.

    Raises: RecipeError when there is none or it is no decoder's.
    """
    file = folder / "config.json" if folder.is_dir() else folder
    if not file.is_file():
        raise RecipeError(
            f"there is no config.json at {folder}",
            where="model.path",
            fix="set model.path to a folder in the Hugging Face format",
        )
    return shape_of(json.loads(file.read_text()), where=str(file))


def shape_of(
    config: Mapping[str, Any],
    where: str = "",
    head: Literal["lm", "score"] = "lm",
    *,
    counts: Counts | None = None,
) -> ModelShape:
    """The shape that a transformers config (as a mapping) describes, with the `head` of a method.

    A model type that is not in FAMILIES is read like a Llama with what its config says, and noted; with
    `counts` its weights are those that were counted.

    Raises: RecipeError when the numbers of a decoder are missing.
    """
    config, family, note = looked_up(config, counts)
    model_type = str(config.get("model_type", ""))
    known = dict(family.defaults or {}) | canonical(config)
    try:
        width = int(known["hidden_size"])
        # A counted model may have no attention at all.
        heads = int(known["num_attention_heads"] if counts is None else known.get("num_attention_heads") or 1)
        layers, vocab = int(known["num_hidden_layers"]), int(known["vocab_size"])
        # Gemma 3n writes a width for each layer.
        mlp = known.get("intermediate_size") or 4 * width
        mlp_width = int(max(cast(list[int], mlp)) if isinstance(mlp, list) else mlp)
    except (KeyError, TypeError) as missing:
        raise RecipeError(
            f"the model's config does not have {missing}",
            where,
            "a decoder has hidden_size, num_attention_heads, num_hidden_layers and vocab_size",
        ) from None
    kv_heads, head_dim = int(known.get("num_key_value_heads") or heads), head_dim_of(known) or width // heads
    window, num_sliding = window_of(model_type, family, known, layers)
    experts = experts_of(known)
    linears = linears_of(family, known, width, heads * head_dim, kv_heads * head_dim, mlp_width)
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
        linears=linears if counts is None else counts.linears,
        experts=experts,
        num_expert_layers=0 if experts is None else num_expert_layers_of(known, layers),
        sliding_window=window,
        num_sliding_layers=num_sliding,
        logit_softcap=bool(known.get("final_logit_softcapping")),
        note=note,
        makes_scores=bool(known.get("attn_logit_softcapping")) or (counts is not None and counts.is_eager),
        drops_scores=bool(known.get("attention_dropout")),
        hidden_dropout=bool(known.get("hidden_dropout")),
        counts=counts,
        angles_follow_rows=any(rule.kind in ROTARY for rule in length_rules(known)),
        own_layers=own_layers(config),
    )
