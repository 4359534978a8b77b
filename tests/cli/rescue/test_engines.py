"""Runs of other tools over several cards, planned as their engine holds them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from memtrain.cli.rescue.as_it_was import AsItWas, as_it_was
from memtrain.cli.rescue.find import RescueQuestion, rescued
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.plan.units import GIB
from memtrain.recipes.importers.importing import TOOLS, Foreign

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
