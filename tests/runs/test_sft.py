"""`memtrain sft` from a recipe to a trained model, and what it leaves behind."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from sampled import sampled
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from memtrain.trainers.checkpoints.state_io import load_state

SMOKE = sorted(path.stem for path in Path(__file__).parents[2].glob("configs/smoke/sft*.yaml"))
CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def jsonl(path: Path, num_rows: int, begin: int = 0) -> list[dict[str, str]]:
    """Rows of a prompt and an answer of growing length, written to `path`."""
    rows = [
        {"prompt": f"Count to {n}:", "completion": " " + " ".join(str(i) for i in range(1, n + 1))}
        for n in range(begin + 1, begin + num_rows + 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def held_out_loss(model: torch.nn.Module, tokenizer, rows: list[dict[str, str]]) -> float:
    """Mean loss of the answers' tokens, row by row, through the model's own logits."""
    total, count = 0.0, 0
    for row in rows:
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        whole = tokenizer(row["prompt"] + row["completion"], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*whole, tokenizer.eos_token_id]])
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        picked = logp.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        total, count = total - picked.sum().item(), count + len(picked)
    return total / count


@pytest.mark.parametrize("name", sampled(SMOKE, 3))
def test_a_smoke_recipe_trains(runs, metrics, name: str):
    folder = runs.done("run", "cluster.threads=1", recipe=f"smoke/{name}")
    steps = metrics(folder, "step")
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert metrics(folder, "eval")
    assert {event["phase"] for event in metrics(folder, "memory")} >= {"load", "first step", "steady step"}


def test_a_run_folder_has_everything(runs):
    folder = runs.done("run", "memory.measure_peaks=true")
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "final",
        "final.json",
        "launch.sh",
        "log.txt",
        "metrics.jsonl",
        "plan.json",
        "recipe.yaml",
        "report.html",
        "status.json",
    }
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    assert re.search(r'<p class="state">sft · [^<]* · done · 20', (folder / "report.html").read_text())
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000006"]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (folder / "final").iterdir()
    }
    again = runs.run("again", recipe=str(folder / "recipe.yaml"))
    assert again.code == 0, again.err


def test_transformers_loads_the_model_and_finds_the_loss_that_was_reported(runs, metrics, tmp_path: Path):
    """An independent slow form: the held-out rows one by one, unpadded, through the model's own logits."""
    jsonl(tmp_path / "train.jsonl", 24)
    rows = jsonl(tmp_path / "eval.jsonl", 6, begin=5)
    folder = runs.done(
        "run",
        f"data.train={tmp_path / 'train.jsonl'}",
        f"data.eval={tmp_path / 'eval.jsonl'}",
        "data.eval_fraction=0",
        "optim.lr=1e-2",
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    reported = metrics(folder, "eval")[-1]
    assert reported["loss"] == pytest.approx(held_out_loss(model, tokenizer, rows), abs=2e-6)
    saved = load_state(folder / "checkpoints" / "step-000006" / "weights")
    linked = folder / "checkpoints" / "step-000006" / "weights.safetensors"
    assert linked.samefile(folder / "final" / "model.safetensors")
    loaded = model.state_dict()
    assert all(torch.equal(saved[name], loaded[name.removeprefix("model.")]) for name in saved)


def test_an_adapter_is_saved_as_one_and_peft_loads_it(runs, metrics, tmp_path: Path):
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(tmp_path / "base")
    jsonl(tmp_path / "train.jsonl", 24)
    rows = jsonl(tmp_path / "eval.jsonl", 6, begin=5)
    folder = runs.done(
        "run",
        "model.config=null",
        f"model.path={tmp_path / 'base'}",
        "model.adapter.r=4",
        f"data.train={tmp_path / 'train.jsonl'}",
        f"data.eval={tmp_path / 'eval.jsonl'}",
        "data.eval_fraction=0",
        "optim.lr=1e-2",
    )
    assert not (folder / "final" / "model.safetensors").exists()
    saved = load_file(folder / "final" / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    assert any(weight.abs().sum() > 0 for name, weight in saved.items() if "lora_B" in name)
    model = AutoPeftModelForCausalLM.from_pretrained(folder / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    reported = metrics(folder, "eval")[-1]
    assert reported["loss"] == pytest.approx(held_out_loss(model, tokenizer, rows), abs=2e-6)


def test_a_dry_run_starts_nothing_and_its_script_does(runs, curve_of):
    ended = runs.run("dry", "--dry-run", "train.max_steps=2")
    folder = runs.folder / "dry"
    assert ended.code == 0
    assert "Nothing was started" in ended.out
    assert {path.name for path in folder.iterdir()} == {
        "launch.sh",
        "plan.json",
        "recipe.yaml",
    }
    script = subprocess.run([folder / "launch.sh"], capture_output=True, text=True, cwd="/", check=False)
    assert script.returncode == 0, script.stderr
    assert "accelerator" not in script.stdout + script.stderr, "DeepSpeed tells what it guesses"
    assert curve_of(folder) == curve_of(runs.done("plain", "train.max_steps=2"))


def test_a_run_that_is_over_is_not_made_again_unless_asked(runs):
    folder = runs.done("run")
    before = (folder / "metrics.jsonl").read_text()
    again = runs.run("run")
    assert again.code == 0
    assert "is finished; nothing was done" in " ".join(again.out.split())
    assert (folder / "metrics.jsonl").read_text() == before
    anew = runs.run("run", "--no-resume", "train.max_steps=3")
    assert anew.code == 0, anew.err
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000003"]
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open() if '"step"' in line][
        -1
    ] == 3


def test_the_best_weights_are_the_final_ones(runs, metrics):
    """A rate so high that the last weights are not the best ones."""
    folder = runs.done(
        "run",
        "save.keep_best=true",
        "save.keep=1",
        "save.every_steps=1",
        "eval.every_steps=1",
        "optim.lr=2.0",
        "optim.schedule=constant",
        "train.max_steps=5",
    )
    losses = {event["step"]: event["loss"] for event in metrics(folder, "eval")}
    best = min(losses, key=lambda step: losses[step])
    assert best != 5, "this test needs a run that gets worse"
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {f"step-{best:06d}", "step-000005"}
    assert metrics(folder, "final")[-1]["best_step"] == best
    saved = load_state(folder / "checkpoints" / f"step-{best:06d}" / "weights")
    final = load_file(folder / "final" / "model.safetensors")
    assert all(torch.equal(saved[f"model.{name}"], weight) for name, weight in final.items())


def test_the_best_weights_are_kept_though_no_checkpoint_is_due(runs, metrics):
    folder = runs.done(
        "run",
        "save.keep_best=true",
        "save.keep=1",
        "save.every_steps=100",
        "eval.every_steps=1",
        "eval.at_start=true",
        "optim.lr=2.0",
        "optim.schedule=constant",
        "train.max_steps=5",
    )
    losses = {event["step"]: event["loss"] for event in metrics(folder, "eval") if event["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert best != 5, "this test needs a run that gets worse"
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {f"step-{best:06d}", "step-000005"}
    assert metrics(folder, "final")[-1]["best_step"] == best


def test_a_family_that_transformers_does_not_know_is_reported_with_those_near(runs):
    ended = runs.run("run", "model.config={model_type: lama}")
    assert ended.code == 5
    assert ended.err.startswith("error: model.config: transformers has no model_type lama; near it are llama")


def test_evaluation_happens_when_asked(runs, metrics):
    folder = runs.done("run", "eval.every_steps=4", "eval.at_start=true", "eval.max_rows=3")
    assert [event["step"] for event in metrics(folder, "eval")] == [0, 4, 6]


def test_an_epoch_of_grouped_rows_has_every_row_once(runs, metrics):
    plain = ("length.padding_free=false", "train.max_steps=null", "train.epochs=1")
    folder = runs.done("grouped", "length.group_by_length=true", *plain)
    other = runs.done("plain", *plain)
    data = metrics(folder, "data")[0]
    steps = metrics(folder, "step")
    assert (
        sum(step["loss_tokens"] for step in steps)
        == data["loss_tokens"] - data["loss_tokens_cut"] - data["loss_tokens_dropped"]
    )
    assert sum(step["sequences"] for step in steps) == data["sequences"]
    assert [step["tokens"] for step in steps] != [step["tokens"] for step in metrics(other, "step")]


def test_a_loss_that_is_no_number_ends_the_run_in_words(runs):
    ended = runs.run("run", "optim.lr=1e38", "optim.max_grad_norm=null", "save.every_steps=1")
    assert ended.code == 8
    assert ended.err.startswith("error: the loss is nan, the gradient norm nan at step 2\n")
    assert "Traceback" not in ended.err
    status = json.loads((runs.folder / "run" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", 1)
    assert "failed: the loss is nan" in (runs.folder / "run" / "report.html").read_text()
    assert [path.name for path in (runs.folder / "run" / "checkpoints").iterdir()] == ["step-000001"]


def test_a_changed_recipe_is_refused_with_its_keys_and_nothing_is_touched(runs):
    folder = runs.done("run")
    names = ("recipe.yaml", "plan.json", "metrics.jsonl", "status.json", "launch.sh")
    before = [(folder / name).read_text() for name in names]
    ended = runs.run("run", "optim.lr=1e-3", "length.max_length=64", "train.seed=1")
    assert ended.code == 6
    assert "optim.lr was 0.003 up to step 6 and is now 0.001" in ended.err
    assert "length.max_length was 128 up to step 6 and is now 64" in ended.err
    assert "train.seed was 0 up to step 6 and is now 1" in ended.err
    assert [(folder / name).read_text() for name in names] == before


@pytest.mark.parametrize("error", [AttributeError("no cache"), torch.OutOfMemoryError("no room")])
def test_a_sample_that_cannot_be_written_costs_no_model(runs, metrics, monkeypatch, error: Exception):
    """transformers 5.23 cannot generate with recurrent_gemma, for one."""

    def generate(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    folder = runs.done("run", "train.max_steps=1")
    said = f"(no sample: LlamaForCausalLM.generate fails: {error})"
    assert [line["sample"] for line in metrics(folder, "final")] == [said]
    assert AutoModelForCausalLM.from_pretrained(folder / "final") is not None


def test_a_run_without_a_sample_writes_nothing_and_ends_the_same(runs, metrics, monkeypatch):
    def generate(*args: object, **kwargs: object) -> None:
        raise AssertionError("A sample was written.")

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    folder = runs.done("run", "train.max_steps=1", "log.final_sample=false")
    assert [(line["state"], line["sample"]) for line in metrics(folder, "final")] == [("done", "")]
    assert (folder / "final" / "model.safetensors").is_file()


def test_a_plan_that_the_disk_refuses_is_one_error(runs):
    (runs.folder / "run" / "recipe.yaml").mkdir(parents=True)
    ended = runs.run("run")
    assert ended.code == 5
    assert "recipe.yaml is a folder" in ended.err
    assert "Traceback" not in ended.err
