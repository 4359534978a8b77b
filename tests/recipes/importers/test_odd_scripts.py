"""Scripts with values of a wrong kind: a recipe, or an error that says where, never a traceback."""

import random
from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.importers.importing import Imported, import_config, read_foreign

WRITTEN = """0;-1;1.5;1e400;10**9;True;None;'';'abc';'1,2';b'x';...;2j;[];{};{'a': N};{1: 2};[N]
(N, 2);N*4;f'{N}x';f'{3:>9}';-'a';not [];1/0;'a'*9;[1]+[2];'a'+'b';N.x[0];{**N};[*N];lambda: 1;[i for i in N]
N(1)(2);int('x');float('nan');str(N);dict(a=N);os.getenv('Q', N);A.b;A();d[0];d['k'];d[N];p.rows;p;x.y.z
{'a': {'b': [3]}};(lambda: N)();10**400;-1e-9;[[1, 2], [3]];['q_proj', 5];'x'*N;f'{d}';{'max_memory': {0: N}}
N if M else 2;N or 3"""
VALUES = tuple(WRITTEN.replace("\n", ";").split(";"))
"""Expressions: wrong in kind, computed, or of no meaning."""

NAMES = """per_device_train_batch_size gradient_accumulation_steps learning_rate max_steps num_train_epochs
warmup_steps warmup_ratio lr_scheduler_type lr_scheduler_kwargs optim seed max_length packing dtype bf16
fp16 report_to save_steps save_strategy save_total_limit eval_strategy eval_steps logging_steps
num_generations beta loss_type loss_weights reward_weights generation_batch_size steps_per_generation
max_prompt_length deepspeed max_completion_length model_init_kwargs fsdp fsdp_config accelerate_config
adam_beta1 temperature top_k epsilon gradient_checkpointing use_vllm vllm_mode dataset_kwargs **x
max_seq_length load_in_4bit dtype rope_scaling device_map quantization_config revision
r lora_alpha lora_dropout target_modules modules_to_save use_gradient_checkpointing
path name split data_files revision streaming"""
*CONFIG, LOADING, ADAPTER, ROWS = NAMES.split("\n")
"""Arguments of a trainer's configuration, of the model's loading, of its adapter, and of its rows."""

HEAD = """import argparse, os
from dataclasses import dataclass, field
@dataclass
class A(B if c else object):
    b: int = {0}
    rows: str = field(default={1})
p = argparse.ArgumentParser()
p.add_argument('--rows', type={2}, default={0})
p.add_argument(*x, **y)
p = p.parse_args()
d = {{'k': {1}}}
d['k'], *rest = {0}
{3}model, tokenizer = {4}.from_pretrained({5})
{3}model = {4}.get_peft_model(model, {6})
rows = load_dataset({7}).map({0}).train_test_split({1})['train']
{8}Trainer(model=model, args={8}Config({9}), train_dataset=rows, eval_dataset={0}, reward_funcs={1})
"""


def odd(chance: random.Random) -> str:
    """A script, of the numbers that are drawn."""

    def value() -> str:
        return chance.choice(VALUES)

    def arguments(names: list[str], most: int) -> str:
        given = chance.sample(names, min(most, len(names)))
        return ", ".join(f"**({value()})" if one == "**x" else f"{one}={value()}" for one in given)

    kind = chance.choice(["SFT", "DPO", "KTO", "GRPO", "RLOO", "GKD", "ORPO", "CPO", "Reward"])
    return HEAD.format(
        value(),
        value(),
        chance.choice(["int", "float", "str", "A", "bool"]),
        chance.choice(["", "if N:\n    ", "for i in N:\n    ", "with N as n:\n    "]),
        chance.choice(["FastLanguageModel", "AutoModelForCausalLM"]),
        arguments(LOADING.split(), 2) + chance.choice([", model_name='a/b'", ""]),
        arguments(ADAPTER.split(), 3),
        arguments(ROWS.split(), 2),
        kind,
        arguments(" ".join(CONFIG).split(), 5),
    )


def ended(file: Path) -> list[Imported] | RecipeError:
    """What a script becomes."""
    try:
        foreign = read_foreign(str(file))
        return [import_config(foreign, has_stand_ins=one) for one in (True, False)]
    except RecipeError as refused:
        return refused


@pytest.mark.parametrize("start", range(0, 60, 30))
def test_odd_scripts_end_in_a_recipe_or_an_error(start: int, tmp_path: Path):
    file = tmp_path / "odd.py"
    for seed in range(start, start + 30):
        file.write_text(odd(random.Random(seed)))
        assert ended(file)
