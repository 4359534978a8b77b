"""Predicted time of an online method's rollout, for each optimizer step: completions written and judged.

A token of a wave of completions is one pass of the policy: its weights are read from memory, and the keys and
values so far; the products are small beside that until hundreds of rows are written at once; the operators
are launched one by one, unless the pass is captured. A wave is taken to last for `generate.max_tokens`
tokens: the longest completion ends it. Good for comparing plans, not measured.
Source: Pope et al. 2022, arXiv:2211.05102, section 2.1 (latency of a pass from weights, keys and products).
"""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.estimate.static import weights_bytes
from memtrain.memory.estimate.step_time import FORWARD_OPERATORS, operator_s
from memtrain.memory.estimate.weights_offload import away
from memtrain.memory.estimate.workload import DTYPE_BYTES
from memtrain.memory.generation.vllm import longest_prompt
from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.generate import Generate

CAPTURED = ("vllm", "vllm_server")
"""Samplers whose passes are captured always."""


class RolloutTime(NamedTuple):
    """Seconds of an optimizer step's share of a rollout, of one process."""

    reading_s: float
    """Prompts, computed once for a group by the native sampler, else once for each completion."""
    writing_s: float
    judging_s: float
    """Passes of the reward models."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.reading_s + self.writing_s + self.judging_s


def rollout_time(settings: Settings, facts: PlannerInputs, generate: Generate) -> RolloutTime:
    """Time in which a step's completions are written by one process, and judged."""
    shape, rates = facts.shape, facts.hardware.rates_of(settings.threads, settings.num_processes)
    rows = max(1, -(-(settings.batch_size or generate.num_generations) // settings.num_processes))
    at_once = max(1, min(rows, settings.rollout_rows or rows))
    waves, prompt, tokens = -(-rows // at_once), longest_prompt(facts, generate), generate.max_tokens
    has_half = settings.dtype == "float16" or facts.hardware.has_bfloat16
    is_half = settings.dtype != "float32" and has_half
    rate = rates.half_matmul_per_s if is_half else rates.single_matmul_per_s
    operations = 2.0 * shape.num_parameters
    keys = 2 * shape.kv_width * shape.num_layers * DTYPE_BYTES[settings.dtype]
    read = _weights_read(settings, facts) + at_once * keys * (prompt + tokens / 2)
    is_captured = settings.cuda_graphs or settings.sampler in CAPTURED
    each = rates.kernel_s if is_captured else operator_s(facts.hardware, rates)
    launching = each * FORWARD_OPERATORS * shape.num_layers
    travelling = _travelling_bytes(settings, facts) / rates.host_bytes_per_s
    of_token = max(read / rates.bytes_per_s, at_once * operations / rate, launching, travelling)
    shared = generate.num_generations if settings.sampler == "native" else 1
    prompts = -(-rows // shared)
    judged = sum(2.0 * one.shape.num_parameters for one in facts.rewards) * rows * (prompt + tokens)
    return RolloutTime(
        reading_s=prompts * prompt * operations / rate,
        writing_s=waves * tokens * of_token,
        judging_s=judged / rate,
    )


def _weights_read(settings: Settings, facts: PlannerInputs) -> float:
    """Bytes of weights that a pass reads; rounded ones are written and read in the precision of the products
    too."""
    shape = facts.shape
    plain = settings.model_copy(update={"engine": "ddp"})
    expanded = (
        0 if settings.quantize == "none" else 2 * DTYPE_BYTES[settings.dtype] * shape.num_linear_weights
    )
    return weights_bytes(plain, shape) + expanded


def _travelling_bytes(settings: Settings, facts: PlannerInputs) -> float:
    """Bytes that cross the bus in a pass: weights that live on the host, or the shards of other processes."""
    if settings.sampler in CAPTURED:
        return 0.0
    if settings.weights_offload:
        return float(away(settings, facts.shape).total)
    if shards_weights(settings) and not settings.gather_weights:
        return weights_bytes(settings, facts.shape) * (1 - 1 / settings.num_processes)
    return 0.0
