"""Activations of a mixture of experts: what a layer's experts keep, and hold beside it.

Source and letters: as in activations.py.
"""

from __future__ import annotations

from memtrain.memory.estimate.workload import Workload, once


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
    of_down = load.trains_all or ranks.get("down_proj", 0) > 0
    steps = (6 if experts.is_clamped else 3) + of_down
    width = (1 + keeps_entering(load)) * load.shape.width + steps * experts.mlp_width
    rows = copies * load.a * (width + sum(ranks.values()))
    # Adapters in half precision are rounded for each pass, and kept.
    rounded = 0
    if load.is_half and load.settings.adapter is not None:
        rounded = load.a * sum(s.num_adapter(ranks.get(s.name, 0)) for s, _ in load.shape.stacks)
    # The load-balance loss keeps probabilities, the tokens' weights, and what both come to.
    evened = load.N * (4 * experts.num_experts + 8) if load.settings.router_aux_loss_coef else 0
    return rows + rounded + load.N * experts.num_experts * (4 + load.a) + copies * 40 + evened


def clamped_forward(load: Workload) -> int:
    """Held besides while clamped experts multiply: biases of gate and up, picked for each token, the clamped
    up, and the product where it is not kept. 0 for other experts.

    Source: transformers 5.23, integrations/moe.py, `grouped_mm_experts_forward`; seen in traces of gpt-oss.
    """
    experts = load.shape.experts
    if experts is None or not experts.is_clamped:
        return 0
    keeps = load.trains_all or stack_ranks(load).get("down_proj", 0) > 0
    return load.a * load.N * experts.num_per_token * experts.mlp_width * (4 - keeps)


def keeps_entering(load: Workload) -> bool:
    """Whether the tokens that enter the experts are kept: gate and up are trained or adapted."""
    return load.trains_all or stack_ranks(load).get("gate_up_proj", 0) > 0


def stack_ranks(load: Workload) -> dict[str, int]:
    """Ranks of the adapters of each stack of experts, by name."""
    adapter = load.settings.adapter
    if adapter is None:
        return {}
    return {stack.name: load.shape.rank_of(adapter, stack) for stack, _ in load.shape.stacks}


def experts_backward(load: Workload) -> int:
    """Gradients of the experts' outputs for all copies of a token, and temporary copies of these.

    Source: seen in traces of Qwen3-MoE shapes (torch 2.13): 2.5 of a*N*k*W, 2 where experts are packed or
    trained, 1 where they are adapted.
    """
    experts = load.shape.experts
    if experts is None:
        return 0
    is_adapted = any(stack_ranks(load).values())
    is_own = is_adapted or load.settings.quantize != "none"
    if experts.weights_in_float32 and load.is_half and not is_own:
        return 3 * 4 * load.N * experts.num_per_token * load.shape.width
    copies = 1.0 if is_adapted else 2.0 if load.trains_all or load.settings.quantize != "none" else 2.5
    return round(copies * load.a * load.N * experts.num_per_token * load.shape.width)
