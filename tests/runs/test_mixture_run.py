"""A mixture with packed experts and adapters on them: trained by the command, interrupted, and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import curve, dies_at, run_in, steps
from tiny_mixtures import save_mixture

from memtrain.memory.plan.plan import PLAN_FILE, read_plan
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer
from memtrain.trainers.tools.merge import merge_run

RECIPE = """
method: sft
model:
  path: {base}
  quantize: 4bit
  adapter:
    {{r: 4, alpha: 8, target_modules: [q_proj, o_proj], target_parameters: [gate_up_proj, down_proj]}}
data: {{train: {{source: builtin:arithmetic, limit: 40}}, eval_fraction: 0.1, cache_dir: {cache}}}
length: {{max_length: 128}}
train: {{batch_size: 8, max_steps: 6}}
eval: {{every_steps: 3}}
save: {{every_steps: 2, keep: 20}}
log: {{every_steps: 1}}
optim: {{lr: 1e-2}}
cluster: {{device: cpu, threads: 1}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer: Any = load_tokenizer("builtin:tiny")
    save_mixture(
        folder / "base",
        vocab_size=len(tokenizer),
        moe_intermediate_size=32,
        num_experts=4,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(folder / "base")
    return RECIPE.format(base=folder / "base", cache=folder / "cache")


AWAY = ("memory.weights_offload=all", "memory.activation_checkpointing=on")


@pytest.mark.slow
def test_adapters_on_the_host_with_their_experts_move_no_bit(recipe: str, tmp_path: Path) -> None:
    run_in(tmp_path, "sft", recipe, AWAY[1:], "plain")
    with dies_at(4):
        run_in(tmp_path, "sft", recipe, AWAY, "away")
    run_in(tmp_path, "sft", recipe, AWAY, "away")
    ends = [(tmp_path / name / "final/adapter_model.safetensors").read_bytes() for name in ("plain", "away")]
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_an_interrupted_run_moves_no_bit_and_merges_to_the_sum(recipe: str, tmp_path: Path) -> None:
    whole = run_in(tmp_path, "sft", recipe, (), "whole")
    with dies_at(4):
        run_in(tmp_path, "sft", recipe, (), "again")
    again = run_in(tmp_path, "sft", recipe, (), "again")
    assert curve(again) == curve(whole)
    ends = [load_file(tmp_path / name / "final/adapter_model.safetensors") for name in ("whole", "again")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert any("experts.base_layer.lora_A" in name for name in ends[0]), "names of PEFT"
    last = steps(whole)[-1]
    assert last["expert_load_max"] >= 1
    assert 0 <= last["experts_idle"] < 1
    predicted = read_plan(tmp_path / "whole" / PLAN_FILE).prediction
    assert predicted is not None
    # q, o and the two stacks: of each layer two maps and one chain of wrappers.
    assert merge_run(tmp_path / "whole", dtype="float32").num_modules == 2 * 4


def test_a_stack_that_is_not_there_is_one_error_before_anything_loads(recipe: str, tmp_path: Path) -> None:
    from memtrain.errors import MemtrainError

    with pytest.raises(MemtrainError, match=r"no stack of experts dwn_proj"):
        run_in(tmp_path, "sft", recipe.replace("down_proj", "dwn_proj"), (), "wrong")
    assert not (tmp_path / "wrong").exists()
