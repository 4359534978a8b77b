"""The parts of a model that memory is counted by: linear maps, experts, and the sums of a counted model."""

from __future__ import annotations

from dataclasses import dataclass


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
        """Parameters that PEFT's `all-linear` adds: router, fused gate and up (at twice the rank), down."""
        gate_up = 2 * (width + 2 * self.mlp_width)
        return rank * (width + self.num_experts + self.num_experts * (gate_up + width + self.mlp_width))


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
    stacks: tuple[tuple[int, int, int], ...]
    """(experts, rows, columns) of every stack of experts."""
    num_positions: int | None
    """Rows of a table of learnt positions: no token may stand later in a row."""
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
