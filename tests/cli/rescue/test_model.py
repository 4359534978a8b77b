"""Runs whose model is on another machine: its shape by name, and by another model."""

import json
from pathlib import Path

import pytest

from memtrain.__main__ import main
from memtrain.cli.rescue.find import RescueQuestion, rescued
from memtrain.errors import LaunchError

RUN = (
    "model_name_or_path: /data/{folder}\nstage: sft\nfinetuning_type: lora\nlora_target: all\n"
    "cutoff_len: 1024\nper_device_train_batch_size: 1\nlearning_rate: 1.0e-4\nbf16: true\n"
)


def run_of(tmp_path: Path, folder: str) -> str:
    (tmp_path / "run.yaml").write_text(RUN.format(folder=folder))
    return str(tmp_path / "run.yaml")


def test_a_folder_of_another_machine_is_known_by_its_name(tmp_path: Path):
    found = rescued(RescueQuestion(run_of(tmp_path, "Qwen2.5-14B-Instruct"), gpu="4090"))
    assert found.facts is not None
    assert found.facts.shape.num_layers == 48
    assert "the shape of qwen2.5-14b is planned, by its name" in found.notes[0]
    # The recipe is for the machine where the folder is.
    assert "path: /data/Qwen2.5-14B-Instruct" in found.recipe_text


def test_a_folder_without_a_models_name_asks_for_one(tmp_path: Path):
    config = run_of(tmp_path, "model")
    with pytest.raises(LaunchError, match="there is no folder /data/model") as caught:
        rescued(RescueQuestion(config, gpu="4090"))
    assert "--model owner/name" in caught.value.faults[0].fix
    found = rescued(RescueQuestion(config, gpu="4090", model="Qwen/Qwen3-8B"))
    assert found.facts is not None
    assert found.facts.shape.num_layers == 36


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (
            "verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=/x/m "
            "actor_rollout_ref.rollout.n=4",
            "grpo",
        ),
        ("trl sft --model_name_or_path /x/model --max_length 512", "sft"),
    ],
)
def test_every_tools_own_key_is_replaced(line: str, key: str, capsys: pytest.CaptureFixture[str]):
    words = ["rescue", line, "--gpu", "4090", "--model", "Qwen/Qwen2.5-0.5B", "--max-length", "512", "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["method"] == key
    assert "path: Qwen/Qwen2.5-0.5B" in said["memtrain"]["recipe"]
