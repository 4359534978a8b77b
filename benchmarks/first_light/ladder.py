"""The stages in the order in which they tell most: what may be broken first, then speed, then the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from first_light.grid import GRID, Point

LORA = "model.adapter={r: 16, alpha: 32}"


@dataclass(frozen=True, slots=True)
class Stage:
    """One line of the results."""

    name: str
    run: str
    """`module:function` under first_light.stages; it takes a Bench and `given`, and returns JSON values."""
    limit_s: float
    """Seconds after which it is given up, with its process."""
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def group(self) -> str:
        """What the page shows together."""
        return self.name.partition("/")[0]

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of its process beside those of all. cuBLAS reads once how to sum."""
        return ORDERED if self.group == "bit for bit" else {}

    @property
    def is_timed(self) -> bool:
        """Whether it answers with times: beside other processes on the card they say nothing."""
        return self.group in TIMED


TIMED = ("machine", "speed", "profile", "decoding", "TRL", "kernels")
"""Groups whose question is one of time; others tell times beside it."""

ORDERED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Matrix products sum in one order, as `train.deterministic` asks for it."""
BACKENDS = ("torch_varlen", "flash", "flash3", "flex", "torch_efficient", "masked")
GPU_TESTS: dict[str, tuple[str, ...]] = {
    "numbers": ("test_attention.py", "test_numbers.py", "test_experts.py"),
    "memory": ("test_memory.py", "test_bytes_that_move.py", "test_decoding.py", "test_vllm_handles.py"),
    "runs": ("test_runs.py", "test_small_cards.py", "test_kernels.py"),
    "captured": ("test_captures.py", "test_captured_steps.py"),
}
"""Files of tests/gpu by stages: each has its result before the next begins."""
ENGINES: dict[str, tuple[str, ...]] = {
    "activation_offloading": ("memory.activation_checkpointing=on", "memory.activation_offloading=on"),
    "full_offloading": ("memory.activation_checkpointing=off", "memory.activation_offloading=on"),
    "optimizer_offload": ("memory.optimizer_offload=on",),
    "optimizer_in_backward": ("optim.in_backward=on", "optim.max_grad_norm=null"),
    "streamed_layers": ("memory.streamed_layers=on",),
}
"""What moves bytes or changes when they are used, each against the same run without it."""
SPEEDS: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    ("0.6B full 16k", "0.6B", 16_384, ()),
    ("0.6B LoRA 16k", "0.6B", 16_384, (LORA,)),
    ("0.6B full 8k", "0.6B", 8_192, ()),
)
LARGE: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    ("8B LoRA 4k", "8B", 4_096, (LORA,)),
    ("8B LoRA 16k", "8B", 16_384, (LORA,)),
    ("8B full 16k", "8B", 16_384, ()),
)
SMALL_CARD: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("0.6B full", "0.6B", ()),
    ("4B LoRA", "4B", (LORA,)),
    ("4B full, states on the host", "4B", ("memory.optimizer_offload=on",)),
    ("8B LoRA, layers streamed", "8B", (LORA, "memory.streamed_layers=on")),
    ("8B QLoRA", "8B", (LORA, "model.quantize=4bit")),
)
OWNERS = (
    Point("sft", "0.6B", 2_048, "lora", "full_logits"),
    Point("kto", "0.6B", 2_048, "full", "padded"),
    Point("reward", "0.6B", 512, "lora", "boundary_offloading"),
)
"""Points of the grid whose memory is told by its owners."""
OWN_OPERATORS = ("model.liger=off", "model.kernels=transformers")
KERNELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("0.6B LoRA 16k, torch's operators", (LORA, "model.liger=off")),
    ("0.6B LoRA 16k, compiled", (LORA, *OWN_OPERATORS, "memory.measure_peaks=false", "model.compile=on")),
    ("0.6B full 16k, compiled", (*OWN_OPERATORS, "memory.measure_peaks=false", "model.compile=on")),
)
"""Forms of the layers that are not taken by themselves where Liger is installed: what they would give."""
LONGEST: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    ("0.6B full, 24 GiB", "0.6B", 24, ()),
    ("8B QLoRA, 16 GiB", "8B", 16, (LORA, "model.quantize=4bit")),
    ("8B QLoRA, 24 GiB", "8B", 24, (LORA, "model.quantize=4bit")),
)


def stages(points: Sequence[Point] = GRID) -> list[Stage]:
    """All of them, in order."""
    return [
        Stage("machine/versions", "machine:versions", 90),
        Stage("machine/allocator", "machine:allocator", 60),
        *(Stage(f"back ends/{name}", "probes:back_end", 150, {"name": name}) for name in BACKENDS),
        Stage("doctor", "probes:doctor", 180),
        *(
            Stage(f"tests marked gpu/{name}", "probes:gpu_tests", 160, {"files": list(files)})
            for name, files in GPU_TESTS.items()
        ),
        Stage("bit for bit/none", "engines:twice", 120),
        *(
            Stage(f"bit for bit/{name}", "engines:against_none", 120, {"overrides": list(words)})
            for name, words in ENGINES.items()
        ),
        *(_speed(*one) for one in SPEEDS),
        Stage("profile/0.6B full 16k", "profiling:kernels", 120, _given("0.6B", 16_384, ())),
        Stage("profile/0.6B LoRA 16k", "profiling:kernels", 120, _given("0.6B", 16_384, (LORA,))),
        *(
            Stage(f"owners/{name}", "owners:of_speed", 150, _given(size, tokens, words))
            for name, size, tokens, words in SPEEDS[:2]
        ),
        *(Stage(f"owners/{point.name}", "owners:of_point", 150, point.as_json()) for point in OWNERS),
        *(_speed(*one) for one in LARGE),
        Stage("decoding/0.6B 32 rows", "decoding:per_token", 180, {"size": "0.6B", "rows": 32}),
        Stage("decoding/0.6B 128 rows", "decoding:per_token", 180, {"size": "0.6B", "rows": 128}),
        *(_small_card(*one) for one in SMALL_CARD),
        Stage("TRL/0.6B full", "peers:against_trl", 300, {"size": "0.6B", "overrides": []}),
        Stage("TRL/0.6B LoRA", "peers:against_trl", 300, {"size": "0.6B", "overrides": [LORA]}),
        Stage("TRL/8B LoRA", "peers:against_trl", 400, {"size": "8B", "overrides": [LORA]}),
        *(
            Stage(f"shared prompts/k = {k}", "prompts:group_of", 200, {"num_generations": k})
            for k in (2, 4, 8)
        ),
        *(
            Stage(f"kernels/{name}", "speed:measure_speed", 240, _given("0.6B", 16_384, words))
            for name, words in KERNELS
        ),
        *(Stage(f"grid/{point.name}", "grid_points:measure_point", 150, point.as_json()) for point in points),
        *(_longest(*one) for one in LONGEST),
    ]


def chosen(words: Sequence[str] | None, *, is_shared: bool) -> list[Stage]:
    """Stages whose names contain one of the words, all without any; on a shared card what is not timed."""
    wanted = [one for one in stages() if not words or any(word in one.name for word in words)]
    for one in wanted:
        if is_shared and one.is_timed:
            print(f"{one.name}: left to a call that has the card alone, for it is timed", flush=True)
    return [one for one in wanted if not (is_shared and one.is_timed)]


def _given(size: str, tokens: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    return {"size": size, "tokens": tokens, "overrides": list(overrides)}


def _speed(name: str, size: str, tokens: int, overrides: tuple[str, ...]) -> Stage:
    return Stage(f"speed/{name}", "speed:measure_speed", 240, _given(size, tokens, overrides))


def _small_card(name: str, size: str, overrides: tuple[str, ...]) -> Stage:
    given = _given(size, 4_096, overrides) | {"gib": 24}
    return Stage(f"24 GiB/{name}", "small_card:under_a_fraction", 240, given)


def _longest(name: str, size: str, gib: int, overrides: tuple[str, ...]) -> Stage:
    given = {"size": size, "gib": gib, "overrides": list(overrides)}
    return Stage(f"longest row/{name}", "small_card:longest_row", 500, given)
