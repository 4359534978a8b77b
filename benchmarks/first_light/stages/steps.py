"""The first steps of a plan in this process, with what they take of the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from first_light.bench import Bench, Planned
from memtrain.memory.plan.units import signed
from memtrain.trainers.tools.bench import Benched

DATASHEET = {"h200": 989e12, "h100": 989e12, "a100": 312e12, "b200": 2250e12, "l4": 121e12, "4090": 165e12}
"""Dense bfloat16 operations a second, of the vendors' data sheets."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Matrix products of a token, as MFU counts them: without what checkpointing computes again."""

    layers: float
    """Weights of the layers' matrices; the embedding is no product."""
    head: float
    """Weights of the head, times the share of the tokens that are scored."""
    attention: float
    """Layers x query heads x head width, times the tokens that a token's row has: mean of the squares over
    the mean of the lengths."""
    trains_all: bool

    @property
    def a_token(self) -> float:
        """Forward and backward, attention causal.

        Source: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B; frozen weights have no gradient
        of their own: 4 operations a weight and token in place of 6.
        """
        return (6 if self.trains_all else 4) * (self.layers + self.head) + 3 * 2 * 2 * self.attention / 2


def operations_of(planned: Planned) -> Operations:
    """Of a plan's model, on its rows."""
    from memtrain.trainers.data.store.token_store import TokenStore

    config, adapter = planned.facts.config, planned.plan.settings.adapter
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    keys = config.get("num_key_value_heads") or heads
    layers = config["num_hidden_layers"]
    a_layer = 2 * width * heads * head_dim + 2 * width * keys * head_dim + 3 * width * inner
    split = planned.plan.data.train
    lengths = TokenStore.open(split.folder).lengths.astype(float)
    return Operations(
        layers * a_layer,
        width * config["vocab_size"] * split.num_loss_tokens / split.num_tokens,
        layers * heads * head_dim * float((lengths**2).sum() / lengths.sum()),
        adapter is None,
    )


def datasheet_rate(name: str) -> float | None:
    """Of a card by its name; None for one that is not in the table."""
    return next((rate for card, rate in DATASHEET.items() if card in name.lower()), None)


def bytes_text(count: float) -> str:
    """GiB, or MiB of a stand-in's little ones."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"


def travels(planned: Planned) -> bool:
    """Whether anything of a plan waits on the host, which is no other memory where a CPU stands in."""
    settings = planned.plan.settings
    return settings.offload != "none" or settings.weights_offload or settings.optimizer_offload


def measured_steps(bench: Bench, planned: Planned, steps: int) -> dict[str, Any]:
    """Peaks beside the prediction, speed beside the predicted one, and losses.

    The error of the planned peak is left out where it could not be one of a GPU; see `travels`.
    Raises: what ends a run, out of memory too.
    """
    from memtrain.cli.measure.variants import predicted_of
    from memtrain.memory.strategies.registry import used_in
    from memtrain.trainers.tools.bench import bench as bench_steps

    bench.device.freed()
    with bench.device.watched() as seen:
        made = bench_steps(planned.plan, steps)
    predicted = predicted_of(planned.variant, made.heaviest)
    error = predicted / made.peak_bytes - 1
    assert all(math.isfinite(loss) for loss in made.losses), f"A loss is not finite: {made.losses}"
    compared = {"planned_error": error} if bench.device.is_cuda or not travels(planned) else {}
    speed = {} if bench.device.is_shared else speed_of(planned, made, steps)
    said = [f"{speed['tokens_per_s']:,.0f} tokens/s"] if speed else []
    said.append(f"peak {bytes_text(made.peak_bytes)}")
    said.append(f"plan {signed(error)}" if compared else "not compared with the plan: a CPU is its own host")
    said += [f"MFU {speed['mfu']:.2f}"] if speed.get("mfu") is not None else []
    return {
        "words": ", ".join(said),
        "peak_bytes": made.peak_bytes,
        "reserved_bytes": made.reserved_bytes,
        **bench.device.of_driver(**seen, beside_bytes=bench.device.beside_bytes()),
        "planned_bytes": predicted,
        **compared,
        **speed,
        "tokens": made.tokens,
        "losses": list(made.losses),
        "strategies": [one.name for one in used_in(planned.plan.settings)],
        "settings": planned.plan.settings.model_dump(mode="json"),
        "heaviest": list(made.heaviest),
        "method": planned.plan.recipe.method,
        "trace_job": bench.trace_job(planned),
    }


def speed_of(planned: Planned, made: Benched, steps: int) -> dict[str, Any]:
    """Times of the steps beside the predicted one, and what they are of the card's data sheet."""
    speed = made.tokens / made.seconds
    # Of other methods the rows are not what the model is given: prompts, or pairs of answers.
    rate = operations_of(planned).a_token * speed if planned.plan.recipe.method == "sft" else None
    sheet = datasheet_rate(planned.facts.hardware.name)
    return {
        "planned_step_s": planned.variant.predicted_step_s,
        "step_s": made.seconds / steps,
        "tokens_per_s": speed,
        "operations_per_s": rate,
        "mfu": None if sheet is None or rate is None else rate / sheet,
    }
