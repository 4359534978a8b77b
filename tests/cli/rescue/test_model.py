"""Runs whose model is on another machine: its shape by name, and by another model."""

import json
from pathlib import Path

import pytest

from memtrain.__main__ import main
from memtrain.cli.rescue.find import RescueQuestion, rescued
from memtrain.errors import LaunchError, RecipeError

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


def test_a_command_whose_model_nothing_sets_asks_for_one():
    line = "trl sft --model_name_or_path $MODEL --max_length 512"
    with pytest.raises(RecipeError, match=r"the model is \$MODEL, which nothing sets") as caught:
        rescued(RescueQuestion(line, gpu="4090"))
    assert caught.value.faults[0].fix == "add --model owner/name"
    found = rescued(RescueQuestion(line, gpu="4090", model="Qwen/Qwen3-0.6B"))
    assert not any("Nothing sets" in note for note in found.notes)


def test_a_model_that_reads_pictures_is_told_by_its_name(tmp_path: Path):
    with pytest.raises(LaunchError, match="by its name it reads more than text") as caught:
        rescued(RescueQuestion(run_of(tmp_path, "MyOwn-VL-7B"), gpu="4090"))
    assert "the language model inside" in caught.value.faults[0].fix


def test_a_name_that_no_model_can_have_is_an_error_and_no_bug(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(RUN.replace("/data/{folder}", "a model"))
    with pytest.raises(LaunchError, match="'a model' cannot be the name of a model"):
        rescued(RescueQuestion(str(tmp_path / "run.yaml"), gpu="4090"))


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


UNKNOWN = {
    "model_type": "foobar9",
    "architectures": ["FoobarForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def unknown(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(UNKNOWN))
    return str(tmp_path)


def test_that_no_run_can_start_stands_above_the_plan(unknown: str, capsys: pytest.CaptureFixture[str]):
    """The note stood below the headline, where a reader had seen that the run fits."""
    recipe = Path(unknown, "my.yaml")
    recipe.write_text(
        f"method: sft\nmodel: {{path: {unknown}}}\ndata: {{train: rows.jsonl}}\nlength: {{max_length: 512}}\n"
    )
    assert main(["plan", str(recipe), "--gpu", "4090", "--without-data"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.index("no run of it can start here") < said.index("by arithmetic it fits")


def test_that_no_run_can_start_stands_above_a_rescue(unknown: str, capsys: pytest.CaptureFixture[str]):
    """The answer did not say it at all."""
    run = Path(unknown, "run.yaml")
    run.write_text(f"model_name_or_path: {unknown}\nper_device_train_batch_size: 8\nmax_length: 512\n")
    for config in (str(run), "own"):
        if config == "own":
            config = str(Path(unknown, "my.yaml"))
            Path(config).write_text(
                f"method: sft\nmodel: {{path: {unknown}}}\ndata: {{train: r.jsonl}}\n"
                "length: {max_length: 512}\n"
            )
        assert main(["rescue", config, "--gpu", "4090"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert said.startswith("Model type 'foobar9' is not in the table")
        assert said.index("no run of it can start here") < said.index("4090")


def test_the_host_of_an_offloaded_run_is_told(tmp_path: Path):
    """32 billion weights on 8 cards under ZeRO-3's offloading: 18 bytes of each are on the host."""
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-32B-Instruct\nstage: sft\nfinetuning_type: full\ncutoff_len: 4096\n"
        "deepspeed: ds_z3_offload.json\nper_device_train_batch_size: 1\nlearning_rate: 1.0e-5\nbf16: true\n"
    )
    asked = RescueQuestion(str(tmp_path / "run.yaml"), gpu="h100", num_gpus=8, host_memory="512GiB")
    words = next(one for one in rescued(asked).clues if one.startswith("The host holds"))
    assert "of 512.0 GiB that are there. That is more than there is." in words
