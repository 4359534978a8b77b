"""Records that others have published, beside which a result stands; each as its authors tell it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """One figure of somebody else's."""

    stage: str
    """Name of the stage that it is shown beside."""
    who: str
    what: str
    tokens_per_s: float | None = None
    tokens: int | None = None
    """Longest row."""
    gib: float | None = None


RECORDS = (
    Published("speed/0.6B full 8k", "prime-rl, 1x H100", "Qwen3-0.6B full, 8k", 26_000, gib=31.7),
    Published("speed/0.6B full 16k", "prime-rl, 1x H100", "Qwen3-0.6B full, 16k", gib=52.8),
    Published("speed/0.6B full 16k", "LLMQ, 1x H100", "0.5B full", 149_000),
    Published("speed/8B LoRA 4k", "NeMo Automodel, 1x H100", "Llama-3-8B LoRA, 4k (402 TFLOP/s)", 12_473),
    Published("speed/8B LoRA 4k", "NeMo Automodel, 1x H100", "Qwen2.5-7B LoRA, 4k", 14_110),
    Published("speed/8B full 16k", "LLMQ, 1x H100", "7B full", 14_000),
    Published("24 GiB/8B QLoRA", "Unsloth", "longest row, Llama-3.1-8B QLoRA, 24 GB", tokens=78_475),
    Published("longest row/8B QLoRA, 16 GiB", "Unsloth", "Llama-3.1-8B QLoRA, 16 GB", tokens=40_724),
    Published("longest row/8B QLoRA, 24 GiB", "Unsloth", "Llama-3.1-8B QLoRA, 24 GB", tokens=78_475),
    Published("shared prompts/k = 2", "trl pull request 3837", "14.4 -> 6.4 GB", gib=6.4),
    Published("shared prompts/k = 4", "trl pull request 3837", "27.0 -> 11.0 GB", gib=11.0),
    Published("shared prompts/k = 8", "trl pull request 3837", "out of memory -> 20.3 GB", gib=20.3),
)


def beside(stage: str) -> list[Published]:
    """The records of a stage."""
    return [one for one in RECORDS if one.stage == stage]
