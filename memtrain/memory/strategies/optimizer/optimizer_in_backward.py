"""Optimizer in backward: weights are stepped as soon as their gradients are computed, which are then freed.

When: nothing else fits, and a step is one micro-batch. Saves: gradients of all weights but a few. Costs: a
step that runs out of memory is broken and cannot be made again. Exact: each weight is stepped once, by the
gradient it would have had. Refused: with accumulation, several processes, or clipping by the norm of all
gradients, which need every gradient at once.

Source: Lv et al. 2023, arXiv:2306.09782 (LOMO), section 3.1; ours keeps AdamW's moments.
"""

from __future__ import annotations

from memtrain.memory.strategies.base import ON_A_CPU, Conflict, Strategy, StrategyContext, on_off


def refusal(case: StrategyContext) -> str | None:
    """Part of the recipe that needs all gradients at once."""
    recipe = case.recipe
    if recipe.optim.max_grad_norm is not None:
        return "gradients are scaled by the norm of all of them (optim.max_grad_norm)"
    processes = recipe.cluster.processes
    count = case.facts.hardware.num_devices if processes == "auto" else processes
    if count > 1:
        return f"gradients are summed over {count} processes first"
    if recipe.train.batch_tokens is not None:
        return "a step in tokens may be cut into several micro-batches"
    return None


STRATEGY = Strategy(
    name="optimizer_in_backward",
    axis="backward",
    summary="weights are stepped as soon as their gradients are computed",
    saves="gradients of all weights but a few",
    costs="a step that runs out of memory cannot be repeated",
    measured=ON_A_CPU,
    is_exact=True,
    evidence="freed gradients",
    is_used=lambda settings: settings.in_backward,
    wish=lambda recipe: on_off(recipe.optim.in_backward),
    use_keys=lambda recipe: {"optim.in_backward": "on"},
    never_keys=lambda recipe: {"optim.in_backward": "off"},
    without={"in_backward": False},
    refusal=refusal,
    conflicts=(
        Conflict(
            "float16",
            "gradients wait until all of them are known to be finite",
            when=lambda settings: settings.dtype == "float16",
        ),
        Conflict(
            "several processes",
            "gradients are summed over the processes before they are used",
            when=lambda settings: settings.num_processes > 1,
        ),
        Conflict(
            "several micro-batches",
            "gradients of several micro-batches are summed before they are used",
            when=lambda settings: (
                settings.micro_tokens is not None
                or settings.batch_size is None
                or settings.micro_batch_size * settings.num_processes < settings.batch_size
            ),
        ),
    ),
)
