"""Whether weights in shards are gathered once for a rollout, or layer by layer for every token of it."""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.estimate.sharded.communication import COLLECTIVE_S, num_groups
from memtrain.memory.estimate.sharded.sharding import gathered
from memtrain.memory.estimate.sharded.zero import gathered_module
from memtrain.memory.estimate.static import needed, weights_bytes
from memtrain.memory.estimate.step_time import FORWARD_OPERATORS, operator_s
from memtrain.memory.estimate.workload import DTYPE_BYTES, Workload
from memtrain.memory.plan.engine_kinds import shards_weights, uses_zero
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import gib
from memtrain.memory.rules.ledger import DecisionLog

PATH = "generate.gather_weights"


class GatherBytes(NamedTuple):
    """Bytes of gathered weights while completions are written."""

    whole: int
    streamed: int
    slowdown: float
    """Time of writing with streamed weights over that with gathered ones."""


def refuse_gathering(ledger: DecisionLog, settings: Settings) -> None:
    """Note a `generate.gather_weights` that nothing here obeys."""
    wanted = ledger.asked.recipe.generation.gather_weights
    if wanted == "auto":
        return
    if settings.sampler in ("vllm", "vllm_server"):
        ledger.refuse(
            f"generate.gather_weights {wanted} has no effect: vLLM generates with its own copy of the "
            "weights",
            PATH,
            "remove it, or set generate.backend: native",
        )
    elif not shards_weights(settings):
        ledger.refuse(
            f"generate.gather_weights {wanted} has no effect: every process holds all weights",
            PATH,
            "remove it, or set cluster.engine: fsdp2 or zero3",
        )


def gather_bytes(settings: Settings, facts: PlannerInputs, *, rows: int, tokens: int) -> GatherBytes:
    """Needs of each way, and the slowdown of streaming, for `rows` completions of `tokens`.

    Writing reads every weight once a token, computes 2 operations a weight and row, and launches a layer's
    operators. Streaming sends all other ranks' parts besides, at the speed of the link to the host (what is
    between devices is not known), in as many collectives as there are groups of weights.
    """
    shape, count = facts.shape, settings.num_processes
    rates = facts.hardware.rates_of(settings.threads, count)
    whole = weights_bytes(settings, shape)
    load = Workload(settings, shape, HeaviestBatch(1, 1, 1, 1))
    streamed = gathered_module(load) if uses_zero(settings) else gathered(settings, shape)
    half = DTYPE_BYTES[settings.dtype] == 2
    rate = rates.half_matmul_per_s if half else rates.single_matmul_per_s
    launch = shape.num_layers * FORWARD_OPERATORS * operator_s(facts.hardware, rates)
    compute = launch + whole / rates.bytes_per_s + 2.0 * shape.num_parameters * rows / rate
    starts = num_groups(settings, shape) * COLLECTIVE_S[settings.device]
    communication_time = whole * (count - 1) / count / rates.host_bytes_per_s + starts
    slowdown = tokens * (compute + communication_time) / (tokens * compute + communication_time)
    return GatherBytes(whole, streamed, slowdown)


def decide_gathering(
    ledger: DecisionLog, settings: Settings, found: GatherBytes, peak: int, budget: int | None
) -> bool:
    """Whether weights are gathered once for a rollout. `peak`: bytes of its phase without them."""
    wanted = ledger.asked.recipe.generation.gather_weights
    fits = budget is None or needed(peak + found.whole, settings) <= budget
    gathers = wanted == "on" or (wanted == "auto" and fits)
    words = (
        f"peak {gib(peak + found.whole)} while completions are generated; layer by layer "
        f"{gib(peak + found.streamed)} and {found.slowdown:.1f} times as long"
    )
    if wanted == "auto" and not fits:
        words += "; gathered it would not fit"
    ledger.decide("gather_weights", "on" if gathers else "off", words, PATH)
    return gathers
