"""Plans of models whose layers are not attention and an MLP alone: by what was seen, or without a verdict."""

import json

import pytest

from memtrain.cli.app import run
from memtrain.cli.plan import model_shape
from memtrain.errors import LaunchError
from memtrain.memory.model_shape.layer_record import LayerRecord, ModelRecord, Moment, Peak

HYBRID = """
method: sft
model:
  config: {model_type: qwen3_5_text, vocab_size: 1024, hidden_size: 64, intermediate_size: 128,
           num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16,
           linear_num_value_heads: 4, linear_num_key_heads: 2, linear_key_head_dim: 16,
           linear_value_head_dim: 16}
  tokenizer: builtin:tiny
data:
  train: {source: builtin:arithmetic, limit: 60}
length: {max_length: 512}
"""


@pytest.fixture
def hybrid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "hybrid.yaml").write_text(HYBRID)
    model_shape._measured.cache_clear()
    yield "hybrid.yaml"
    model_shape._measured.cache_clear()


def test_layers_that_no_formula_knows_are_counted_as_they_were_seen(hybrid, capsys, monkeypatch):
    """Three delta rules keep 1,000 bytes of a token, an attention 100: by formula all four kept the same."""
    each, nothing = Moment(start=0, each=100), Moment(start=0, each=0)
    parts = ("backward", "forward", "recomputed")
    attention = LayerRecord(kept=each, **{part: Peak(moments=(each,)) for part in parts})
    delta = attention.model_copy(update={"kept": Moment(start=0, each=1000)})
    record = ModelRecord(
        kinds=(delta, attention),
        order=(0, 0, 0, 1),
        piece=64,
        tables=Moment(start=0, each=64),
        embedded=nothing,
        final_norm=Moment(start=0, each=388),
        final_backward=Peak(moments=(nothing,)),
    )
    asked = []
    monkeypatch.setattr(model_shape, "layer_record", lambda job: asked.append(job) or record)
    plain = ["plan", hybrid, "--gpu", "h100", "--without-data", "model.liger=off"]
    run([*plain, "--json", "train.micro_batch_size=1"])
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is True
    assert "those of transformers' own code, measured in passes without data" in " ".join(told["notes"])
    owners = {one["owner"]: one["num_bytes"] for one in told["prediction"]["phases"][2]["owners"]}
    assert owners["activations"] == 512 * (3100 + 64 + 388)
    run([*plain, "--solve", "max_length"])
    assert len(asked) == 1


def test_no_plan_fits_by_numbers_that_are_known_to_be_low(hybrid, capsys, monkeypatch):
    """The formulas of a Llama told 38 to 89 % too little of such layers, and the plan said that it fits."""

    def fails(job):
        raise LaunchError("the step could not be traced: it broke", "--trace", "leave it out")

    monkeypatch.setattr(model_shape, "layer_record", fails)
    run(["plan", hybrid, "--gpu", "h100", "--without-data"])
    words = " ".join(capsys.readouterr().out.split())
    assert "needs more than 1." in words
    assert "and whether it fits is not known." in words
    assert "are not known: the step could not be traced: it broke." in words
    assert ": fits" not in words
    run(["plan", hybrid, "--gpu", "h100", "--without-data", "--json"])
    assert json.loads(capsys.readouterr().out)["fits"] is None


def test_lengths_whose_need_is_known_from_below_alone_are_not_said_to_fit_or_not(
    hybrid, capsys, monkeypatch, tmp_path
):
    """They were told as lengths that do not fit."""

    def fails(job):
        raise LaunchError("the step could not be traced: it broke", "--trace", "leave it out")

    monkeypatch.setattr(model_shape, "layer_record", fails)
    run(["inspect-lengths", hybrid, "--html", str(tmp_path / "page.html")])
    words = " ".join(capsys.readouterr().out.split())
    assert "whether it fits is not known: it needs more than" in words
    assert "does not fit" not in words
    assert "not known</td>" in (tmp_path / "page.html").read_text()
    run(["inspect-lengths", hybrid, "--json"])
    found = json.loads(capsys.readouterr().out)["candidates"]
    assert found
    assert all(one["cost"]["fits"] is None for one in found)


def test_layers_whose_passes_are_not_their_steps_are_not_passed(hybrid, tmp_path, capsys, monkeypatch):
    """Two xLSTM layers were told as 17 MiB, and their trace needs 58: the plan said that they fit."""
    monkeypatch.setattr(model_shape, "layer_record", lambda job: pytest.fail("they were passed"))
    start = HYBRID.index("config:")
    config = "config: {model_type: xlstm, vocab_size: 1024, hidden_size: 64, num_heads: 4, num_blocks: 2}"
    (tmp_path / "xlstm.yaml").write_text(f"{HYBRID[:start]}{config}\n  {HYBRID[HYBRID.index('tokenizer') :]}")
    run(["plan", "xlstm.yaml", "--gpu", "h100", "--without-data", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is None
    assert "(xlstm) are not known: a step keeps several times" in " ".join(told["notes"])
