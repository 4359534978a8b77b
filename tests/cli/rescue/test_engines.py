"""Runs of other tools over several cards, planned as their engine holds them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from memtrain.cli.rescue.as_it_was import AsItWas, as_it_was
from memtrain.cli.rescue.find import RescueQuestion, rescued
from memtrain.cli.rescue.words import key_lines, plan_learns, rest_words
from memtrain.memory.estimate.pricing import MARGIN_SHARE
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.plan.units import GIB
from memtrain.recipes.importers.importing import TOOLS, Foreign, read_foreign
from memtrain.recipes.importers.own_changes import changes_of
from memtrain.recipes.peers.savings import SEGMENTS
from memtrain.recipes.reading.load import load_text

FULL = {
    "base_model": "mistralai/Mistral-7B-v0.1",
    "sequence_len": 4096,
    "sample_packing": True,
    "micro_batch_size": 1,
    "optimizer": "adamw_bnb_8bit",
    "learning_rate": 1e-5,
    "bf16": True,
    "gradient_checkpointing": True,
}
LORA = {
    "model_name_or_path": "openai/gpt-oss-120b",
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_target": "all",
    "cutoff_len": 2048,
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-4,
    "bf16": True,
}


def planned(tool: str, config: Mapping[str, object], gpu: str, processes: int) -> AsItWas:
    hardware = Hardware.named(gpu, processes)
    foreign = Foreign(TOOLS[tool], config, None, processes, "run")
    return as_it_was(foreign, hardware, hardware.memory_bytes, None)


def owned(found: AsItWas) -> dict[str, int]:
    return {one.owner: one.num_bytes for one in found.priced.prediction.peak.owners}


def test_zero_2_cuts_no_weights_under_an_adapter():
    """117 billion weights of 2 bytes are on every card; ZeRO-2 was planned as FSDP, and so it fitted."""
    found = planned("llamafactory", LORA | {"deepspeed": "ds_z2_config.json"}, "h100-nvl", 8)
    assert owned(found)["weights"] > 200 * GIB
    cut = planned("llamafactory", LORA | {"deepspeed": "ds_z3_config.json"}, "h100-nvl", 8)
    assert owned(cut)["weights"] < 30 * GIB


@pytest.mark.slow
def test_the_change_that_fits_is_the_one_that_cuts_weights(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in LORA.items()))
    found = rescued(RescueQuestion(str(tmp_path / "run.yaml"), gpu="h100-nvl", num_gpus=8))
    assert found.own is not None
    assert found.own.keys == {"deepspeed": "examples/deepspeed/ds_z3_config.json"}


@pytest.mark.parametrize(("file", "engine", "gib"), [("zero1", "zero1", 13.5), ("zero3_bf16", "zero3", 3.4)])
def test_eight_bit_states_are_in_shards_as_other_tools_have_them(file: str, engine: str, gib: float):
    """7.24 billion weights on 4 cards, 2 bytes each: whole, or a quarter. They were planned whole, as DDP."""
    found = planned("axolotl", FULL | {"deepspeed": f"deepspeed_configs/{file}.json"}, "a100-40", 4)
    assert found.priced.settings.engine == engine
    assert found.priced.settings.optimizer == "adamw_8bit"
    held = owned(found)
    assert held["weights"] / GIB == pytest.approx(gib, abs=0.1)
    # Two moments of a byte, and their scales, of a quarter of the weights.
    assert held["optimizer"] == pytest.approx(2 * 7.24e9 / 4, rel=0.03)


def test_gradients_wait_on_the_host_beside_the_states():
    """DeepSpeed's gradients lie where the optimizer is; gathered weights stay to a billion numbers."""
    config = FULL | {
        "deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json",
        "optimizer": "adamw_torch",
    }
    held = owned(planned("axolotl", config, "a100-40", 4))
    assert "gradients" not in held
    assert "optimizer" not in held
    assert held["gathered weights"] == 2_000_000_000


SCRIPT = (
    "from trl import GRPOConfig, GRPOTrainer\n"
    "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-7B', torch_dtype=torch.bfloat16)\n"
    "args = GRPOConfig(bf16=True, per_device_train_batch_size=1, num_generations=2, max_prompt_length=256,\n"
    "    max_completion_length=512, learning_rate=5e-6)\n"
    "trainer = GRPOTrainer(model=model, args=args, reward_funcs=[good], train_dataset=rows)\n"
)


def test_weights_that_were_loaded_in_bfloat16_are_stepped_so_and_summed_in_buckets(tmp_path: Path):
    """trl#2972: 40 GB in the first step, more than 96 GB in the second. 7.6 billion weights of 2 bytes, as
    many bytes of gradients, DDP's buckets, each of two moments, and the roots of the second."""
    (tmp_path / "grpo.py").write_text(SCRIPT)
    found = rescued(RescueQuestion(str(tmp_path / "grpo.py"), gpu="h20", num_gpus=4))
    assert found.was is not None
    held = owned(found.was)
    assert "master copies" not in held
    size = held["weights"]
    assert held["optimizer"] == 2 * size
    assert all(held[name] == pytest.approx(size, rel=0.01) for name in ("gradients", "reduce buffers"))
    # What fits is exact: a script of TRL has its launcher's engines too.
    assert found.own is not None
    assert (found.own.keys, found.own.learns) == ({"accelerate_config": "zero2"}, ())


def test_whole_states_are_taken_before_an_adapter(tmp_path: Path):
    """8-bit states are in no shards of memtrain; AdamW's own are, and rounding them is not needed."""
    config = {**FULL, "deepspeed": "deepspeed_configs/zero3_bf16.json", "datasets": [{"path": "a/b"}]}
    (tmp_path / "run.yml").write_text("".join(f"{key}: {value}\n" for key, value in config.items()))
    found = rescued(RescueQuestion(str(tmp_path / "run.yml"), gpu="a100-40", num_gpus=4))
    assert found.plan is not None
    assert found.plan.settings.adapter is None
    assert (found.plan.settings.engine, found.plan.settings.optimizer) == ("fsdp2", "adamw")
    assert "kind: adamw  # makes it fit" in found.recipe_text
    assert plan_learns(found) == ()


def test_an_old_card_computes_shards_in_float16(tmp_path: Path):
    """verl on V100: its FSDP was planned as DDP, whole weights and states on every card."""
    line = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=8 "
        "data.max_prompt_length=256 data.max_response_length=512 trainer.n_gpus_per_node=8 "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B actor_rollout_ref.model.use_remove_padding=True "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.rollout.n=2"
    )
    found = rescued(RescueQuestion(line, gpu="v100-32"))
    assert found.was is not None
    assert (found.was.priced.settings.engine, found.was.priced.settings.dtype) == ("fsdp2", "float16")
    assert "dtype: float16  # the card has no bfloat16" in found.recipe_text


def test_shards_that_were_asked_to_compute_in_float16_do_so(tmp_path: Path):
    """`fp16: true` was left out beside an engine, and a V100's run was planned in float32."""
    path = tmp_path / "dpo.yaml"
    path.write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: dpo\nfinetuning_type: full\ncutoff_len: 1024\n"
        "deepspeed: ds_z3_config.json\nper_device_train_batch_size: 1\nfp16: true\n"
    )
    found = rescued(RescueQuestion(str(path), gpu="v100-16", num_gpus=8))
    assert found.was is not None
    assert (found.was.priced.settings.engine, found.was.priced.settings.dtype) == ("zero3", "float16")


GRPO = "trl grpo --model_name_or_path Qwen/Qwen3-0.6B --bf16 true --use_vllm true --num_generations 8 "


def test_vllm_had_a_card_of_its_own_where_an_earlier_trl_named_it():
    """TRL 0.14 and 0.15: `vllm_device`; later ones without `vllm_mode` share the cards of the training."""
    beside = rescued(RescueQuestion(GRPO, gpu="4090")).was
    apart = rescued(RescueQuestion(f"{GRPO} --vllm_device auto", gpu="4090")).was
    assert beside is not None
    assert apart is not None
    assert beside.beside.share_bytes > 0
    assert apart.beside.share_bytes == 0


def test_a_step_of_no_whole_number_of_groups_is_planned_and_told():
    """Six cards of one completion each are no whole number of groups of four: eight are taken."""
    line = GRPO.replace("num_generations 8", "num_generations 4 --per_device_train_batch_size 1")
    found = rescued(RescueQuestion(line, gpu="4090", num_gpus=6))
    assert any(
        "a step of 6 completions is no whole number of groups of 4" in one for one in found.differences
    )
    assert "batch_size: 8" in found.recipe_text


def test_a_number_of_cards_that_nothing_says_is_told():
    line = "trl sft --model_name_or_path Qwen/Qwen3-0.6B --max_length 512 --deepspeed zero3.json"
    words = "Nothing says how many cards the run had: one is taken (--num-gpus)."
    assert words in rescued(RescueQuestion(line, gpu="4090")).notes
    assert words not in rescued(RescueQuestion(line, gpu="4090", num_gpus=2)).notes


def test_an_engine_that_cannot_be_read_is_told_first():
    line = "trl sft --model_name_or_path Qwen/Qwen3-0.6B --max_length 512 --deepspeed mine.json"
    found = rescued(RescueQuestion(line, gpu="4090", num_gpus=2))
    assert any("put the file there, or set cluster.engine" in note for note in found.notes)
    assert not any("mine.json" in one for one in found.lost)


def test_a_run_that_accelerates_file_starts_changes_its_engine_there():
    """LlamaFactory#3494: a DeepSpeed file beside accelerate's FSDP is refused by transformers."""
    line = (
        "accelerate launch --config_file fsdp_config.yaml --num_processes 4 src/train_bash.py --stage sft "
        "--model_name_or_path meta-llama/Meta-Llama-3-70B --finetuning_type lora --quantization_bit 4 --bf16 "
        "--cutoff_len 1024 --per_device_train_batch_size 1"
    )
    found = rescued(RescueQuestion(line, budget="12GiB", gpu="3090"))
    assert found.own is not None
    assert found.own.keys.get("accelerate_config") == "zero3_offload"
    assert "deepspeed" not in found.own.keys
    assert any("offload_param_device: cpu" in one for one in key_lines(found.own))


def test_a_run_is_planned_under_the_engine_of_its_frames():
    """trl#3436: no file of accelerate's was given, and the weights of each card were planned whole."""
    line = "trl sft --model_name_or_path Qwen/Qwen3-8B --max_length 512 --use_peft --learning_rate 1e-4"
    frames = (
        'File "torch/distributed/fsdp/_flat_param.py", line 9, in unshard\ntorch.OutOfMemoryError: CUDA out '
        "of memory. Tried to allocate 388.00 MiB. GPU 0 has a total capacity of 9.68 GiB."
    )
    found = rescued(RescueQuestion(line, frames, num_gpus=8))
    assert found.was is not None
    assert found.was.priced.settings.engine == "fsdp2"
    assert "The frames of the traceback are of FSDP, and the run is planned under it." in found.notes
    assert any("No dtype is written" in note for note in found.notes)
    written = rescued(RescueQuestion(f"{line} --dtype bfloat16 --accelerate_config multi_gpu", frames))
    assert written.was is not None
    assert written.was.priced.settings.engine == "ddp"
    assert not any("No dtype" in note or "frames" in note for note in written.notes)


LLAMAFACTORY = (
    "llamafactory-cli train --stage sft --model_name_or_path deepseek-ai/deepseek-coder-6.7b-base --bf16 "
    "--finetuning_type lora --cutoff_len 8192 --per_device_train_batch_size 2 --val_size 0.1"
)


def test_the_evaluation_is_planned_with_its_own_rows():
    """LlamaFactory#3310: two rows were trained, four evaluated, and every tenth step died. Whole logits of
    4 rows x 8,192 tokens x 32,256 words: three float32 copies and one of half precision, 14 bytes each."""
    plain = rescued(RescueQuestion(LLAMAFACTORY, gpu="3090", num_gpus=1)).was
    line = f"{LLAMAFACTORY} --eval_strategy steps --per_device_eval_batch_size 4"
    found = rescued(RescueQuestion(line, gpu="3090", num_gpus=1))
    assert plain is not None
    assert found.was is not None
    of = {phase.phase: phase for phase in found.was.priced.prediction.phases}
    logits = {one.owner: one.num_bytes for one in of["evaluation"].owners}["logits"]
    assert logits == pytest.approx(4 * 8192 * 32256 * 14, rel=0.05)
    assert found.was.need_bytes > plain.need_bytes
    fewer = rescued(RescueQuestion(line.replace("size 4", "size 1"), gpu="3090", num_gpus=1)).was
    assert fewer is not None
    assert fewer.need_bytes == plain.need_bytes


VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.max_prompt_length=2048 "
    "data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct "
    "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.n=4 "
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.3 trainer.n_gpus_per_node=6"
)


def test_segments_that_grow_are_counted_where_the_run_has_them():
    """ToolRL#39: the script sets the variable; 26% of the tensors were counted for fragments, 5% are."""
    without, grows = (
        rescued(RescueQuestion(f"{before}{VERL}", gpu="3090"))
        for before in ("# PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n", f"{SEGMENTS.environment} ")
    )
    assert without.was is not None
    assert grows.was is not None
    tensors = grows.was.priced.prediction.peak.num_bytes
    assert without.was.need_bytes - grows.was.need_bytes == pytest.approx(
        0.21 * tensors * (1 + MARGIN_SHARE), rel=1e-3
    )
    assert "5% of the tensors" in rest_words(grows)
    assert "26% of the tensors" in rest_words(without)


def test_verls_micro_batches_are_of_fewer_tokens_where_it_counts_them():
    """Rows of a micro-batch have no effect under use_dynamic_bsz; 2,560 tokens are the longest row."""
    kinds = [one for one in changes_of("verl", "grpo", 6) if one.kind == "rows"]
    config = read_foreign(VERL).config
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    assert [edit for one in kinds if (edit := one.edit(config))] == [{key: 8192}, {key: 4096}]
    still = {**config, "actor_rollout_ref.actor.use_dynamic_bsz": False}
    assert all(key not in one.edit(still) for one in kinds)


def test_completions_are_written_without_vllm_where_its_weights_have_no_room(tmp_path: Path):
    """8B in 4 bits on a T4: Unsloth's vLLM reads the same 4-bit weights, memtrain's has its own of 15 GiB. No
    plan was found, and native generation fits with the same result."""
    (tmp_path / "grpo.py").write_text(
        "model, tokens = FastLanguageModel.from_pretrained(model_name='meta-llama/Llama-3.1-8B-Instruct',\n"
        "    max_seq_length=2048, load_in_4bit=True, fast_inference=True, gpu_memory_utilization=0.8)\n"
        "model = FastLanguageModel.get_peft_model(model, r=32, use_gradient_checkpointing='unsloth')\n"
        "args = GRPOConfig(optim='paged_adamw_8bit', num_generations=4, max_prompt_length=256,\n"
        "    per_device_train_batch_size=4, max_completion_length=1792, output_dir='o')\n"
        "trainer = GRPOTrainer(model=model, reward_funcs=[good], args=args, train_dataset=rows)\n"
    )
    found = rescued(RescueQuestion(str(tmp_path / "grpo.py"), gpu="t4"))
    assert found.plan is not None
    assert found.plan.settings.sampler == "native"
    assert plan_learns(found) == ()
    recipe = load_text(found.recipe_text, "rescued.yaml").recipe
    assert (recipe.generation.backend, recipe.generation.vllm) == ("auto", None)
