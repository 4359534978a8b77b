"""vLLM on the card of a run of another tool: what both need together."""

from pathlib import Path

import pytest

from memtrain.cli.rescue.find import Rescue, RescueQuestion, rescued
from memtrain.memory.hardware.devices import Hardware

TRL = (
    "model_name_or_path: Qwen/Qwen2.5-1.5B\nreward_funcs: [a.b]\nper_device_train_batch_size: 4\n"
    "num_generations: 4\nmax_completion_length: 512\nlearning_rate: 1.0e-6\nuse_peft: true\n"
    "use_vllm: true\nvllm_mode: colocate\nvllm_gpu_memory_utilization: 0.8\n"
)
FAST = (
    "{standby}from unsloth import FastLanguageModel\n"
    "model, tokenizer = FastLanguageModel.from_pretrained(model_name='Qwen/Qwen2.5-3B-Instruct',\n"
    "    max_seq_length=4000, load_in_4bit=True, fast_inference=True, gpu_memory_utilization=0.9)\n"
    "model = FastLanguageModel.get_peft_model(model, r=64, use_gradient_checkpointing='unsloth')\n"
    "args = GRPOConfig(per_device_train_batch_size=8, num_generations=8, max_prompt_length=1000,\n"
    "    max_completion_length=3000, bf16=True)\n"
    "trainer = GRPOTrainer(model=model, args=args, reward_funcs=[good], train_dataset=rows)\n"
)


def found_of(tmp_path: Path, name: str, text: str, gpu: str) -> Rescue:
    (tmp_path / name).write_text(text)
    return rescued(RescueQuestion(str(tmp_path / name), gpu=gpu))


def test_a_share_that_never_sleeps_is_part_of_the_need(tmp_path: Path):
    """0.8 of 23.56 GiB beside the training: by the training alone it fitted."""
    found = found_of(tmp_path, "grpo.yaml", TRL, "3090")
    assert found.was is not None
    share = round(0.8 * Hardware.named("3090").memory_bytes)
    assert found.was.need_bytes == found.was.priced.need_bytes + share
    assert found.was.priced.need_bytes < found.budget_bytes < found.was.need_bytes
    assert any(
        "vLLM holds 18.85 GiB of each card while the weights are trained, too" in one for one in found.notes
    )
    assert found.own is not None
    assert set(found.own.keys) & {"vllm_enable_sleep_mode", "vllm_gpu_memory_utilization"}


def test_vllm_on_a_server_of_its_own_takes_nothing(tmp_path: Path):
    found = found_of(tmp_path, "grpo.yaml", TRL.replace("colocate", "server"), "3090")
    assert found.was is not None
    assert found.was.need_bytes == found.was.priced.need_bytes


@pytest.mark.parametrize(
    ("standby", "fits"), [("import os\nos.environ['UNSLOTH_VLLM_STANDBY'] = '1'\n", True), ("", False)]
)
def test_unsloths_vllm_reads_the_runs_own_weights(tmp_path: Path, standby: str, fits: bool):
    """unsloth#3302: with its variable vLLM sleeps while the weights are trained."""
    found = found_of(tmp_path, "grpo.py", FAST.format(standby=standby), "3090")
    assert found.was is not None
    assert (found.was.need_bytes <= found.budget_bytes) is fits
    assert any("weights that both read" in one for one in found.notes)
    if not fits:
        assert found.own is not None
        assert found.own.keys == {"from_pretrained.unsloth_vllm_standby": True}
