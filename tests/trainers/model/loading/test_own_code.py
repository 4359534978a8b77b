"""Code of a model: run where it is asked for and pinned, refused in every other case."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import memtrain
from memtrain.cli.plan.check_run import check_run
from memtrain.errors import LaunchError, MemtrainError
from memtrain.recipes.reading.load import recipe_of_words
from memtrain.recipes.sections.model import Model
from memtrain.trainers.model.loading.own_code import code_digest, trust_code
from memtrain.trainers.tools.chat import load_trained
from memtrain.trainers.tools.trained_model import serve_words, trained_model

CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM

class TheirConfig(Qwen3Config):
    model_type = "code_beside_it"

class TheirForCausalLM(Qwen3ForCausalLM):
    config_class = TheirConfig
"""
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 1100,
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A model of a type that transformers does not know, with its code; unknown again afterwards."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(tmp_path)
    change(tmp_path, "model.TheirConfig", "model.TheirForCausalLM")
    (tmp_path / "model.py").write_text(CODE)
    yield tmp_path
    known = CONFIG_MAPPING._extra_content.pop("code_beside_it", None)
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(known, None)


def change(folder: Path, config: str, model: str, kind: str = "code_beside_it") -> None:
    given = json.loads((folder / "config.json").read_text())
    given |= {"model_type": kind, "auto_map": {"AutoConfig": config, "AutoModelForCausalLM": model}}
    (folder / "config.json").write_text(json.dumps(given))


def trusting(folder: Path) -> Model:
    return Model(path=str(folder), revision=code_digest(folder), trust_remote_code=True)


def refused(model: Model) -> str:
    with pytest.raises(LaunchError) as caught:
        trust_code(model)
    return caught.value.text()


def test_pinned_code_is_run_and_is_the_model(folder: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    trust_code(trusting(folder))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=False)
    assert type(model).__name__ == "TheirForCausalLM"
    given = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "auto_map")}
    plain = Qwen3ForCausalLM.from_pretrained(folder, config=Qwen3Config(**given))
    ids = torch.arange(1, 9)[None]
    assert torch.equal(model(ids).logits, plain(ids).logits)
    model.save_pretrained(folder / "out")
    assert (folder / "out" / "model.py").exists()


def test_code_that_changed_is_refused(folder: Path):
    model = trusting(folder)
    (folder / "model.py").write_text(CODE + "print('stolen')\n")
    reported = refused(model)
    assert f"the code in {folder} is not the pinned one (sha256:" in reported
    assert f"set model.revision: {code_digest(folder)}" in reported
    assert "is not pinned" in refused(Model(path=str(folder), trust_remote_code=True))


def test_code_of_another_repository_is_refused(folder: Path):
    change(folder, "model.TheirConfig", "someone/else--model.TheirForCausalLM")
    assert "takes its AutoModelForCausalLM from another repository" in refused(trusting(folder))


def test_code_without_need_is_refused(folder: Path):
    change(folder, "model.TheirConfig", "model.TheirForCausalLM", kind="qwen3")
    assert "transformers knows qwen3 models itself" in refused(trusting(folder))


def test_a_model_with_its_own_code_is_refused_once_and_without_a_list_of_all_others(folder: Path):
    words = [
        "method=sft",
        f"model.path={folder}",
        "model.tokenizer=builtin:tiny",
        "data.train=builtin:arithmetic",
    ]
    with pytest.raises(MemtrainError, match="does not know code_beside_it models") as caught:
        check_run(recipe_of_words(words))
    (fault,) = caught.value.faults
    assert fault.what.endswith(", and the model comes with its own code")
    assert "docs/security.md" in fault.fix
    assert len(fault.what) < 200


def test_a_run_of_trusted_code_is_chatted_with_and_served_as_it_was_trained(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
):
    place = tmp_path_factory.mktemp("run")
    given = {
        "model": {
            "path": str(folder),
            "revision": code_digest(folder),
            "trust_remote_code": True,
            "tokenizer": "builtin:tiny",
        },
        "data.train.limit": 40,
        "train.max_steps": 1,
        "train.batch_size": 4,
    }
    run = memtrain.train(memtrain.load_recipe("smoke/sft", given), run_dir=str(place))
    CONFIG_MAPPING._extra_content.pop("code_beside_it")
    trained = trained_model(place)
    assert type(load_trained(trained, 1)).__name__ == "TheirForCausalLM"
    assert "--trust-remote-code" in serve_words(trained)
    CONFIG_MAPPING._extra_content.pop("code_beside_it")
    assert trained_model(run.model).run == place
    alone = shutil.copytree(run.model, place / "alone")
    with pytest.raises(LaunchError, match="does not know code_beside_it models"):
        load_trained(trained_model(alone), 1)
    assert "--trust-remote-code" not in serve_words(trained_model(alone))


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "abc123"])
def test_code_of_a_moving_branch_is_refused(revision: str | None):
    words = ["method=sft", "model.path=me/model", "data.train=builtin:arithmetic"]
    words.append("model.trust_remote_code=true")
    if revision:
        words.append(f"model.revision={revision}")
    with pytest.raises(MemtrainError, match="which may change"):
        recipe_of_words(words)
    recipe_of_words([*words, f"model.revision={'a' * 40}"])
