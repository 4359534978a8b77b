"""`memtrain score`: the rewards of a trained reward model, row by row."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from memtrain.cli.commands.score import score
from memtrain.cli.commands.train import run_recipe
from memtrain.errors import DataError, LaunchError

RECIPE = """
method: {method}
model:
  config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}}
  tokenizer: builtin:tiny
data: {{train: {{source: builtin:arithmetic, limit: 16}}, cache_dir: {folder}/cache}}
length: {{max_length: 160}}
optim: {{lr: 1e-2}}
train: {{batch_rows: 8, max_steps: 2}}
cluster: {{device: cpu, threads: 1}}
"""
ROWS = [("Ana has 3 pens. How many?", " 3"), ("Ben has 12 eggs and sells 2.", " 12 - 2 = 10"), ("Hm", " no")]


def trained(folder: Path, method: str) -> str:
    recipe = folder / f"{method}.yaml"
    recipe.write_text(RECIPE.format(method=method, folder=folder))
    run_recipe(method, str(recipe), [], run_dir=str(folder / method))
    return str(folder / method / "final")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("score")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return trained(folder, "reward")


def scored(model: str, data: str, folder: Path) -> list[dict]:
    overrides = ["cluster.threads=1", f"data.cache_dir={folder}/cache"]
    score(model, data, overrides, folder / "rewards.jsonl")
    return [json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()]


def test_a_reward_is_what_transformers_gives_the_whole_text(model: str, folder: Path):
    """Prompt once and rows end to end here; each text alone, with transformers' own class, there."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in ROWS))
    found = scored(model, str(rows), folder)
    assert [line["row"] for line in found] == [f"{rows}:{n}" for n in (1, 2, 3)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForSequenceClassification.from_pretrained(model).eval()
    for line, (prompt, completion) in zip(found, ROWS, strict=True):
        ids = tokenizer(prompt + completion + tokenizer.eos_token, return_tensors="pt").input_ids
        with torch.no_grad():
            reward = plain(input_ids=ids).logits.item()
        assert line["reward"] == pytest.approx(reward, abs=1e-5)


def test_pairs_give_two_rewards_and_how_often_the_chosen_one_wins(
    model: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    rows = folder / "pairs.jsonl"
    pair = {"prompt": "Ana has 3 pens.", "chosen": " 3", "rejected": " 5"}
    rows.write_text(json.dumps(pair) + "\n" + json.dumps(pair | {"chosen": " 5", "rejected": " 3"}) + "\n")
    one, other = scored(model, str(rows), folder)
    assert one["chosen"] == pytest.approx(other["rejected"], abs=1e-5)
    assert "50.0% of the pairs" in capsys.readouterr().out


def test_a_language_model_scores_nothing(folder: Path):
    language_model = trained(folder, "sft")
    with pytest.raises(LaunchError) as caught:
        scored(language_model, "builtin:arithmetic", folder)
    assert "no weights for score.weight" in caught.value.text()


def test_rows_without_an_answer_are_refused(model: str, folder: Path):
    (folder / "text.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError) as caught:
        scored(model, str(folder / "text.jsonl"), folder)
    assert "does not take" in caught.value.text()
