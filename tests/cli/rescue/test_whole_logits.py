"""Runs of other tools whose trainers read whole logits, whatever fused loss their configuration asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtrain.cli.rescue.find import RescueQuestion, rescued

FACTORY = (
    "model_name_or_path: Qwen/Qwen2.5-7B\nfinetuning_type: lora\nlora_rank: 16\nlora_target: all\n"
    "dataset: mine\ntemplate: qwen\ncutoff_len: 4096\nper_device_train_batch_size: 1\n"
    "gradient_accumulation_steps: 8\nbf16: true\n"
)
AXOLOTL = (
    "base_model: Qwen/Qwen2.5-7B\nadapter: lora\nlora_r: 16\nlora_target_linear: true\nsequence_len: 4096\n"
    "micro_batch_size: 1\ngradient_accumulation_steps: 8\nbf16: true\ngradient_checkpointing: true\n"
    "plugins:\n  - axolotl.integrations.liger.LigerPlugin\nliger_fused_linear_cross_entropy: true\n"
)
VOCABULARY, TOKENS = 152_064, 4096


def logits(tmp_path: Path, text: str, phase: str = "steady step") -> int:
    """Bytes of logits at the peak of a phase of the run as it was."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    was = rescued(RescueQuestion(str(path), gpu="a100-80")).was
    assert was is not None
    phases = {one.phase: one for one in was.priced.prediction.phases}
    return {one.owner: one.num_bytes for one in phases[phase].owners}.get("logits", 0)


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_llama_factorys_liger_keeps_the_logits_of_preferences(tmp_path: Path, stage: str):
    """`require_logits` switches its fused loss off; of supervised fine-tuning it stays."""
    asked = logits(tmp_path, f"{FACTORY}stage: {stage}\nenable_liger_kernel: true\n")
    assert asked == logits(tmp_path, f"{FACTORY}stage: {stage}\n")
    assert asked >= 2 * TOKENS * VOCABULARY
    supervised = f"{FACTORY}stage: sft\n"
    assert 2 * logits(tmp_path, f"{supervised}enable_liger_kernel: true\n") < logits(tmp_path, supervised)


def test_llama_factorys_reward_model_computes_logits_that_nobody_reads(tmp_path: Path):
    """A pair of 4,096 tokens: two bytes of each logit, and four of its copy in float32."""
    assert logits(tmp_path, f"{FACTORY}stage: rm\n", "first step") == 2 * TOKENS * VOCABULARY * (2 + 4)


@pytest.mark.parametrize("rl", ["dpo", "ipo", "kto"])
def test_axolotls_fused_loss_is_none_of_preferences(tmp_path: Path, rl: str):
    asked = logits(tmp_path, f"{AXOLOTL}rl: {rl}\n")
    assert asked == logits(tmp_path, f"{AXOLOTL}rl: {rl}\n".replace("liger_fused_linear", "liger"))
    assert asked >= 2 * TOKENS * VOCABULARY
    assert 2 * logits(tmp_path, AXOLOTL) < logits(tmp_path, AXOLOTL.replace("liger_fused_linear", "liger"))
