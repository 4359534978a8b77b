"""From a run that died to the change that fits: in its own tool, and as a recipe."""

import json
from pathlib import Path

import pytest

from memtrain.__main__ import main
from memtrain.cli.rescue.find import RescueQuestion, recipe_with, rescued
from memtrain.cli.rescue.page import page
from memtrain.cli.rescue.words import as_json, no_change_words, plan_learns, speed_words, time_words
from memtrain.errors import RecipeError
from memtrain.memory.plan.units import gib, read_size
from memtrain.recipes.reading.load import load_recipe, load_text
from memtrain.recipes.reading.shipped import configs_dir

AXOLOTL = (
    "base_model: mistralai/Mistral-7B-v0.1\nload_in_8bit: true\nadapter: lora\nlora_r: 32\n"
    "lora_target_linear: true\nsequence_len: 4096\nsample_packing: true\nmicro_batch_size: 2\n"
    "gradient_accumulation_steps: 4\nlearning_rate: 2.0e-4\noptimizer: adamw_bnb_8bit\nbf16: true\n"
    "gradient_checkpointing: true\n"
)
FULL = (
    "model_name_or_path: Qwen/Qwen2.5-7B\nlearning_rate: 1.0e-5\nper_device_train_batch_size: 1\n"
    "max_length: 2048\n"
)
LOGITS = (
    "Traceback (most recent call last):\n  File 'l.py', line 3, in forward\n    loss = cross_entropy(a, b)\n"
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1000.00 MiB (GPU 0; 23.69 GiB total "
    "capacity; 21.97 GiB already allocated; 420.00 MiB free; 22.10 GiB reserved in total by PyTorch)"
)


@pytest.fixture
def axolotl(tmp_path: Path) -> str:
    (tmp_path / "run.yml").write_text(AXOLOTL)
    return str(tmp_path / "run.yml")


def test_the_owners_at_the_moment_of_the_death_are_reported(axolotl: str):
    """1,000 MiB are float32 logits of 2 rows x 4,096 tokens x 32,000 words: 8,192 x 32,000 x 4 bytes."""
    found = rescued(RescueQuestion(axolotl, LOGITS))
    assert found.held is not None
    assert found.held.phase == "loss"
    assert found.held.owners[0].owner in ("activations", "logits")
    assert "float32 logits: 8,192 tokens x 32,000" in found.clues[0]
    assert found.hardware.name in ("3090", "4090")


def test_the_smallest_change_of_the_own_tool_keeps_the_batch(axolotl: str):
    found = rescued(RescueQuestion(axolotl, LOGITS))
    assert found.was is not None
    assert found.was.priced.need_bytes > found.budget_bytes
    assert found.own is not None
    assert found.own.keys == {"micro_batch_size": 1, "gradient_accumulation_steps": 8}
    assert found.own.learns == ()
    assert found.own.priced.need_bytes <= found.budget_bytes


def test_the_recipe_fits_and_learns_the_same(axolotl: str):
    found = rescued(RescueQuestion(axolotl, LOGITS))
    assert found.plan is not None
    assert found.plan.chosen.need_bytes <= found.budget_bytes
    assert plan_learns(found) == ()
    recipe = load_text(found.recipe_text, "rescued.yaml").recipe
    assert (recipe.train.batch_size, recipe.length.max_length) == (8, 4096)
    assert recipe.memory.activation_checkpointing == "auto"


@pytest.mark.slow
def test_a_change_of_the_result_is_reported(tmp_path: Path):
    """Weights of 7.6 billion in half precision with their gradients need more than 24 GiB by themselves."""
    (tmp_path / "sft.yaml").write_text(FULL)
    found = rescued(RescueQuestion(str(tmp_path / "sft.yaml"), gpu="4090", host_memory="64GiB"))
    assert found.plan is not None
    assert plan_learns(found) != ()
    recipe = load_text(found.recipe_text, "rescued.yaml").recipe
    assert recipe.memory.allow != ()
    assert found.own is not None
    assert found.own.learns != ()


@pytest.mark.parametrize(
    ("host", "said"),
    [
        pytest.param(
            "256GiB",
            "No change of keys in TRL that memtrain knows makes it fit the host's memory.",
            marks=pytest.mark.slow,
        ),
        ("2TiB", "By arithmetic nothing has to change in TRL for the card."),
    ],
)
def test_a_run_that_the_host_killed_is_not_told_that_nothing_has_to_change(tmp_path: Path, host, said):
    """All weights of 33 billion in ZeRO-3 on the host, 560 GiB there: the cards had room."""
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, '
        '"offload_param": {"device": "cpu"}}}'
    )
    command = (
        "deepspeed --num_gpus 2 sft.py --model_name_or_path Qwen/Qwen2.5-32B --dataset_name a/b --bf16 "
        "--max_length 2048 --per_device_train_batch_size 1 --gradient_checkpointing "
        f"--deepspeed {tmp_path / 'ds.json'} --output_dir o"
    )
    died = "slurmstepd: error: Detected 1 oom_kill event in StepId=991.0."
    found = rescued(RescueQuestion(command, died, gpu="a100-80", host_memory=host))
    assert found.was is not None
    assert found.was.need_bytes < found.budget_bytes
    assert no_change_words(found) == said
    assert f"of {gib(read_size(host))} that are there" in " ".join(found.clues)


def test_other_processes_on_the_card_leave_less(axolotl: str):
    text = (
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which "
        "1.00 GiB is free. Including non-PyTorch memory, this process has 28.15 GiB memory in use. Of the "
        "allocated memory 20.00 GiB is allocated by PyTorch, and 7.00 GiB is reserved by PyTorch but "
        "unallocated."
    )
    found = rescued(RescueQuestion(axolotl, text))
    assert found.budget_bytes == pytest.approx(29.15 * 2**30, rel=1e-3)
    reported = " ".join(found.clues)
    assert "Other processes hold 50.0" in reported
    assert "expandable_segments" in reported


def test_the_answer_is_one_page_and_one_json(axolotl: str):
    found = rescued(RescueQuestion(axolotl, LOGITS))
    made = json.loads(json.dumps(as_json(found)))
    assert made["own_tool"]["keys"]["micro_batch_size"] == 1
    assert made["memtrain"]["need_bytes"] <= made["budget_bytes"] < made["as_it_was"]["need_bytes"]
    html = page(found)
    assert html.startswith("<!doctype html>")
    assert "micro_batch_size: 1" in html
    assert "$schema=" in found.recipe_text
    assert "$schema=" not in html
    assert "http" not in html.replace("https://", "", 0).split("<pre>")[0]


def test_a_recipe_of_memtrain_is_rescued_too(tmp_path: Path):
    text = (
        "method: sft\nmodel: {path: Qwen/Qwen3-8B}\ndata: {train: rows.jsonl}\nlength: {max_length: 4096}\n"
    )
    (tmp_path / "own.yaml").write_text(text)
    found = rescued(RescueQuestion(str(tmp_path / "own.yaml"), gpu="a100-40"))
    assert found.title == "memtrain"
    assert found.plan is not None


def test_a_card_of_amd_is_not_taken_for_one_of_nvidia(axolotl: str):
    """191.98 GiB of an MI300X were planned as a B200, and nothing said so."""
    message = (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
    )
    message += "of 191.98 GiB of which 1.00 GiB is free."
    found = rescued(RescueQuestion(config=axolotl, traceback=message))
    assert found.hardware.name == "AMD's card"
    assert found.budget_bytes == pytest.approx(191.98 * 2**30, rel=1e-6)
    assert "has not been run on ROCm" in found.clues[0]


def test_the_time_of_an_update_is_not_called_that_of_a_step_with_completions():
    """PPO of 0.6B was said to take 36 s a step; `plan` says 71, half of it completions and rewards."""
    found = rescued(
        RescueQuestion(configs_dir().joinpath("ppo", "qwen3-0.6b-full.yaml").as_posix(), budget="11GiB")
    )
    assert found.plan is not None
    assert time_words(found.plan.chosen, found).endswith(" an update, completions not counted")


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (1.01, "as fast as"),
        (0.8, "20% faster than"),
        (0.4, "2.5 times as fast as"),
        (1.5, "50% slower than"),
        (13.79, "13.8 times as slow as"),
    ],
)
def test_a_much_slower_or_faster_step_is_told_as_a_multiple(share: float, words: str):
    assert speed_words(share) == words


def test_eager_attention_of_padded_rows_is_planned(tmp_path: Path):
    """axolotl#3181: it was refused. Scores of 4 heads of each of two rows of 4,096 tokens, 18 layers."""
    (tmp_path / "dpo.yml").write_text(
        "base_model: unsloth/gemma-3-270m\nrl: dpo\nload_in_4bit: true\nadapter: qlora\nlora_r: 16\n"
        "lora_target_linear: true\nsequence_len: 4096\nmicro_batch_size: 1\nlearning_rate: 1.0e-5\n"
        "bf16: true\neager_attention: true\n"
    )
    found = rescued(RescueQuestion(str(tmp_path / "dpo.yml"), gpu="3090"))
    assert found.was is not None
    owners = {one.owner: one.num_bytes for one in found.was.priced.prediction.peak.owners}
    assert owners["activations"] > 18 * 2 * 4096**2 * 4 * 6
    assert found.own is not None
    assert found.own.keys == {
        "dpo_use_liger_kernel": True,
        "attn_implementation": "flash_attention_2",
        "eager_attention": False,
    }
    assert found.own.learns == ()


@pytest.mark.slow
def test_modules_that_the_model_has_not_are_told_and_left_out(tmp_path: Path):
    """gpt-oss has stacks of experts and no gate_proj; PEFT passes over the name."""
    (tmp_path / "train.py").write_text(
        "from unsloth import FastLanguageModel\n"
        "model, tokenizer = FastLanguageModel.from_pretrained('unsloth/gpt-oss-20b', max_seq_length=2048)\n"
        "model = FastLanguageModel.get_peft_model(model, r=8, target_modules=['q_proj', 'gate_proj'])\n"
        "trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=1))\n"
    )
    found = rescued(RescueQuestion(str(tmp_path / "train.py"), gpu="3090"))
    assert any("no linear map gate_proj" in one for one in found.notes)
    assert found.plan is not None
    assert found.plan.settings.adapter is not None
    assert found.plan.settings.adapter.target_modules == ("q_proj",)
    # Unsloth's attention keeps no scores, which the model's own does.
    assert found.was is not None
    assert found.was.priced.need_bytes < 23 * 2**30


def test_a_fault_is_placed_in_what_was_read():
    """`recipe.yaml:34:1` was named, a file that nobody has."""
    line = "verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"
    with pytest.raises(RecipeError) as caught:
        rescued(RescueQuestion(line, gpu="4090"))
    assert {one.where for one in caught.value.faults} == {"the command line, read as a recipe"}


def test_nothing_is_guessed_about_the_card(axolotl: str):
    with pytest.raises(RecipeError, match="the card of the run is unknown"):
        rescued(RescueQuestion(axolotl))


def test_rows_of_no_length_are_asked_for(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: a/b\nmax_length: null\n"
    )
    asked = RescueQuestion(str(tmp_path / "run.yaml"), gpu="4090", method="sft", max_length=512)
    assert rescued(asked).plan is not None


def test_a_budget_that_was_asked_for_is_in_the_recipe(axolotl: str):
    found = rescued(RescueQuestion(axolotl, gpu="4090", budget="20GiB"))
    recipe = load_text(found.recipe_text, "rescued.yaml").recipe
    assert recipe.memory.budget == found.budget_bytes == 20 * 2**30


def test_keys_go_under_their_sections():
    text = "method: sft\nmemory:\n  loss: full\noptim:\n  lr: 1.0\n"
    made = recipe_with(text, {"memory.allow": ["lora"], "length.max_length": 512})
    assert "memory:\n  allow: [lora]  # makes it fit\n  loss: full\n" in made
    assert made.endswith("length:\n  max_length: 512  # makes it fit\n")


def test_a_key_replaces_its_namesake_of_the_same_section_only():
    text = "train:\n  seed: 1\n  micro_batch_size: 4\n\n# of the data\ndata:\n  seed: 2\n"
    made = recipe_with(text, {"train.seed": 3})
    assert made == (
        "train:\n  seed: 3  # makes it fit\n  micro_batch_size: 4\n\n# of the data\ndata:\n  seed: 2\n"
    )


def test_the_command_writes_a_valid_recipe(axolotl: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "oom.txt").write_text(LOGITS)
    out = tmp_path / "fits.yaml"
    assert main(["rescue", axolotl, "--traceback", str(tmp_path / "oom.txt"), "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "What held the memory, in the loss" in said
    assert "The smallest change in Axolotl (keys of 0.19.0):" in said
    assert "The result of training stays the same" in said
    assert load_recipe(str(out)).recipe.data.train[0].source == "rows.jsonl"
    assert "; written by `memtrain rescue`." in out.read_text().splitlines()[0]


def test_the_devices_of_verl_are_in_its_own_keys(tmp_path: Path):
    """Eight cards by the configuration, one by the default of the command."""
    (tmp_path / "verl.sh").write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=rows.parquet "
        "data.train_batch_size=256 data.max_prompt_length=1024 data.max_response_length=4096 "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct actor_rollout_ref.rollout.n=5 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=128 trainer.n_gpus_per_node=8 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16\n"
    )
    found = rescued(RescueQuestion(str(tmp_path / "verl.sh"), gpu="a6000"))
    assert found.hardware.num_devices == 8
    assert found.plan is not None


def test_a_run_in_float16_may_have_been_on_a_card_without_bfloat16(tmp_path: Path):
    """14.75 GiB are a T4's; in bfloat16 the run cannot have been on one."""
    names = {}
    for dtype in ("fp16", "bf16"):
        config = f"model_name_or_path: Qwen/Qwen2.5-0.5B\nmax_length: 2048\nuse_peft: true\n{dtype}: true\n"
        (tmp_path / "sft.yaml").write_text(config)
        died = (
            "torch.cuda.OutOfMemoryError: GPU 0 has a total capacity of 14.75 GiB of which 1.00 GiB is free."
        )
        asked = RescueQuestion(str(tmp_path / "sft.yaml"), died, method="sft")
        names[dtype] = rescued(asked).hardware.name
    assert names["fp16"] == "T4"
    assert names["bf16"] != "T4"


UNSLOTH = (
    "!pip install unsloth\nfrom unsloth import FastLanguageModel\nfrom trl import SFTConfig, SFTTrainer\n"
    "model, tokenizer = FastLanguageModel.from_pretrained(model_name='unsloth/Meta-Llama-3.1-8B', "
    "max_seq_length=2048, dtype=None, load_in_4bit=True)\n"
    "model = FastLanguageModel.get_peft_model(model, r=16, use_gradient_checkpointing='unsloth')\n"
    "trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2))\n"
)


def test_a_notebook_of_unsloth_died_on_a_card_without_bfloat16(tmp_path: Path):
    """The most common run of all: Colab's T4, no precision written."""
    (tmp_path / "colab.py").write_text(UNSLOTH)
    found = rescued(RescueQuestion(str(tmp_path / "colab.py"), gpu="t4"))
    assert found.was is not None
    assert found.was.priced.settings.dtype == "float16"
    assert "T4 has no bfloat16" in " ".join(found.notes)
    assert load_text(found.recipe_text, "rescued.yaml").recipe.model.dtype == "float16"
    text = (
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 14.74 GiB of which 0"
    )
    assert rescued(RescueQuestion(str(tmp_path / "colab.py"), text)).hardware.name == "T4"


def test_ranks_of_the_output_are_cards_of_the_run(tmp_path: Path):
    (tmp_path / "sft.yaml").write_text(FULL)
    path, text = str(tmp_path / "sft.yaml"), f"[rank3]: {OLD_RANK}"
    found = rescued(RescueQuestion(path, text, method="sft"))
    assert found.hardware.num_devices == 4
    assert "4 cards are taken" in " ".join(found.notes)
    assert rescued(RescueQuestion(path, text, method="sft", num_gpus=2)).hardware.num_devices == 2


OLD_RANK = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity "
    "of 79.14 GiB "
    "of which 1.00 GiB is free."
)


def test_trls_engine_is_planned_and_proposed(tmp_path: Path):
    """The engine of accelerate's file, by its name; and shards where a run had none."""
    (tmp_path / "run.sh").write_text(
        "accelerate launch --config_file configs/deepspeed_zero3.yaml --num_processes 4 sft.py \\\n"
        "  --model_name_or_path Qwen/Qwen2.5-7B --dataset_name a/b --max_length 1024 "
        "--no_remove_unused_columns\n"
    )
    found = rescued(RescueQuestion(str(tmp_path / "run.sh"), gpu="a100-80"))
    assert found.was is not None
    assert found.was.priced.settings.engine == "zero3"
    assert not [line for line in found.lost if "remove_unused" in line]
    (tmp_path / "sft.yaml").write_text(FULL)
    plain = rescued(RescueQuestion(str(tmp_path / "sft.yaml"), gpu="a100-80", num_gpus=4, method="sft"))
    assert plain.own is not None
    assert "accelerate_config" in plain.own.keys
