"""Reward models as judges of completions: the numbers of transformers, and settings of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import SETTINGS
from transformers import AutoConfig, AutoModelForSequenceClassification

from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.model import Model
from memtrain.recipes.sections.rewards import RewardModel
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of
from memtrain.trainers.online.rewards import models
from memtrain.trainers.online.rewards.answer import Answer, RowPrompt
from memtrain.trainers.online.rewards.models import load_reward_model

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_labels": 1,
}


def settings(**changes: object) -> Settings:
    return Settings.model_validate(SETTINGS | {"shared_prompts": True} | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    tokenizer = tokenizer_of(Model(path="builtin:tiny"))
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", vocab_size=len(tokenizer), pad_token_id=0, **TINY)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answers() -> list[Answer]:
    """Two prompts with two completions each, of different lengths: strings."""
    written = {"Ana has 3 pens.": (" 3", " three of them"), "Hm": (" no", " yes, 12")}
    return [
        Answer(prompt, completion, (1, 2), {}, (3,), asked=RowPrompt(prompt))
        for prompt, group in written.items()
        for completion in group
    ]


def ids_of(answer: Answer) -> tuple[int, ...]:
    """A row of the reward model's training: prompt and answer put together, and the end token."""
    tokenizer = tokenizer_of(Model(path="builtin:tiny"))
    return tuple(tokenizer.encode(answer.prompt + answer.completion + str(tokenizer.eos_token)))


def alone(folder: Path, ids: tuple[int, ...]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, 0].item()


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_rewards_are_those_of_each_answer_alone(folder: Path, model_type: str):
    """As the policy's rows lie where it is alike (its prompts once), padded where it is another kind."""
    judge = load_reward_model(RewardModel(path=str(folder)), settings(), model_type=model_type)
    assert judge.settings.shared_prompts == (model_type == "qwen3")
    expected = [alone(folder, ids_of(answer)) for answer in answers()]
    assert judge.scores(answers()) == pytest.approx(expected, abs=1e-5)


def test_what_is_too_long_loses_its_beginning(folder: Path):
    recipe = RewardModel(path=str(folder), max_length=4)
    judge = load_reward_model(recipe, settings(), model_type="qwen3")
    expected = [alone(folder, ids_of(answer)[-4:]) for answer in answers()]
    assert judge.scores(answers()) == pytest.approx(expected, abs=1e-5)


def test_its_revision_precision_and_adapter_are_not_the_policys(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Defect C11 of TRL 1.16: a reward model was loaded with the policy's revision and attention."""
    seen: list[tuple[Model, Settings]] = []
    plain = models.load_model

    def load(recipe: Model, loaded: Settings, **given: object):
        seen.append((recipe, loaded))
        return plain(recipe, loaded, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(models, "load_model", load)
    policy = settings(dtype="bfloat16", quantize="none", adapter={"r": 4})
    load_reward_model(RewardModel(path=str(folder), dtype="float32"), policy, model_type="llama")
    ((recipe, loaded),) = seen
    assert recipe.revision is None
    assert (loaded.dtype, loaded.adapter, loaded.attention) == ("float32", None, "transformers")
