"""Completions that share a long prompt: GRPO on prompts of 3,100 tokens, the prompt once and for each.

Held beside the table of trl's pull request 3837 (k = 2, 4, 8), whose model and card are not reported there.
"""

from __future__ import annotations

from typing import Any

from first_light.bench import Bench
from first_light.stages.steps import bytes_text, measured_steps

PROMPT_TOKENS, COMPLETION_TOKENS = 3_100, 256


def group_of(bench: Bench, num_generations: int) -> dict[str, Any]:
    """Peaks of a step whose micro-batch is one group, activations kept."""
    made: dict[str, Any] = {}
    for name, shares in (("once", "true"), ("for each", "false")):
        made[name] = _one(bench, num_generations, shares)
        bench.device.freed()
    peaks = {name: one.get("peak_bytes") for name, one in made.items()}
    said = {name: "out of memory" if peak is None else bytes_text(peak) for name, peak in peaks.items()}
    words = f"k = {num_generations}: the prompt once {said['once']}, for each {said['for each']}"
    return {"words": words, "num_generations": num_generations, **made}


def _one(bench: Bench, count: int, shares: str) -> dict[str, Any]:
    from memtrain.trainers.runtime.oom_errors import is_out_of_memory

    prompt = bench.tokens(PROMPT_TOKENS)
    completion = bench.tokens(COMPLETION_TOKENS)
    generate = {"num_generations": count, "max_tokens": completion}
    path, words = bench.recipe(
        "grpo",
        "0.6B",
        tokens=prompt + completion,
        row_tokens=int(1.3 * prompt),
        overrides=[
            f"length.shared_prompts={shares}",
            f"train.micro_batch_size={count}",
            "memory.activation_checkpointing=off",
            "memory.activation_offloading=off",
            "memory.streamed_layers=off",
        ],
        batch=2 * count,
        count=16,
        generate=generate,
    )
    try:
        made = measured_steps(bench, bench.plan(path, words, 3), 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"fault": "out of memory"}
    kept = ("peak_bytes", "reserved_bytes", "planned_bytes", "planned_error", "tokens_per_s", "words")
    return {name: made[name] for name in kept if name in made}
