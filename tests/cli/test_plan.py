"""`memtrain plan` as a user runs it."""

import json

import pytest

from memtrain.cli.app import run
from memtrain.errors import DoesNotFit, RecipeError

LLAMA = """
method: sft
model:
  config: {model_type: llama, vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336,
           num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 8}
  tokenizer: builtin:tiny
data:
  train: {source: builtin:arithmetic, limit: 60}
length: {max_length: 512}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "llama.yaml"
    file.write_text(LLAMA)
    return str(file)


def test_a_plan_for_a_card_that_is_not_here_says_what_fits_and_stays_within_80_columns(recipe, capsys):
    run(["plan", recipe, "--gpu", "h100"])
    out = capsys.readouterr().out
    assert "on H100, 79.65 GiB: fits, " in " ".join(out.split())
    assert "stay free of 79.65 GiB" in " ".join(out.split())
    assert "optimizer" in out
    assert "29.92" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_a_plan_as_json_is_all_that_is_printed(recipe, capsys):
    run(["plan", recipe, "--gpu", "h200", "--num-gpus", "2", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["device"]["count"] == 2
    assert told["fits"]
    assert told["settings"]["num_processes"] == 2
    assert told["needed_bytes"] < told["with_margin_bytes"] <= told["budget_bytes"]


def test_a_budget_limits_the_plan_and_what_does_not_fit_is_refused_with_ways_out(recipe):
    with pytest.raises(DoesNotFit, match=r"24\.00 GiB[\s\S]*lora"):
        run(["plan", recipe, "--gpu", "h100", "--budget", "24GiB"])


@pytest.mark.parametrize("words", [["--gpu", "h9000"], ["--budget", "much"]])
def test_a_card_or_size_that_is_none_is_refused(recipe, words):
    with pytest.raises(RecipeError):
        run(["plan", recipe, *words])


@pytest.mark.slow
def test_a_plan_is_checked_by_a_trace_of_the_runs_own_step(recipe, capsys):
    run(["plan", "smoke/sft", "--trace"])
    out = " ".join(capsys.readouterr().out.split())
    assert "Checked on the run's own step: traced" in out
