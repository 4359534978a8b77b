"""What tests of engines that share a model out over ranks (FSDP2, ZeRO) have in common."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memtrain.memory.plan.plan import read_plan
from memtrain.trainers.loop import saver as saving

CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    # Defect C2 of TRL 1.16: the checkpointing that adapters on shards need was set where nobody reads it.
    "lora, checkpointed": ("sft", ("model.adapter={r: 4}", "memory.activation_checkpointing=on")),
    "packed and checkpointed": (
        "sft",
        ("length.packing=bfd", "memory.activation_checkpointing=on", "train.micro_batch_size=2"),
    ),
    "boundaries on the host": (
        "sft",
        ("memory.activation_checkpointing=on", "memory.activation_offloading=on"),
    ),
    "head of its own, logits in tiles": (
        "sft",
        ("model.config.tie_word_embeddings=false", "memory.loss=chunked", "memory.loss_chunk_size=64KiB"),
    ),
    "bfloat16 with master weights": ("sft", ("model.dtype=bfloat16", "optim.master_weights=true")),
    "dpo beside a copy": ("dpo", ("dpo.reference=copy",)),
    "dpo computed before": ("dpo", ("dpo.reference=precomputed",)),
    "kto": ("kto", ("kto.reference=copy",)),
    "reward": ("reward", ()),
}
"""Method and overrides of runs that every engine makes."""

WIDE = (
    "model.config={model_type: llama, hidden_size: 256, intermediate_size: 688, num_hidden_layers: 4, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 64, tie_word_embeddings: %s, vocab_size: 2048}"
)


def assert_same_curve(found: list[tuple], expected: list[tuple], rel: float = 2e-5) -> None:
    assert len(found) == len(expected)
    for (step, loss, norm, *rest), wanted in zip(found, expected, strict=True):
        assert (step, *rest) == (wanted[0], *wanted[3:])
        # The mean loss of RLOO is zero but for rounding.
        assert (loss, norm) == pytest.approx(wanted[1:3], rel=rel, abs=1e-7)


def final(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next((folder / "final").glob("*model.safetensors")))


def assert_same_model(one: Path, other: Path, *, exactly: bool) -> None:
    torch.testing.assert_close(
        final(one), final(other), rtol=0 if exactly else 1e-3, atol=0 if exactly else 2e-4
    )


def stop_after(
    runs, name: str, num_ranks: int, step: int, monkeypatch, *overrides: str, verb: str = "sft"
) -> Path:
    """A run that ends like a killed one right after the checkpoint of `step`."""
    plain = saving.Saver._emit

    def emit(saver, seconds):
        plain(saver, seconds)
        if saver._step == step:
            saver._ranks.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(saving.Saver, "_emit", emit)
        if num_ranks > 1:
            ranks = runs.fork_ranks(name, num_ranks, *overrides, verb=verb)
            # The other may see the connection break before it is killed.
            assert all(rank.wait() for rank in ranks)
        else:
            assert runs.fork(name, *overrides).wait() == -signal.SIGKILL
    return runs.folder / name


def write_method(runs, method: str) -> None:
    """Make the recipe another method's."""
    runs.recipe.write_text(runs.recipe.read_text().replace("method: sft", f"method: {method}"))


def write_online(runs, method: str) -> None:
    """Make it an online method's, with a reward of its own."""
    rewards = runs.folder / "rewards.py"
    rewards.write_text("def has_k(completion):\n    return float('k' in completion)\n")
    write_method(runs, method)
    text = runs.recipe.read_text().replace("batch_size: 8, max_steps: 6", "batch_size: 16, max_steps: 3")
    text += f"generate: {{num_generations: 4, max_tokens: 8}}\nrewards: {{functions: [{rewards}:has_k]}}\n"
    runs.recipe.write_text(text)


def peaks(folder: Path, metrics) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of each phase, predicted and measured."""
    predicted = {phase.phase: phase.num_bytes for phase in read_plan(folder / "plan.json").prediction.phases}
    measured: dict[str, int] = {}
    for event in metrics(folder, "memory"):
        measured[event["phase"]] = max(measured.get(event["phase"], 0), event["allocated"])
    return predicted, measured
