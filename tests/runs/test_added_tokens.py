"""`model.add_tokens`: rows that begin as the mean, are trained, saved and merged."""

from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from memtrain.memory.plan.plan import read_plan
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer, tokenizer_of
from memtrain.trainers.model.loading.added_tokens import grow_embeddings
from memtrain.trainers.tools.merge import merge_run

NEW = ("<calc>", "</calc>")
ADAPTER = "model.adapter={r: 4, modules_to_save: [embed_tokens, lm_head]}"


def made(folder: Path, *, tied: bool, reserve: int = 0) -> Path:
    """A tiny Llama in a folder, with the built-in tokenizer and rows in reserve."""
    tokenizer = load_tokenizer("builtin:tiny")
    config = LlamaConfig(
        vocab_size=len(tokenizer) + reserve,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("tied", "reserve"), [(True, 0), (False, 0), (False, 5)])
def test_new_rows_are_the_mean_and_nothing_is_drawn(tmp_path: Path, tied: bool, reserve: int):
    model = LlamaForCausalLM.from_pretrained(made(tmp_path, tied=tied, reserve=reserve))
    count = len(load_tokenizer("builtin:tiny"))
    before = [table.weight[:count].clone() for table in (model.get_input_embeddings(), model.lm_head)]
    state = torch.get_rng_state()
    grow_embeddings(model, count + 2, count)
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
    for table, old in zip((model.get_input_embeddings(), model.lm_head), before, strict=True):
        assert table.weight.shape[0] == count + max(2, reserve)
        assert torch.equal(table.weight[:count], old)
        expected = old.double().mean(0).float().expand(2, -1)
        torch.testing.assert_close(table.weight[count : count + 2], expected, rtol=0, atol=0)


def test_tokens_are_trained_saved_and_planned(runs, metrics, tmp_path: Path):
    path = made(tmp_path / "model", tied=True)
    (tmp_path / "new.txt").write_text("\n".join(NEW) + "\n")
    rows = "".join(f'{{"prompt": "{n} + 1 =", "completion": " <calc>{n + 1}</calc>"}}\n' for n in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    model = ("model.config=null", "model.tokenizer=null", f"model.path={path}")
    given = (*model, f"data.train={tmp_path}/rows.jsonl", "train.max_steps=2")
    full = runs.done("full", *given, f"model.add_tokens={tmp_path}/new.txt")
    tokenizer = AutoTokenizer.from_pretrained(full / "final")
    count = len(load_tokenizer("builtin:tiny"))
    assert tokenizer.convert_tokens_to_ids(list(NEW)) == [count, count + 1]
    model = AutoModelForCausalLM.from_pretrained(full / "final")
    table = model.get_input_embeddings().weight
    assert table.shape[0] == model.config.vocab_size == count + 2
    assert not torch.equal(table[count], table[count + 1]), "The two have learnt."
    plain = runs.done("plain", *given)
    weights = [
        next(one.num_bytes for one in read_plan(folder / "plan.json").prediction.phases[0].owners)
        for folder in (full, plain)
    ]
    assert weights[0] - weights[1] == 2 * 32 * 4

    adapter = runs.done("adapter", *given, f"model.add_tokens=[{', '.join(NEW)}]", ADAPTER)
    merged = merge_run(adapter, tmp_path / "merged").folder
    ids = AutoTokenizer.from_pretrained(merged)("<calc>4</calc>", return_tensors="pt")["input_ids"]
    whole = AutoModelForCausalLM.from_pretrained(merged)
    loaded = AutoPeftModelForCausalLM.from_pretrained(adapter / "final")
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.add_tokens=[a]", "'a' is a token already"),
        ("model.add_tokens=nowhere.txt", "cannot be read: No such file"),
        (
            "model={config: {model_type: llama}, tokenizer: builtin:tiny, add_tokens: [x], adapter: {r: 2}}",
            "frozen",
        ),
    ],
)
def test_tokens_that_cannot_be_added_are_reported(runs, override: str, words: str):
    ended = runs.run("run", override)
    assert ended.code in (2, 4), ended.err
    assert words in ended.err


def test_a_tokenizer_without_new_tokens_is_left_as_it_is():
    from memtrain.recipes.sections.model import Model

    assert len(tokenizer_of(Model(path="builtin:tiny"))) == len(load_tokenizer("builtin:tiny"))
