"""Activations of a mixture of experts: what a layer's experts keep, and hold beside it.

Source and letters: as in activations.py.
"""

from __future__ import annotations

from memtrain.memory.estimate.quantized import LAST
from memtrain.memory.estimate.workload import Workload, once

PIECES, LEAST_PIECE = 16, 64
"""Pieces, and fewest rows of one, in which memtrain's own pass makes float32 products at the weighted sum."""


@once
def experts_kept(load: Workload) -> int:
    """Kept by a mixture of experts (grouped products), in which every token stands k times.

    Gate, up and activated gate of its k experts (where these are clamped: gate and up as they come and the
    clamped gate, its sigmoid, their product, and up plus one), their outputs before weighting, and the
    router's scores; where a stack is trained or adapted also the tokens that enter it, and what its adapters
    make of them.
    """
    experts = load.shape.experts
    if experts is None:
        return 0
    copies = load.N * experts.num_per_token
    ranks = stack_ranks(load)
    width = (1 + keeps_entering(load)) * load.shape.width + num_steps(load) * experts.mlp_width
    rows = copies * load.a * (width + sum(ranks.values()))
    # Adapters in half precision are rounded for each pass, and kept; in float32 those that meet the experts'
    # width are laid out for the kernel.
    copied = 0
    for stack, _ in load.shape.stacks:
        rank = ranks.get(stack.name, 0)
        aligned = 0 if load.is_half else experts.num_experts * rank * load.shape.width
        copied += load.a * (stack.num_adapter(rank) - aligned)
    # The load-balance loss keeps probabilities, the tokens' weights, and what both come to.
    evened = load.N * (4 * experts.num_experts + 8) if load.settings.router_aux_loss_coef else 0
    return rows + copied + load.N * experts.num_experts * (4 + load.a) + copies * 40 + evened


def num_steps(load: Workload) -> int:
    """Tensors of an expert's width that a layer keeps for every copy of a token."""
    assert load.shape.experts is not None, "Only a mixture has experts."
    of_down = load.trains_all or stack_ranks(load).get("down_proj", 0) > 0
    return (6 if load.shape.experts.is_clamped else 3) + of_down


def clamped_forward(load: Workload) -> int:
    """Held besides while clamped experts multiply: the clamped up, the product where it is not kept, and in
    transformers' own pass the biases of gate and up, picked for each token. 0 for other experts.

    Source: transformers 5.23, integrations/moe.py, `grouped_mm_experts_forward`; seen in traces of gpt-oss.
    """
    experts = load.shape.experts
    if experts is None or not experts.is_clamped:
        return 0
    keeps = load.trains_all or stack_ranks(load).get("down_proj", 0) > 0
    biases = 0 if has_own_pass(load) else 2
    return load.a * load.N * experts.num_per_token * experts.mlp_width * (biases + 2 - keeps)


def has_own_pass(load: Workload) -> bool:
    """Whether experts compute by memtrain's own code (trainers/model/experts/forward.py): adapted or packed
    ones."""
    return any(stack_ranks(load).values()) or load.settings.quantize != "none"


def keeps_entering(load: Workload) -> bool:
    """Whether the tokens that enter the experts are kept: gate and up are trained or adapted."""
    return load.trains_all or stack_ranks(load).get("gate_up_proj", 0) > 0


def stack_ranks(load: Workload) -> dict[str, int]:
    """Ranks of the adapters of each stack of experts, by name."""
    adapter = load.settings.adapter
    if adapter is None:
        return {}
    return {stack.name: load.shape.rank_of(adapter, stack) for stack, _ in load.shape.stacks}


def experts_backward(
    load: Workload, kept: int, down: int = 0, up: int = 0, *, stays: bool = True, widens: int = 0
) -> int:
    """Most bytes at the moments of a mixture in a layer's backward pass; `kept`: by the whole layer.

    At the weighted sum the gradient that comes in, for each expert of a token: three times in transformers'
    pass (as it is copied, in zeros of its size, and sorted; in float32 where the router's weights are), once
    in memtrain's own. At the last map its product's gradient, and `down`, the gradient of its stack. At the
    factors of the product, when outputs and product are gone, three gradients of their width. At the first
    maps their gradient, that of the tokens that enter (of an adapted stack by both ways), and `up`. `stays`:
    `down` does until then. `widens`: times its bytes for the float32 copy of each gradient of a stack, which
    is made when those that it came from are gone.

    Source: seen in traces of Mixtral, Qwen3-MoE and gpt-oss shapes, torch 2.13 and transformers 5.23.
    """
    experts = load.shape.experts
    assert experts is not None, "Only a mixture has these moments."
    a, ranks = load.a, stack_ranks(load)
    copies = load.N * experts.num_per_token
    outputs, product = a * copies * load.shape.width, a * copies * experts.mlp_width
    wide = 4 if experts.weights_in_float32 and load.is_half else a
    if has_own_pass(load):
        pieces = min(copies, max(copies // PIECES, LEAST_PIECE)) if wide > a else 0
        at_sum = outputs + pieces * wide * load.shape.width
    else:
        # Checkpointed layers let the outputs go before the gradient of these is rounded.
        at_sum = 3 * outputs // a * wide + outputs * (wide > a and not load.settings.checkpoint_every)
    left = kept + a * load.N * load.shape.width - outputs
    of_down = load.trains_all or ranks.get("down_proj", 0) > 0
    after, entering = down * max(1, widens) if stays else 0, outputs
    if ranks.get("gate_up_proj", 0):
        entering = max(2 * outputs, 3 * outputs - 2 * product)
    return max(
        left + outputs + at_sum,
        left + product + down + max(outputs, widens * down),
        left + (3 - of_down) * product + after,
        left - num_steps(load) * product + entering + after + up + max(2 * product, widens * up),
    )


def at_packed_experts(load: Workload) -> int:
    """Bytes beside the factors' gradients at a mixture's packed first maps in a backward pass: tokens that
    enter, for each of their experts, and of adapters the gradient of their second factors, in float32.

    Source: seen in traces of Qwen3-MoE and Mixtral shapes.
    """
    shape, ranks = load.shape, stack_ranks(load)
    if shape.experts is None:
        return 0
    firsts = (stack for stack, _ in shape.stacks if stack.name != LAST)
    factors = max((ranks.get(one.name, 0) * one.num_experts * one.num_rows for one in firsts), default=0)
    return load.a * load.N * shape.experts.num_per_token * shape.width + 4 * factors


def experts_recomputed(load: Workload, kept: int, *, keeps_input: bool) -> int:
    """Bytes while experts multiply in a layer's recomputation, with `kept` by the whole layer; 0 for none.

    Beside `experts_forward` the gradient that comes in. transformers' pass is computed again when the
    weighted sum has copied that for each expert of a token.
    """
    if load.shape.experts is None or not load.settings.checkpoint_every:
        return 0
    boundary = load.a * load.N * load.shape.width
    begun = 0 if has_own_pass(load) else boundary * load.shape.experts.num_per_token
    weighted = begun + _weighted(load, keeps_input=keeps_input)
    return kept + boundary + max(weighted, experts_forward(load, keeps_input=keeps_input))


def experts_forward(load: Workload, *, keeps_input: bool) -> int:
    """Held by experts in a forward pass beside what their layer keeps, the residual stream included; 0 for no
    experts.

    At the clamps the tokens that enter are there in any case; elsewhere, and there as they were before they
    were copied, where they are kept (`keeps_input`: among what is). Where a stack is adapted, the products of
    weights and adapters are there before they are summed in place; outputs and the product that enters the
    last map come after gate and up.
    """
    experts = load.shape.experts
    if experts is None:
        return 0
    boundary, plain = load.a * load.N * load.shape.width, _plain_rows(load, keeps_input=keeps_input)
    copies = boundary * experts.num_per_token
    product = load.a * load.N * experts.num_per_token * experts.mlp_width
    ranks, clamped = stack_ranks(load), clamped_forward(load)
    moments = [_weighted(load, keeps_input=keeps_input)]
    if clamped:
        moments.append(boundary + clamped + copies * (1 - keeps_entering(load)))
    if ranks.get("down_proj", 0):
        moments.append(plain + copies)
    if ranks.get("gate_up_proj", 0):
        steps = num_steps(load) - 2
        moments.append(plain + (2 - steps) * product - copies)
    return max(moments)


def _weighted(load: Workload, *, keeps_input: bool) -> int:
    """The same where outputs are weighted, in float32 where the router's weights are: in transformers' pass
    the tokens that entered are there, in memtrain's own the sum."""
    experts = load.shape.experts
    assert experts is not None, "Only a mixture weights outputs."
    copies = load.a * load.N * load.shape.width * experts.num_per_token
    rows = _plain_rows(load, keeps_input=keeps_input) + copies
    if has_own_pass(load):
        # In float32 the residual stream, which the norm keeps itself, stands for the sum.
        return rows + copies // experts.num_per_token * load.is_half
    wide = experts.weights_in_float32 and load.is_half
    return rows + copies * (wide + 1 - keeps_entering(load))


def _plain_rows(load: Workload, *, keeps_input: bool) -> int:
    """The residual stream, which in transformers' pass a norm in float32 and a fused one keep themselves, and
    the tokens that enter before they are copied."""
    residual = has_own_pass(load) or (load.is_half and not load.is_fused)
    return load.a * load.N * load.shape.width * (residual + 1 - keeps_input)


def stacks_backward(load: Workload, kept: int, *, stays: bool = True, widens: int = 0) -> int:
    """Bytes of `experts_backward` with the gradients of trained stacks; 0: none is trained."""
    # Nemotron-H's configuration has numbers of experts whether or not a layer has any.
    if load.shape.experts is None or not load.shape.stacks or not load.trains_all:
        return 0
    return experts_backward(load, kept, *stack_gradients(load), stays=stays, widens=widens)


def stack_gradients(load: Workload) -> tuple[int, int]:
    """Bytes of the gradients of a layer's stacks of last and of first maps, as they come; 0 where frozen."""
    stacks = {stack.name: load.a * stack.num_weights for stack, _ in load.shape.stacks if load.trains_all}
    down = stacks.pop("down_proj", 0)
    return down, max(stacks.values(), default=0)


def widest_mlp(load: Workload) -> int:
    """Width of a token's intermediate in an MLP that the model has, all its experts together."""
    shape, experts = load.shape, load.shape.experts
    dense = shape.mlp_width if shape.num_expert_layers < shape.num_layers else 0
    return max(dense, experts.num_per_token * experts.mlp_width if experts else 0)
