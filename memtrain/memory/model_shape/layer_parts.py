"""The parts of a model that memory is counted by: linear maps, experts, and the sums of a counted model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memtrain.recipes.sections.model import ALL_LINEAR, Adapter


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear map of a decoder layer."""

    name: str
    num_inputs: int
    num_outputs: int
    has_bias: bool = False

    @property
    def num_parameters(self) -> int:
        """Weight and bias."""
        return self.num_outputs * (self.num_inputs + self.has_bias)


class ExpertStack(NamedTuple):
    """The matrices of all experts of a layer, in one tensor."""

    name: str
    num_experts: int
    num_rows: int
    num_columns: int

    @property
    def num_weights(self) -> int:
        """Numbers in it."""
        return self.num_experts * self.num_rows * self.num_columns

    def num_adapter(self, rank: int) -> int:
        """Parameters of adapters of this rank on every expert."""
        return rank * self.num_experts * (self.num_rows + self.num_columns)


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of a layer: a router and expert MLPs stored as two stacked tensors."""

    num_experts: int
    num_per_token: int
    mlp_width: int
    is_clamped: bool = False
    """Gate and up are clamped before the one is activated and one is added to the other: each step is kept
    for the backward pass, and a bias of its own is picked for every token."""
    weights_in_float32: bool = False
    """The router's weights are float32, and so are the products with the experts' outputs."""

    def num_parameters(self, width: int) -> int:
        """Router, gates, up and down projections."""
        return self.num_experts * width * (1 + 3 * self.mlp_width)

    def stacks(self, width: int) -> tuple[ExpertStack, ...]:
        """Fused gates and up projections, and down projections."""
        return (
            ExpertStack("gate_up_proj", self.num_experts, 2 * self.mlp_width, width),
            ExpertStack("down_proj", self.num_experts, width, self.mlp_width),
        )


EXPERTS_IN_ALL_LINEAR = frozenset(
    [
        "mixtral",
        "minimax",
        "minimax_m2",
        "afmoe",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "ernie4_5_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "longcat_flash",
        "solar_open",
        "mellum",
        "qwen3_moe",
        "beam",
        "qwen3_next",
        "hunyuan_v1_moe",
        "flex_olmo",
        "olmoe",
        "exaone_moe",
        "cohere2_moe",
    ]
)
"""Model types whose experts and routers PEFT adapts by `all-linear`: those that had a linear map for each
expert. Source: transformers 5.23, conversion_mapping.py; peft 0.21,
utils/transformers_weight_conversion.py."""

OF_EXPERTS = frozenset(("gate_proj", "up_proj", "down_proj"))
"""Names of experts' maps to PEFT in these models: dense layers and shared experts get no adapter on maps of
these names by `all-linear`. Seen in models built without data (peft 0.21)."""


def is_named(adapter: Adapter, name: str) -> bool:
    """Whether an adapter names the linear maps of that name, or all."""
    targets = {target.rsplit(".", 1)[-1] for target in adapter.target_modules}
    return name in targets or ALL_LINEAR in targets


def takes_experts(adapter: Adapter, model_type: str) -> bool:
    """Whether PEFT takes a model's experts and routers for linear maps that the adapter names."""
    return ALL_LINEAR in adapter.target_modules and model_type in EXPERTS_IN_ALL_LINEAR


def is_adapted(adapter: Adapter, model_type: str, name: str) -> bool:
    """Whether PEFT puts an adapter on the linear maps of that name."""
    return is_named(adapter, name) and not (takes_experts(adapter, model_type) and name in OF_EXPERTS)


def stack_rank(adapter: Adapter, model_type: str, stack: str) -> int:
    """Rank of an adapter on the stack of that name; 0 where it gets none.

    By `all-linear` the halves of fused gates and up projections get the rank each.
    """
    if ALL_LINEAR in adapter.target_modules:
        fused = 2 if stack == "gate_up_proj" else 1
        return fused * adapter.r if model_type in EXPERTS_IN_ALL_LINEAR else 0
    is_named = any(target.rsplit(".", 1)[-1] == stack for target in adapter.target_parameters)
    return adapter.r if is_named else 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters counted in the modules of a model, where no formula of its family is known."""

    num_trunk: int
    """Every parameter but the head's own, tied ones once."""
    num_embedding: int
    """Parameters of the token embedding."""
    num_head: int
    """Parameters of the head that are not the embedding's."""
    layers: tuple[int, ...]
    """Parameters of each decoder layer."""
    largest_tensor: int
    """Numbers in the largest parameter."""
    num_vectors: int
    """Parameters that are no matrices: scales and biases."""
    linears: tuple[Linear, ...]
    """Linear maps of the largest layer."""
    all_linears: tuple[tuple[Linear, int], ...]
    """Every linear map but the head with how often it is there."""
    stacks: tuple[tuple[ExpertStack, int], ...]
    """Every stack of experts with how often it is there."""
    num_positions: int | None
    """Rows of a table of learned positions: no token may stand later in a row."""
    is_eager: bool
    """Attention makes its scores: the class has no fused form of it."""

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of all decoder layers."""
        return sum(self.layers)

    @property
    def num_linear_weights(self) -> int:
        """Weights of all linear maps but the head's."""
        return sum(count * one.num_inputs * one.num_outputs for one, count in self.all_linears)

    @property
    def num_rows_and_columns(self) -> int:
        """Of all matrices but embedding and head."""
        return sum(count * (one.num_inputs + one.num_outputs) for one, count in self.all_linears)
