"""`memtrain score`: the rewards of a trained reward model, row by row."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from memtrain.cli.commands.score import score
from memtrain.cli.commands.train import run_recipe
from memtrain.errors import DataError, LaunchError
from memtrain.memory.plan.plan import PLAN_FILE, read_plan
from memtrain.recipes.sections.model import Model
from memtrain.recipes.sections.rewards import RewardModel
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of
from memtrain.trainers.loop import final_scores
from memtrain.trainers.model.loading import save
from memtrain.trainers.online.rewards.answer import Answer, RowPrompt
from memtrain.trainers.online.rewards.models import load_reward_model
from memtrain.trainers.online.rewards.reading import read_reading
from memtrain.trainers.tools import score as tools
from memtrain.trainers.tools.merge import merge_run

RECIPE = """
method: {method}
model:
  config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}}
  tokenizer: builtin:tiny
data: {{train: {{source: builtin:arithmetic, limit: 16}}, cache_dir: {folder}/cache}}
length: {{max_length: 160}}
optim: {{lr: 1e-2}}
train: {{batch_size: 8, max_steps: 2}}
cluster: {{device: cpu, threads: 1}}
"""
ROWS = [("Ana has 3 pens. How many?", " 3"), ("Ben has 12 eggs and sells 2.", " 12 - 2 = 10"), ("Hm", " no")]


LORA = ("model.adapter={r: 4}", "optim.lr=5e-2")


def trained(folder: Path, method: str, *overrides: str, name: str = "") -> str:
    recipe = folder / f"{method}.yaml"
    recipe.write_text(RECIPE.format(method=method, folder=folder))
    run_recipe(method, str(recipe), list(overrides), run_dir=str(folder / (name or method)))
    return str(folder / (name or method) / "final")


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


@pytest.mark.parametrize("has_adapter", [False, True], ids=["full", "adapter"])
def test_layers_that_are_read_when_they_are_called_give_the_same_rewards(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_adapter: bool
):
    """To the bit; between two calls a layer has no data."""
    rows = folder / "few.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in ROWS))
    base = trained(folder, "reward", name="base")
    adapted = ("model.config=null", f"model.path={base}", *LORA)
    model = trained(folder, "reward", *adapted, name="adapted") if has_adapter else base
    made: list[Any] = []
    plain = tools.read_layers_when_called
    monkeypatch.setattr(
        tools, "read_layers_when_called", lambda *given: (made.append(given[0]), plain(*given))
    )
    words = ["cluster.threads=1", f"data.cache_dir={folder}/cache"]
    for name in ("off", "on"):
        score(model, str(rows), [*words, f"memory.weights_offload={name}"], folder / f"{name}.jsonl")
    assert (folder / "on.jsonl").read_text() == (folder / "off.jsonl").read_text()
    (scorer,) = made
    layers = [weight.is_meta for name, weight in scorer.named_parameters() if "layers." in name]
    others = [weight.is_meta for name, weight in scorer.named_parameters() if "layers." not in name]
    assert sum(layers) >= 2 * 9
    assert not any(others)


def padding_with_end(folder: Path, *, keeps_spare: bool) -> str:
    """A tokenizer that pads with its end-of-sequence token, as those of many Llama and Qwen bases do.

    `keeps_spare`: with the token `<pad>` still in its vocabulary, or under another name.
    """
    where = folder / f"pads-with-end-{keeps_spare}"
    tokenizer = tokenizer_of(Model(path="builtin:tiny"))
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(where)
    if not keeps_spare:
        for file in where.glob("*.json"):
            file.write_text(file.read_text().replace("<pad>", "<nil>"))
    return str(where)


@pytest.mark.parametrize(
    ("keeps_spare", "more_rows", "pad"),
    [(True, 0, "<pad>"), (False, 8, "<|pad|>"), (False, 0, None)],
    ids=["a token to spare", "a row to spare", "nothing to spare"],
)
def test_scores_of_final_are_the_same_where_the_tokenizer_pads_with_its_end_token(
    folder: Path, keeps_spare: bool, more_rows: int, pad: str | None, capsys: pytest.CaptureFixture[str]
):
    """transformers takes trailing padding tokens off before it reads the score: the learned place too."""
    where = padding_with_end(folder, keeps_spare=keeps_spare)
    rows = len(tokenizer_of(Model(path=where))) + more_rows
    words = [f"model.tokenizer={where}", f"model.config.vocab_size={rows}"]
    final = trained(folder, "reward", *words, name=f"pads-{pad}")
    said = capsys.readouterr()
    assert "computes other scores with final/" not in said.out + said.err
    tokenizer = AutoTokenizer.from_pretrained(final)
    plain = AutoModelForSequenceClassification.from_pretrained(final).eval()
    assert tokenizer.pad_token == pad
    assert tokenizer.pad_token_id == plain.config.pad_token_id != tokenizer.eos_token_id
    texts = [prompt + completion + tokenizer.eos_token for prompt, completion in ROWS]
    with torch.no_grad():
        alone = [plain(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
    assert rewards(final, folder) == pytest.approx(alone, abs=1e-5)
    if pad is None:
        assert "score one row at a time" in said.out + said.err
        return
    with torch.no_grad():
        batch = plain(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0].tolist()
    assert batch == pytest.approx(alone, abs=1e-5)


def test_scores_that_are_read_elsewhere_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """As if the padding token were left as it was."""
    for module in (save, final_scores):
        monkeypatch.setattr(module, "with_scoring_pad", lambda tokenizer, rows: tokenizer)
    where = padding_with_end(folder, keeps_spare=True)
    trained(folder, "reward", f"model.tokenizer={where}", name="elsewhere")
    said = capsys.readouterr()
    assert "plain transformers computes other scores with final/ than training did" in said.out + said.err


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


@pytest.fixture(scope="module")
def adapter(folder: Path) -> str:
    return trained(folder, "reward", *LORA, name="lora")


def pairs(folder: Path) -> str:
    rows = [{"prompt": p, "completion": c} for p, c in ROWS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def rewards(model: str, folder: Path) -> list[float]:
    return [line["reward"] for line in scored(model, pairs(folder), folder)]


def test_an_adapter_scores_as_the_merged_model_does(adapter: str, folder: Path):
    """Adapter and run folder alike; transformers' own class reads the merged one."""
    found = rewards(adapter, folder)
    merged = merge_run(folder / "lora", folder / "merged").folder
    tokenizer = AutoTokenizer.from_pretrained(merged)
    plain = AutoModelForSequenceClassification.from_pretrained(merged).eval()
    texts = [prompt + completion + tokenizer.eos_token for prompt, completion in ROWS]
    with torch.no_grad():
        wanted = [plain(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
    assert found == pytest.approx(wanted, abs=1e-5)
    assert rewards(str(folder / "lora"), folder) == found
    assert rewards(str(merged), folder) == pytest.approx(wanted, abs=1e-5)
    loss_tokens = load_file(f"{adapter}/adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(plain.score.weight, loss_tokens)


def test_a_run_folder_of_a_full_model_scores_as_its_model(model: str, folder: Path):
    assert rewards(str(Path(model).parent), folder) == rewards(model, folder)


def test_an_adapter_away_from_its_run_asks_for_its_base(adapter: str, folder: Path):
    alone = shutil.copytree(adapter, folder / "alone")
    with pytest.raises(LaunchError) as caught:
        scored(str(alone), pairs(folder), folder)
    assert "does not name the model" in caught.value.text()
    other = trained(folder, "reward", "model.config.hidden_size=64", name="wide")
    with pytest.raises(LaunchError) as caught:
        score(str(alone), pairs(folder), [f"model.path={other}"], folder / "rewards.jsonl")
    assert "does not fit the model" in caught.value.text()


def test_an_adapter_of_a_language_model_scores_nothing(folder: Path):
    with pytest.raises(LaunchError) as caught:
        scored(trained(folder, "sft", *LORA, name="sft-lora"), pairs(folder), folder)
    assert "no weights for score.weight" in caught.value.text()


def test_a_run_without_a_model_is_reported(folder: Path):
    (folder / "begun").mkdir()
    (folder / "begun" / "plan.json").write_text("{}")
    with pytest.raises(LaunchError) as caught:
        scored(str(folder / "begun"), pairs(folder), folder)
    assert "has no trained model yet" in caught.value.text()


def test_rows_without_an_answer_are_refused(model: str, folder: Path):
    (folder / "text.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError) as caught:
        scored(model, str(folder / "text.jsonl"), folder)
    assert "does not accept" in caught.value.text()


def test_a_judge_reads_conversations_at_the_place_that_was_learned(folder: Path):
    """The reward of a completion, online, is the score of the conversation with it: one place, one template.

    The policy's tokens of the same conversation stand in its Answer, and are not what is read.
    """
    asked = [{"role": "user", "content": "Ana has 3 pens and buys 2. How many?"}]
    said = ["5", "3 + 2 = 5 pens."]
    rows = folder / "conversations.jsonl"
    row = {"prompt": asked, "chosen": _said(said[0]), "rejected": _said(said[1])}
    rows.write_text("\n".join([json.dumps(row)] * 8) + "\n")
    words = [f"data.train=[{{source: {rows}}}]", "train.max_steps=1"]
    final = trained(folder, "reward", *words, name="conversations")
    assert read_reading(Path(final)).rows == "conversations"
    (scores,) = scored(final, str(rows), folder)[:1]
    plan = read_plan(Path(final).parent / PLAN_FILE)
    judge = load_reward_model(RewardModel(path=final), plan.settings, model_type="qwen3")
    answers = [Answer("", words, (5, 6), {}, (7,), asked=RowPrompt(tuple(asked))) for words in said]
    assert judge.scores(answers) == pytest.approx([scores["chosen"], scores["rejected"]], abs=1e-5)


def _said(words: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": words}]
