"""Scripts of trainers: which of their models is trained, and what becomes of each argument."""

from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.importers.importing import TOOLS, Foreign, Imported, import_config, read_foreign

MODEL = (
    "model = AutoModelForCausalLM.from_pretrained('mistralai/Mistral-7B-v0.1', torch_dtype=torch.bfloat16)\n"
)
DPO = (
    "from trl import DPOTrainer\n"
    + MODEL
    + "reference = AutoModelForCausalLM.from_pretrained({reference!r}, load_in_4bit=True).eval()\n"
    "args = TrainingArguments(output_dir='x', per_device_train_batch_size=4, learning_rate=5e-7)\n"
    "trainer = DPOTrainer(model, reference, args=args, beta=0.2, loss_type='ipo', max_length=2048,\n"
    "    truncation_mode='keep_end', callbacks=[stop])\n"
    "trainer.train()\n"
)
GRPO = (
    "from trl import GRPOConfig, GRPOTrainer\n"
    + MODEL
    + "judge = AutoModelForSequenceClassification.from_pretrained('a/judge', num_labels=1)\n"
    "args = GRPOConfig(num_generations=4, per_device_train_batch_size=4)\n"
    "trainer = GRPOTrainer(model=model, reward_funcs={rewards}, args=args, train_dataset=rows)\n"
)


def script_of(tmp_path: Path, script: str) -> Path:
    (tmp_path / "script.py").write_text(script)
    return tmp_path / "script.py"


def imported(tmp_path: Path, script: str, **more: int) -> Imported:
    (tmp_path / "train.py").write_text(script)
    return import_config(read_foreign(str(tmp_path / "train.py"), **more), has_stand_ins=True)  # pyright: ignore[reportArgumentType]


def test_a_reference_does_not_take_the_place_of_the_model(tmp_path: Path):
    """The last model that was loaded was trained, in the precision of the reference."""
    made = imported(tmp_path, DPO.format(reference="other/model"))
    recipe = made.whole()
    assert recipe.model.path == "mistralai/Mistral-7B-v0.1"
    assert recipe.model.quantize == "none"
    assert any(line.startswith("ref_model: other/model") for line in made.notes)
    same = imported(tmp_path, DPO.format(reference="mistralai/Mistral-7B-v0.1"))
    assert not any(line.startswith("ref_model") for line in same.notes)


def test_a_reference_beside_an_adapter_is_a_second_model_as_it_was(tmp_path: Path):
    adapted = DPO.format(reference="mistralai/Mistral-7B-v0.1")
    adapted = adapted.replace("args=args,", "args=args, peft_config=LoraConfig(r=16),")
    made = imported(tmp_path, adapted)
    assert made.pins["dpo.reference"] == "copy"
    assert any("no second model is loaded" in line for line in made.notes)


def test_arguments_of_an_earlier_trainer_are_those_of_its_configuration(tmp_path: Path):
    made = imported(tmp_path, DPO.format(reference="mistralai/Mistral-7B-v0.1"))
    recipe = made.whole()
    assert recipe.dpo is not None
    assert (recipe.dpo.loss, recipe.dpo.beta, recipe.length.truncation) == (("ipo",), 0.2, "keep_end")
    assert any(line.startswith("trainer.callbacks") for line in made.notes)


def test_weights_that_are_stepped_in_bfloat16_are_told(tmp_path: Path):
    """transformers' trainer keeps no float32 copies of weights that were loaded so; DeepSpeed does."""
    script = DPO.format(reference="mistralai/Mistral-7B-v0.1")
    assert any("without float32 copies" in line for line in imported(tmp_path, script).notes)
    sharded = script.replace("output_dir='x'", "output_dir='x', deepspeed='ds_zero3.json'")
    made = imported(tmp_path, sharded, processes=4)
    assert made.pins["cluster.engine"] == "zero3"
    assert not any("without float32 copies" in line for line in made.notes)


def test_a_model_that_judges_is_no_policy(tmp_path: Path):
    made = imported(tmp_path, GRPO.format(rewards="judge"))
    assert made.whole().model.path == "mistralai/Mistral-7B-v0.1"
    assert "functions: [{model: {path: a/judge}}]" in made.text
    assert not any(line.startswith("trainer.reward_funcs") for line in made.notes)
    own = imported(tmp_path, GRPO.format(rewards="[judge, length_of]"))
    assert any(line.startswith("trainer.reward_funcs: '[judge, length_of]'") for line in own.notes)


def test_unsloths_vllm_sleeps_where_its_variable_is_set(tmp_path: Path):
    fast = (
        "import os\nos.environ['UNSLOTH_VLLM_STANDBY'] = '1'\nfrom unsloth import FastLanguageModel\n"
        "model, tokenizer = FastLanguageModel.from_pretrained(model_name='Qwen/Qwen3-4B',\n"
        "    fast_inference=True, gpu_memory_utilization=0.9, max_seq_length=1024)\n"
        "model = FastLanguageModel.get_peft_model(model, r=16)\n"
        "trainer = GRPOTrainer(model=model, args=GRPOConfig(num_generations=4), reward_funcs=[f])\n"
    )
    assert imported(tmp_path, fast).whole().generation.vllm.sleep == "level2"  # pyright: ignore[reportOptionalMemberAccess]
    awake = fast.replace("os.environ", "# os.environ")
    assert imported(tmp_path, awake).whole().generation.vllm.sleep == "off"  # pyright: ignore[reportOptionalMemberAccess]


LAUNCHED = "sft.py --model_name_or_path a/b --dataset_name c/d --max_length 512"


@pytest.mark.parametrize(
    ("line", "processes", "engine"),
    [
        (f"NCCL_DEBUG=WARN accelerate launch --main_process_port 9 --num_processes 2 {LAUNCHED}", 2, "ddp"),
        (f"accelerate launch --num_processes 2 --use_deepspeed --zero_stage 2 {LAUNCHED}", 2, "zero2"),
        (
            f"deepspeed --include localhost:0,1,2,3 --master_port=9 {LAUNCHED} --deepspeed ds3_cpu.json",
            4,
            "zero3",
        ),
        (
            f"torchrun --nproc_per_node 2 --master_port 9 {LAUNCHED} --deepspeed playground/config_s2.json",
            2,
            "zero2",
        ),
    ],
)
def test_what_a_launcher_says_is_no_key_of_the_trainer(line: str, processes: int, engine: str):
    foreign = read_foreign(line)
    made = import_config(foreign)
    assert foreign.processes == processes
    assert made.pins["cluster.engine"] == engine
    assert not any("not a known key" in one for one in made.notes), made.notes


@pytest.mark.parametrize(
    ("line", "title"),
    [
        ("tune run lora_finetune_distributed --config llama3/8B_lora batch_size=1", "torchtune"),
        ("swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B", "ms-swift"),
        ("python -m openrlhf.cli.train_sft --pretrain a/b --micro_train_batch_size 1", "OpenRLHF"),
        ("python3 -m verl.trainer.main config=x.yaml worker.actor.model.model_path=a/b", "EasyR1"),
        ("uv run examples/run_grpo.py policy.train_micro_batch_size=1 cluster.gpus_per_node=8", "NeMo-RL"),
        ("uv run prime-rl @ rl.toml --model.name a/b", "prime-rl"),
    ],
)
def test_a_trainer_that_is_not_read_is_called_by_its_name(line: str, title: str):
    with pytest.raises(RecipeError, match=f"is a configuration of {title}, which memtrain cannot read"):
        read_foreign(line)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("[trainer.model]\nseq_len = 4096\n[orchestrator]\nbatch_size = 128\n", "prime-rl"),
        ("[model]\nname = 'llama3'\n[training]\nlocal_batch_size = 8\n", "torchtitan"),
    ],
)
def test_a_file_in_toml_is_called_by_its_trainer(text: str, title: str, tmp_path: Path):
    """Both had "no keys" before; which tools are read is said."""
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(RecipeError, match=f"is a configuration of {title}.* reads TRL, Axolotl"):
        read_foreign(str(tmp_path / "run.toml"))


def test_a_quantization_that_the_model_is_not_given_is_none(tmp_path: Path):
    """trl#3436: `quantization_config` was commented out, and the run planned in 4 bits."""
    rounded = "bits = BitsAndBytesConfig(load_in_4bit=True)\n"
    lora = (
        "model = get_peft_model(model, LoraConfig(r=8))\nSFTTrainer(model, args=SFTConfig(max_length=512))\n"
    )
    given = MODEL.replace(", torch", ", quantization_config=bits, torch")
    assert "quantize: 4bit" in imported(tmp_path, rounded + given + lora).text
    assert "quantize" not in imported(tmp_path, rounded + MODEL + lora).text
    # Where the loading is in another file, what is written is what it is for.
    assert "load_in_4bit" in str(read_foreign(str(script_of(tmp_path, rounded + lora))).config)


def test_a_paste_that_lost_its_indents_is_read(tmp_path: Path):
    """unsloth#4685 and #3542: the body of a function at the margin, a whole script four letters in."""
    shifted = "".join(f"    {line}\n" for line in GRPO.format(rewards="judge").splitlines())
    bare = "def rows_of(examples):\ntexts = [one for one in examples]\nreturn {'text': texts}\n"
    for text in (shifted, bare + GRPO.format(rewards="judge")):
        assert "num_generations: 4" in imported(tmp_path, text).text
    with pytest.raises(RecipeError, match="is not valid Python"):
        imported(tmp_path, "def rows_of(:\n" + GRPO.format(rewards="judge"))


def test_sampling_of_a_tools_inference_is_left_out_of_a_run_that_writes_nothing():
    """LlamaFactory#2939: one file for training and chat; the recipe was refused."""
    line = (
        "llamafactory-cli train --stage sft --model_name_or_path Qwen/Qwen1.5-72B-Chat-GPTQ-Int4 "
        "--top_p 0.6 --temperature 1.15"
    )
    made = import_config(read_foreign(line), has_stand_ins=True)
    assert made.whole().model.quantize == "none"
    assert "generate.top_p: 0.6 is not carried over: sft writes no completions." in made.notes
    assert any("holds rounded weights: name the model that they are of" in one for one in made.notes)


def test_a_file_that_is_named_as_a_dataset_is_named_once():
    line = "llamafactory-cli train --stage sft --model_name_or_path a/b --dataset lima.json --template qwen"
    assert "data/lima.json}" in import_config(read_foreign(line)).text


def test_the_command_of_a_script_reads_the_script(tmp_path: Path):
    """A script without arguments says all in its calls, and its launcher how many cards there were."""
    (tmp_path / "dpo.py").write_text(DPO.format(reference="mistralai/Mistral-7B-v0.1"))
    for start, number in (
        ("python", 1),
        ("accelerate launch --num_processes 4 --use_deepspeed --zero_stage 3", 4),
    ):
        foreign = read_foreign(f"{start} {tmp_path / 'dpo.py'}")
        made = import_config(foreign, has_stand_ins=True)
        assert (made.method, made.whole().model.path, foreign.processes) == (
            "dpo",
            "mistralai/Mistral-7B-v0.1",
            number,
        )
        assert made.pins["cluster.engine"] == ("ddp" if number == 1 else "zero3")


@pytest.mark.parametrize("line", ["axolotl train {}", "accelerate launch -m axolotl.cli.train {}"])
def test_a_command_without_arguments_is_one(line: str, tmp_path: Path):
    (tmp_path / "run.yml").write_text(
        "base_model: a/b\nsequence_len: 512\ndatasets: [{path: c/d, type: alpaca}]\n"
    )
    assert read_foreign(line.format(tmp_path / "run.yml")).tool.name == "axolotl"


def test_a_file_that_a_command_names_and_is_not_here_is_told():
    with pytest.raises(RecipeError, match=r"names examples/llama3_sft\.yaml, which is not here"):
        read_foreign("llamafactory-cli train examples/llama3_sft.yaml")


def test_no_argument_of_a_script_is_read_over(tmp_path: Path):
    """What began with `from_pretrained.` or `get_peft_model.` and was unknown was taken to be automatic."""
    made = imported(
        tmp_path,
        "from unsloth import FastModel\n"
        "model, tokenizer = FastModel.from_pretrained('Qwen/Qwen3-4B', max_seq_length=512, new_switch=3)\n"
        "model = FastModel.get_peft_model(\n"
        "    model, r=8, finetune_mlp_modules=False, rank_pattern={'q': 4})\n"
        "trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=rows, odd=1,\n"
        "    args=SFTConfig(per_device_train_batch_size=1))\n",
    )
    listed = {line.partition(":")[0] for line in made.notes}
    assert {
        "from_pretrained.new_switch",
        "get_peft_model.finetune_mlp_modules",
        "get_peft_model.rank_pattern",
        "trainer.odd",
    } <= listed
    assert not {"trainer.tokenizer", "trainer.train_dataset", "get_peft_model.used"} & listed


def test_weights_of_another_quantization_are_told(tmp_path: Path):
    made = imported(
        tmp_path,
        "bits = GPTQConfig(bits=4)\n"
        "model = AutoModelForCausalLM.from_pretrained('a/b', quantization_config=bits)\n"
        "trainer = SFTTrainer(model=model, args=SFTConfig(max_length=512))\n",
    )
    assert any(line.startswith("from_pretrained.quantization_config: GPTQConfig") for line in made.notes)


AR = "actor_rollout_ref"
GRPO_OF_VERL = {
    "algorithm.adv_estimator": "grpo",
    f"{AR}.model.path": "a/b",
    f"{AR}.rollout.n": 4,
    "data.train_files": "rows.parquet",
}


@pytest.mark.parametrize(
    ("key", "value", "is_told"),
    [
        (f"{AR}.actor.router_replay.mode", "R3", True),
        (f"{AR}.actor.router_replay.mode", "disabled", False),
        (f"{AR}.rollout.ignore_eos", True, True),
        (f"{AR}.rollout.do_sample", False, True),
        (f"{AR}.rollout.do_sample", True, False),
        (f"{AR}.rollout.pipeline_model_parallel_size", 2, True),
        ("algorithm.rollout_correction.rollout_rs", "token", True),
        (f"{AR}.actor.fsdp_config.fsdp_size", 4, True),
        (f"{AR}.actor.fsdp_config.fsdp_size", -1, False),
        (f"{AR}.rollout.max_num_seqs", 64, False),
    ],
)
def test_a_key_of_verl_that_changes_the_training_is_told(key: str, value: object, is_told: bool):
    """They were taken to be the sampler's and the engine's own business."""
    made = import_config(
        Foreign(TOOLS["verl"], {**GRPO_OF_VERL, key: value}, None, 8, "run"), has_stand_ins=True
    )
    assert any(line.startswith(f"{key}: ") for line in made.notes) is is_told


@pytest.mark.parametrize("section", [f"{AR}.actor", f"{AR}.actor.fsdp_config"])
def test_verls_sequence_parallelism_is_read(section: str):
    config = {**GRPO_OF_VERL, f"{section}.ulysses_sequence_parallel_size": 2}
    made = import_config(Foreign(TOOLS["verl"], config, None, 8, "run"), has_stand_ins=True)
    assert "context_parallel: 2" in made.text


def test_a_call_that_loads_several_splits_names_the_first(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from datasets import load_dataset\nfrom trl import SFTConfig, SFTTrainer\n"
        "train, held = load_dataset('a/b', split=['train_sft', 'test_sft'])\n"
        "SFTTrainer(model='c/d', args=SFTConfig(output_dir='o'), train_dataset=train).train()\n"
    )
    recipe = import_config(read_foreign(str(script))).whole()
    assert [(one.source, one.split) for one in recipe.data.train] == [("a/b", "train_sft")]
