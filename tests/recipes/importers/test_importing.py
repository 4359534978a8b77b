"""Configurations of Axolotl, LLaMA-Factory, Unsloth and verl become recipes that `check` passes."""

import json
import re
from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.importers.importing import TOOLS, Foreign, Imported, import_config, read_foreign
from memtrain.recipes.importers.notebook import without_magics
from memtrain.recipes.reading.load import load_text
from memtrain.recipes.recipe import Recipe

AXOLOTL = """
base_model: mistralai/Mistral-7B-v0.1
load_in_8bit: true
datasets:
  - path: some/rows
    type: chat_template
val_set_size: 0.05
adapter: lora
sequence_len: 4096
sample_packing: true
group_by_length: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: adamw_bnb_8bit
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
flash_attention: true
evals_per_epoch: 4
"""
LLAMAFACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: dpo
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_offload_config.json
dataset: one, two
template: llama3
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
bf16: true
eval_strategy: steps
eval_steps: 500
pref_beta: 0.3
pref_loss: orpo
"""
UNSLOTH = """
from unsloth import FastLanguageModel, is_bfloat16_supported
length = 1024 * 2
open("harm", "w").write("executed")
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Meta-Llama-3.1-8B-bnb-4bit", max_seq_length=length, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=8, target_modules=["q_proj", "v_proj"], lora_alpha=16,
    use_gradient_checkpointing="unsloth")
dataset = load_dataset("some/rows", split="train")
trainer = SFTTrainer(model=model, max_seq_length=length, train_dataset=dataset,
    args=TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=60,
        learning_rate=2e-4, fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported(),
        optim="adamw_8bit", run_name=make_name()))
"""
VERL = """
set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=gsm8k/train.parquet data.train_batch_size=1024 \\
    data.max_prompt_length=512 data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.name=vllm \\
    +actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    trainer.n_gpus_per_node=4 trainer.nnodes=1
"""


def imported(source: str, **asked: object) -> tuple[Recipe, Imported]:
    made = import_config(read_foreign(source, **asked))  # pyright: ignore[reportArgumentType]
    assert made.faults == []
    return load_text(made.text, "recipe.yaml").recipe, made


def of_file(folder: Path, name: str, text: str, **asked: object) -> tuple[Recipe, Imported]:
    file = folder / name
    file.write_text(text)
    return imported(str(file), **asked)


def test_axolotl_says_the_same(tmp_path: Path):
    recipe, made = of_file(tmp_path, "run.yml", AXOLOTL)
    assert (made.tool.name, recipe.method, recipe.model.quantize) == ("axolotl", "sft", "8bit")
    assert recipe.model.adapter is not None
    assert (recipe.model.adapter.r, recipe.model.adapter.target_modules) == (32, ("all-linear",))
    assert (recipe.length.max_length, recipe.length.packing, recipe.train.batch_size) == (4096, "bfd", 8)
    assert (recipe.train.epochs, recipe.optim.kind, recipe.data.eval_fraction) == (1, "adamw_8bit", 0.05)
    assert recipe.eval.per_epoch == 4
    assert any("group_by_length" in line for line in made.notes)


AXOLOTL_ROWS = "base_model: a/b\ndatasets: [{path: some/rows}]\nsequence_len: 65536\n"
LLAMAFACTORY_ROWS = (
    "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ndataset: rows\ntemplate: llama3\n"
)
UNSLOTH_ROWS = (
    "from unsloth import FastLanguageModel\nfrom trl import SFTConfig, SFTTrainer\n"
    "model, tokenizer = FastLanguageModel.from_pretrained('a/b', max_seq_length=65536, load_in_4bit=False, "
    "rope_scaling={'type': 'linear', 'factor': 2.0})\n"
    "from datasets import load_dataset\nrows = load_dataset('some/rows')\n"
    "trainer = SFTTrainer(model=model, train_dataset=rows, args=SFTConfig(max_steps=2))\n"
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yml", f"{AXOLOTL_ROWS}rope_scaling: {{type: linear, factor: 2.0}}\n"),
        (
            "run.yml",
            f"{AXOLOTL_ROWS}overrides_of_model_config: {{rope_scaling: {{rope_type: linear, factor: 2}}}}\n",
        ),
        ("run.py", UNSLOTH_ROWS),
    ],
)
def test_scaled_positions_are_the_models_rope_scaling(name: str, text: str, tmp_path: Path):
    _, made = of_file(tmp_path, name, text)
    assert "rope_scaling: {rope_type: linear, factor: 2" in made.text
    assert not any("rope_scaling" in note for note in made.notes)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.yaml", f"{LLAMAFACTORY_ROWS}rope_scaling: yarn\n", "{rope_type: yarn, factor: F}"),
        ("run.yml", f"{AXOLOTL_ROWS}rope_scaling: {{type: longrope, factor: 2}}\n", "write others into"),
        ("run.yml", f"{AXOLOTL_ROWS}rope_scaling: {{type: yarn, factor: 2, mscale: 1}}\n", "has no mscale"),
        ("run.yml", f"{AXOLOTL_ROWS}overrides_of_model_config: {{hidden_act: relu}}\n", "its config.json"),
    ],
)
def test_scaled_positions_that_are_not_whole_are_reported(name: str, text: str, words: str, tmp_path: Path):
    _, made = of_file(tmp_path, name, text)
    assert words in re.sub(r"\n#\s+", " ", made.text)


@pytest.mark.parametrize(("packs", "is_lost"), [("true", False), ("false", True)])
def test_axolotls_experts_are_packed_and_adapted(packs: str, is_lost: bool, tmp_path: Path):
    text = (
        "base_model: Qwen/Qwen3-30B-A3B\ndatasets: [{path: some/rows}]\nadapter: qlora\nlora_dropout: 0\n"
        f"lora_target_parameters: [mlp.experts.down_proj]\nquantize_moe_experts: {packs}\n"
    )
    recipe, made = of_file(tmp_path, "run.yml", text)
    assert recipe.model.adapter is not None
    assert (recipe.model.quantize, recipe.model.adapter.target_modules) == ("4bit", ())
    assert recipe.model.adapter.target_parameters == ("mlp.experts.down_proj",)
    assert ("quantize_moe_experts" in made.text) is is_lost


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "run.yml",
            "base_model: a/b\ndatasets: [{path: some/rows}]\nadapter: lora\ntokens: [<a>]\n"
            "special_tokens: {pad_token: <pad>, additional_special_tokens: [<b>]}\n",
        ),
        (
            "run.yaml",
            "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ndataset: rows\ntemplate: llama3\n"
            'resize_vocab: true\nadd_tokens: "<a>"\nadd_special_tokens: "<b>, <a>"\n',
        ),
    ],
)
def test_added_tokens_are_added_and_trained(name: str, text: str, tmp_path: Path):
    recipe, made = of_file(tmp_path, name, text)
    assert set(recipe.model.add_tokens) == {"<a>", "<b>"}
    assert recipe.model.adapter is not None
    assert recipe.model.adapter.modules_to_save == ("embed_tokens", "lm_head")
    assert not any(line.startswith(("add_", "resize", "tokens", "special")) for line in made.notes)


def test_another_end_token_of_axolotl_is_reported(tmp_path: Path):
    text = "base_model: a/b\ndatasets: [{path: some/rows}]\nspecial_tokens: {eos_token: <end>}\n"
    assert "not carried over: special_tokens" in of_file(tmp_path, "run.yml", text)[1].text


def test_llamafactory_says_the_same(tmp_path: Path):
    recipe, made = of_file(tmp_path, "run.yaml", LLAMAFACTORY, processes=8)
    assert (made.tool.name, recipe.method, recipe.train.batch_size) == ("llamafactory", "dpo", 16)
    assert (recipe.cluster.engine, recipe.cluster.cpu_offload) == ("zero3", "parameters")
    assert recipe.dpo is not None
    assert recipe.dpo.parts == {"sft": 1.0, "orpo": 0.3}
    assert recipe.eval.every_steps is None, "no rows are held out"
    reported = " ".join(made.notes)
    assert recipe.model.chat_template == "llama3"
    assert all(word in reported for word in ("eval", "dataset_info.json"))


def test_a_script_is_read_and_never_run(tmp_path: Path):
    recipe, made = of_file(tmp_path, "train.py", UNSLOTH)
    assert not (tmp_path / "harm").exists()
    assert not Path("harm").exists()
    assert (recipe.model.path, recipe.model.quantize) == ("unsloth/Meta-Llama-3.1-8B", "4bit")
    assert (recipe.length.max_length, recipe.train.batch_size, recipe.train.max_steps) == (2048, 8, 60)
    assert recipe.model.adapter is not None
    assert (recipe.model.adapter.r, recipe.model.dtype) == (8, "bfloat16")
    assert made.pins["memory.activation_offloading"] == "on"
    assert made.notes[0].startswith("run_name: make_name() is not carried over")


STUDENT = 'model = AutoModelForCausalLM.from_pretrained("a/student")\n'
TEACHER = 'big = AutoModelForCausalLM.from_pretrained("a/teacher", dtype=torch.bfloat16, device_map="auto")\n'
GKD = """
rows = load_dataset("some/rows")
trainer = GKDTrainer(model=model, teacher_model={}, args=GKDConfig(lmbda=1.0, beta=1.0), train_dataset=rows)
"""


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (TEACHER + STUDENT + GKD.format("big"), "bfloat16"),
        (STUDENT + TEACHER + GKD.format("big"), "bfloat16"),
        (STUDENT + GKD.format('"a/teacher"'), "auto"),
    ],
)
def test_a_teacher_is_not_taken_for_the_student(text: str, dtype: str, tmp_path: Path):
    recipe, made = of_file(tmp_path, "train.py", text)
    assert recipe.distill is not None
    assert (recipe.method, recipe.model.path, recipe.distill.teacher) == ("distill", "a/student", "a/teacher")
    assert (recipe.distill.teacher_dtype, recipe.distill.beta) == (dtype, 1.0)
    assert recipe.distill.on_policy_fraction == 1.0
    assert "not carried over" not in made.text


def test_a_command_of_verl_says_the_same():
    recipe, made = imported(VERL)
    assert (made.tool.name, recipe.method, recipe.cluster.engine) == ("verl", "grpo", "fsdp2")
    assert recipe.grpo is not None
    assert recipe.generate is not None
    assert (recipe.train.batch_size, recipe.grpo.steps_per_rollout) == (256 * 5, 4)
    assert (recipe.generate.num_generations, recipe.generate.max_tokens) == (5, 1024)
    assert recipe.generate.vllm is not None
    assert recipe.generate.vllm.memory_share == 0.6
    assert made.pins["train.micro_batch_size"] == 8
    assert made.pins["cluster.processes"] == 4


@pytest.mark.parametrize("asked", ["True", "False"])
def test_verls_determinism_is_listed_where_it_is_asked_for(asked: str):
    """It passed for a setting of the engine, which the plan makes."""
    key = "actor_rollout_ref.actor.fsdp_config.full_determinism"
    _, made = imported(VERL.strip() + f" {key}={asked}\n")
    assert any(key in line for line in made.notes) is (asked == "True")


def test_a_command_says_its_devices_and_its_method():
    words = "accelerate launch --num_processes 4 scripts/dpo.py --model_name_or_path a/b --dataset_name c/d"
    recipe, made = imported(f"CUDA_VISIBLE_DEVICES=0,1 {words} --per_device_train_batch_size 2 --bf16")
    assert (made.tool.name, recipe.method, recipe.train.batch_size) == ("trl", "dpo", 8)


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("base_model: a/b\nsequence_len: 512\n", "axolotl"),
        ("model_name_or_path: a/b\nstage: sft\ncutoff_len: 1\n", "llamafactory"),
        ("model_name_or_path: a/b\ndataset_name: c/d\n", "trl"),
        ("actor_rollout_ref: {model: {path: a/b}}\nalgorithm: {adv_estimator: rloo}\n", "verl"),
        ("model: {partial_pretrain: a/b}\ndata: {train_files: x.parquet}\n", "verl"),
    ],
)
def test_the_tool_is_guessed(text: str, tool: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert read_foreign(str(file)).tool.name == tool


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "x: 1\n", "--tool"),
        ("a.yaml", "method: sft\nmodel: {path: x}\n", "already"),
        ("a.yaml", "base_model: a/b\nrl: ebft\n", "no counterpart"),
        ("a.yaml", "model_name_or_path: a\nstage: prm\n", "stage"),
        ("a.yaml", "algorithm: {adv_estimator: gpg}\nactor_rollout_ref: {model: {path: a}}\n", "gpg"),
        ("a.py", "print(1)\n", "no trainer"),
        ("a.py", "def (:\n", "not valid Python"),
        ("a.sh", "train.py --a 'open\n", "quotes"),
    ],
)
def test_what_cannot_be_read_is_reported(name: str, text: str, words: str, tmp_path: Path):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(RecipeError, match=words):
        import_config(read_foreign(str(file)))


def test_a_file_that_is_not_there_is_reported():
    with pytest.raises(RecipeError, match="no file"):
        read_foreign("nowhere.yaml")


WHOLE = {
    "sft": "model_name_or_path: a/b\ndataset_name: c/d\n",
    "grpo": "model_name_or_path: a/b\ndataset_name: c/d\nreward_funcs: [my.rewards.good]\n",
}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("sft", "packing: true\ngroup_by_length: true\n"),
        (
            "sft",
            "eval_strategy: steps\nload_best_model_at_end: true\ndatasets: [{path: x}]\n",
        ),
        ("grpo", "use_vllm: true\ntop_p: 0.9\n"),
        ("grpo", "use_vllm: true\ntop_k: 20\nvllm_importance_sampling_mode: token_mask\n"),
        ("grpo", "loss_type: cispo\nepsilon: 0.2\nepsilon_high: 5.0\n"),
        ("grpo", "loss_type: sapo\nepsilon_high: 0.3\n"),
        ("grpo", "sync_ref_model: true\n"),
        ("grpo", "train_sampling_strategy: group_by_length\n"),
    ],
)
def test_every_imported_recipe_passes_check(method: str, more: str, tmp_path: Path):
    of_file(tmp_path, "run.yaml", WHOLE[method] + more, tool="trl", method=method)


def test_the_highest_weight_of_cispo_is_no_clip(tmp_path: Path):
    text = WHOLE["grpo"] + "loss_type: cispo\nepsilon_high: 3.0\n"
    recipe, _ = of_file(tmp_path, "run.yaml", text, tool="trl", method="grpo")
    assert recipe.grpo is not None
    assert (recipe.grpo.cispo_max_weight, recipe.grpo.clip_high) == (3.0, None)


@pytest.mark.parametrize(("more", "highest"), [("", 0.2), ("epsilon: 0.3\n", 0.3)])
def test_cispo_without_a_highest_weight_keeps_what_trl_takes_for_it(more, highest, tmp_path: Path):
    text = WHOLE["grpo"] + "loss_type: cispo\n" + more
    recipe, _ = of_file(tmp_path, "run.yaml", text, tool="trl", method="grpo")
    assert recipe.grpo is not None
    assert recipe.grpo.cispo_max_weight == highest


def test_the_schema_that_a_recipe_names_is_there(tmp_path: Path):
    _, made = of_file(tmp_path, "run.yaml", WHOLE["sft"], tool="trl", method="sft")
    line = next(line for line in made.text.splitlines() if "$schema=" in line)
    assert Path(line.partition("$schema=")[2]).is_file()


def test_faults_name_the_file_that_is_written(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: a/b\nlearning_rate: -1.0\n")
    made = import_config(read_foreign(str(file), "trl", "sft"), "my.yaml")
    assert any(fault.where.startswith("my.yaml") for fault in made.faults)


def test_how_the_tool_computes_is_reported_as_keys(tmp_path: Path):
    _, made = of_file(tmp_path, "run.yaml", LLAMAFACTORY.replace("orpo", "sigmoid"), processes=8)
    assert made.pins["dpo.reference"] == "copy"
    assert made.pins["memory.activation_checkpointing"] == "on"
    assert made.pins["memory.loss"] == "full"
    assert made.pins["length.shared_prompts"] is False
    assert (made.pins["cluster.engine"], made.pins["cluster.processes"]) == ("zero3", 8)


@pytest.mark.parametrize(("engine", "dtype"), [("", "float16"), ("accelerate_config: zero3\n", "auto")])
def test_fp16_stays_float16_where_its_loss_is_scaled(tmp_path: Path, engine: str, dtype: str):
    """It became bfloat16, which a V100 refuses; shards, which do not scale, take the device's precision."""
    text = (
        "model_name_or_path: Qwen/Qwen3-0.6B\nfp16: true\nmax_length: 512\ndataset_name: some/rows\n" + engine
    )
    recipe, made = of_file(tmp_path, "sft.yaml", text, method="sft", processes=2)
    assert recipe.model.dtype == dtype
    assert any("is not scaled" in line for line in made.notes) == (dtype == "auto")


def test_a_script_of_trl_may_give_its_trainer_the_name_of_a_model(tmp_path: Path):
    """As TRL's own first example does; without Unsloth's calls it is called TRL's."""
    text = (
        "args = GRPOConfig(num_generations=8, per_device_train_batch_size=8)\n"
        "trainer = GRPOTrainer(model='Qwen/Qwen3-0.6B', reward_funcs=reward, args=args)\n"
    )
    (tmp_path / "train.py").write_text(text)
    made = import_config(read_foreign(str(tmp_path / "train.py")), has_stand_ins=True)
    assert made.whole().model.path == "Qwen/Qwen3-0.6B"
    assert (made.tool.title, made.method) == ("TRL", "grpo")


CELLS = [
    "%%capture\n!pip install unsloth \\\n  trl",
    "%%writefile notes.txt\nthis is no Python",
    "%env HF_HUB=1\nmodel = 'Qwen/Qwen3-0.6B'",
    "if True:\n    !nvidia-smi\nrows = load_dataset('a/b')\nfrom trl import SFTConfig, SFTTrainer\n"
    "trainer = SFTTrainer(model=model, args=SFTConfig(max_length=512, learning_rate=1e-4))",
]


def test_a_notebook_is_read_without_its_magics(tmp_path: Path):
    """As it is, and as the script that Colab saves of it."""
    cells = [{"cell_type": "code", "source": [cell]} for cell in CELLS]
    notebook = json.dumps({"cells": [{"cell_type": "markdown", "source": ["# !"]}, *cells]})
    for name, text in (("run.ipynb", notebook), ("run.py", "\n".join((CELLS[0], *CELLS[2:])))):
        recipe, made = of_file(tmp_path, name, text)
        assert (made.method, recipe.model.path, recipe.length.max_length) == ("sft", "Qwen/Qwen3-0.6B", 512)


def test_a_line_of_python_that_begins_with_a_percent_is_no_magic():
    text = "x = ('%d'\n  % 3)\n"
    assert without_magics(text) == text


@pytest.mark.parametrize(
    ("text", "engine", "offload"),
    [
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}",
            "zero3",
            True,
        ),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}", "zero2", False),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}", "fsdp2", True),
        ("distributed_type: MULTI_GPU", "auto", False),
    ],
)
def test_accelerates_file_says_engine_and_devices(
    text: str, engine: str, offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(f"{text}\nnum_processes: 4\n")
    recipe, _ = imported(
        "accelerate launch --config_file cluster.yaml sft.py --model_name_or_path a/b --dataset_name c/d",
    )
    assert recipe.cluster.engine == engine
    assert (recipe.cluster.cpu_offload not in ("none", "auto")) is offload
    assert recipe.train.batch_size == 32


def test_a_key_without_a_value_is_not_listed(tmp_path: Path):
    _, made = of_file(
        tmp_path, "run.yml", "base_model: a/b\nsequence_len: 512\ndatasets: [{path: c/d}]\ndebug:\n"
    )
    assert not [line for line in made.notes if line.startswith("debug")]


def test_the_head_is_left_out_of_what_is_trained_on_quantized_weights_and_listed():
    """unsloth#1884: the recipe named lm_head in 4 bits, and no run of it could be built."""
    keys = {"load_in_4bit": True, "use_peft": True, "lora_target_modules": ["q_proj", "lm_head"]}
    keys |= {"model_name_or_path": "Qwen/Qwen3-8B", "lora_modules_to_save": ["embed_tokens", "lm_head"]}
    made = import_config(Foreign(TOOLS["trl"], keys, "sft", 1, "x"), has_stand_ins=True)
    adapter = made.whole().model.adapter
    assert adapter is not None
    assert (adapter.target_modules, adapter.modules_to_save) == (("q_proj",), ("embed_tokens",))
    assert sum("lm_head is left out" in line for line in made.notes) == 2


@pytest.mark.parametrize(
    ("written", "is_masked"),
    [
        ("", True),
        ("    roles_to_train: [assistant]\n", True),
        ("    roles_to_train: [gpt]\n", True),
        ("    roles_to_train: [user, assistant]\n", None),
        ("train_on_inputs: true\n", False),
    ],
)
def test_conversations_of_axolotl_are_trained_on_assistants_turns(tmp_path, written, is_masked):
    """Its default; every turn was trained on, and nothing said so."""
    path = tmp_path / "a.yaml"
    given = f"base_model: some/model\ndatasets:\n  - path: some/rows\n    type: chat_template\n{written}"
    path.write_text(given)
    made = import_config(read_foreign(str(path)))
    assert f"assistant_only_loss: {str(is_masked is True).lower()}" in made.text
    assert any("roles_to_train" in note for note in made.notes) == (is_masked is None)


SCRIPT = """
from trl import SFTConfig, SFTTrainer
from datasets import load_dataset
rows = load_dataset("some/rows", split="train")
trainer = SFTTrainer(model="some/model", train_dataset=rows, args=SFTConfig())
"""


@pytest.mark.parametrize(
    ("name", "text", "turns"),
    [
        ("trl.yaml", "model_name_or_path: some/model\ndataset_name: some/rows\nmax_length: 512\n", "false"),
        ("trl2.yaml", "model_name_or_path: m/n\ndataset_name: r/s\nassistant_only_loss: true\n", "true"),
        ("trl.py", SCRIPT, "false"),
        (
            "unsloth.py",
            SCRIPT.replace("from trl", "from unsloth import FastLanguageModel\nfrom trl")
            + "trainer = train_on_responses_only(trainer, instruction_part='a', response_part='b')\n",
            "true",
        ),
        ("lf.yaml", "model_name_or_path: some/model\nstage: sft\ndataset: rows\ntemplate: qwen3\n", "true"),
        (
            "lf2.yaml",
            "model_name_or_path: some/model\nstage: sft\ndataset: rows\ntemplate: q\ntrain_on_prompt: true\n",
            "false",
        ),
        (
            "ax.yaml",
            "base_model: some/model\ndatasets:\n  - {path: some/rows, type: alpaca}\nmicro_batch_size: 1\n",
            None,
        ),
    ],
)
def test_the_trained_turns_of_each_tool_are_written_out(tmp_path, name, text, turns):
    """memtrain's default is the assistant's turns; TRL's is every turn."""
    (tmp_path / name).write_text(text)
    made = import_config(read_foreign(str(tmp_path / name), method="sft" if name.startswith("trl") else None))
    asked = made.whole().data.assistant_only_loss
    assert asked is {"true": True, "false": False, None: None}[turns]
    assert (f"assistant_only_loss: {turns}" in made.text) == (turns is not None)


def test_verls_fine_tuning_writes_string_prompts_by_the_chat_template():
    words = (
        "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet data.prompt_key=question "
        "data.response_key=answer model.partial_pretrain=some/model"
    )
    data = import_config(read_foreign(words)).whole().data
    assert (data.columns.prompt, data.columns.completion) == ("question", "answer")
    assert (data.strings_are, data.assistant_only_loss) == ("turns", True)


LIVE = "${oc.env:MEMTRAIN_TEST_TOKEN}"
FOREIGN = {
    "axolotl.yaml": "base_model: me/x-LIVE\ndatasets:\n  - path: me/LIVE\n    type: chat_template\n"
    "default_system_message: say LIVE\nwandb_project: p-LIVE\noutput_dir: LIVE\nadapter: lora\nlora_r: 8\n"
    "lora_alpha: 8\nlora_target_modules:\n  - LIVE\nnot_known: LIVE\nsequence_len: 512\n",
    "llamafactory.yaml": "model_name_or_path: me/x-LIVE\nstage: sft\nfinetuning_type: full\ndataset: LIVE\n"
    "template: llama3\ncutoff_len: 512\noutput_dir: LIVE\nrun_name: LIVE\ndefault_system: LIVE\n",
    "trl.yaml": "model_name_or_path: me/x-LIVE\ndataset_name: me/LIVE\noutput_dir: LIVE\nrun_name: LIVE\n"
    "learning_rate: 1.0e-5\nchat_template_path: LIVE\nper_device_train_batch_size: 2\n",
    "run.sh": "python -m trl.scripts.sft --model_name_or_path 'me/x-LIVE' --dataset_name 'me/LIVE' "
    "--output_dir 'LIVE' --per_device_train_batch_size 2\n",
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize(
    "live", [LIVE, "${oc.decode:x}", "${model.path}", "x\\${oc.env:MEMTRAIN_TEST_TOKEN}", "x\\\\${y}", "${"]
)
def test_text_of_a_foreign_file_is_no_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, live: str
):
    """`${oc.env:...}` of another's configuration was read from the environment by the recipe made of it."""
    monkeypatch.setenv("MEMTRAIN_TEST_TOKEN", "s3cret")
    (tmp_path / name).write_text(FOREIGN[name].replace("LIVE", live))
    tool = name.partition(".")[0] if not name.endswith(".sh") else "trl"
    made = import_config(read_foreign(str(tmp_path / name), tool, "sft"))
    assert "s3cret" not in made.text
    assert "s3cret" not in str(made.recipe)
    assert not [one for one in made.faults if "${" in one.what and "reads" in one.what]
    if made.recipe is not None and name != "run.sh":
        assert made.recipe.model.path == f"me/x-{live}"


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\u2029"])
def test_text_of_a_foreign_file_is_no_line_of_the_recipe(tmp_path: Path, end: str):
    text = json.dumps({"base_model": "me/x", "sequence_len": 512, "not_known": f"x{end}run_dir: stolen"})
    file = tmp_path / f"a{end if end != chr(10) else ''}run_dir: stolen.json"
    file.write_text(text)
    made = import_config(read_foreign(str(file), "axolotl", "sft"))
    assert made.recipe is None or made.recipe.run_dir != "stolen"
    assert not [one for one in re.split("[\n\r\x85\u2028\u2029]", made.text) if one.startswith("run_dir")]


def test_a_secret_of_the_environment_is_not_written_into_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A stranger's command line names it as any other variable of the shell."""
    secrets = {
        "HF_TOKEN": "plain",
        "MY_PASSWORD": "plain",
        "WANDB_API_KEY": "plain",
        "X": "hf_abcdefghijklmnopqrstuvwxyz",
        "Y": "0123456789abcdef0123456789abcdef",
        "Z": "sk-proj-x",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SIZE", "0.6B")
    for name, value in secrets.items():
        words = (
            f"trl sft --model_name_or_path Qwen/Qwen3-$SIZE --dataset_name me/${{{name}}} --run_name ${name}"
        )
        (tmp_path / "run.sh").write_text(words + "\n")
        made = import_config(read_foreign(str(tmp_path / "run.sh"), "trl", "sft"))
        assert value not in made.text
        assert value not in " ".join(made.notes)
        assert "Qwen/Qwen3-0.6B" in made.text
