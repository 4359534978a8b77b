"""How runs end and are found again: a model that can be saved, a model that is there, foreign checkpoints."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memtrain.errors import LaunchError, ResumeError
from memtrain.trainers.loop import finish

SHORT = ("train.max_steps=4", "save.every_steps=2", "save.keep=9")


@pytest.fixture
def own_model(tmp_path: Path):
    """`own_model(**generation)`: a folder with a tiny model and such a generation_config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer

    def make(**generation: object) -> Path:
        tokenizer = load_tokenizer("builtin:tiny")
        config = AutoConfig.for_model(
            "llama",
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        folder = tmp_path / "model"
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return make


def of(model: Path) -> tuple[str, ...]:
    """Overrides that train this model."""
    return ("model.config=null", "model.tokenizer=null", f"model.path={model}", *SHORT)


def test_a_temperature_without_do_sample_is_saved_and_exported_with_it(runs, own_model, metrics):
    folder = runs.done("run", *of(own_model(temperature=0.6, top_p=0.9)))
    made = json.loads((folder / "final" / "generation_config.json").read_text())
    assert (made["temperature"], made["top_p"], made["do_sample"]) == (0.6, 0.9, True)
    notes = [note["text"] for note in metrics(folder, "note")]
    assert notes == ["generation_config.json has temperature and no do_sample; saved with do_sample: true"]
    from memtrain.trainers.tools.export import export_run

    exported = export_run(folder)
    made = json.loads((exported.folder / "generation_config.json").read_text())
    assert made["do_sample"] is True
    assert exported.why_whole == "", "Its weights were read one by one."
    found, expected = (load_file(one / "model.safetensors") for one in (exported.folder, folder / "final"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_value_that_transformers_refuses_goes_back_to_its_default_and_is_reported(runs, own_model, metrics):
    folder = runs.done("run", *of(own_model(early_stopping=True)))
    assert not json.loads((folder / "final" / "generation_config.json").read_text()).get("early_stopping")
    (note,) = [note["text"] for note in metrics(folder, "note")]
    assert note.startswith("generation_config.json has early_stopping: True, which transformers refuses")


@pytest.mark.parametrize("adapter", ["null", "{r: 4}"])
def test_what_refuses_at_the_end_refuses_before_the_first_step(runs, monkeypatch, metrics, adapter: str):
    from transformers import PreTrainedTokenizerBase

    def refuse(*given, **named):
        raise ValueError("the template cannot be written\nand more")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", refuse)
    ended = runs.run("run", f"model.adapter={adapter}", *SHORT)
    assert ended.code == LaunchError.exit_code, ended.err
    assert "the model could not be saved at the end of the run: the template cannot be written" in ended.err
    assert metrics(runs.folder / "run", "step") == []
    assert [path.name for path in (runs.folder / "run").glob(".final*")] == []


def test_whatever_fails_after_the_model_is_saved_it_is_there(runs, monkeypatch):
    """A sample that crashes, a store of peaks that cannot be written: the model was before them."""

    def refuse(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(finish, "sample", refuse)
    with pytest.raises(AssertionError):
        runs.done("run", *SHORT)
    assert (runs.folder / "run" / "final" / "model.safetensors").is_file()


def test_a_store_of_peaks_that_cannot_be_written_is_reported(runs, monkeypatch, metrics):
    def refuse(*given, **named):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(finish, "note_run", refuse)
    folder = runs.done("run", "memory.measure_peaks=true", *SHORT)
    notes = [note["text"] for note in metrics(folder, "note")]
    assert any(text.startswith("the measured peaks could not be stored for later plans") for text in notes), (
        notes
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


LOSSES = {
    "the folder is missing": shutil.rmtree,
    "model.safetensors has": lambda final: cut(final / "model.safetensors"),
    "tokenizer.json is missing": lambda final: (final / "tokenizer.json").unlink(),
    "config.json is not complete JSON": lambda final: cut(final / "config.json"),
}


@pytest.mark.parametrize("said", LOSSES)
def test_a_finished_run_whose_model_is_not_whole_writes_it_again(runs, said: str, curve_of):
    folder = runs.done("run", *SHORT)
    before = (folder / "final" / "model.safetensors").read_bytes()
    curve = curve_of(folder)
    LOSSES[said](folder / "final")
    again = runs.run("run", *SHORT)
    assert again.code == 0, again.err
    assert said in again.out.replace("\n", " ")
    assert "it is written again" in again.out.replace("\n", " ")
    assert (folder / "final" / "model.safetensors").read_bytes() == before
    assert curve_of(folder) == curve
    assert "is finished; nothing was done" in runs.run("run", *SHORT).out.replace("\n", " ")


def test_a_finished_model_may_be_edited_and_its_checkpoints_removed(runs):
    folder = runs.done("run", *SHORT)
    (folder / "final" / "README.md").write_text("mine")
    (folder / "final" / "generation_config.json").write_text('{"temperature": 0.5}')
    shutil.rmtree(folder / "checkpoints")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "final").iterdir())
    again = runs.run("run", *SHORT)
    assert "is finished; nothing was done" in again.out.replace("\n", " ")
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "final").iterdir()) == before
    other = runs.run("run", *SHORT, "optim.lr=1e-4")
    assert other.code == ResumeError.exit_code
    assert "optim.lr was 0.003 up to step 4 and is now 0.0001" in other.err


def rewritten(folder: Path, change) -> None:
    """Give every manifest of a run another text."""
    for manifest in folder.glob("checkpoints/step-*/manifest.json"):
        made = change(json.loads(manifest.read_text()))
        manifest.write_text(made if isinstance(made, str) else json.dumps(made))


FOREIGN = {
    "its format is 2; this version of memtrain reads 1": lambda said: said | {"format": 2},
    "does not know its manifest.json (layers)": lambda said: said | {"layers": 3},
    "its manifest.json is damaged": lambda said: '{"format": 1, "facts"',
}


@pytest.mark.parametrize("said", FOREIGN)
def test_checkpoints_that_are_not_understood_are_refused_and_stay(runs, said: str):
    folder = runs.done("run", *SHORT)
    (folder / "status.json").write_text("")
    rewritten(folder, FOREIGN[said])
    before = sorted(path for path in (folder / "checkpoints").rglob("*"))
    refused = runs.run("run", *SHORT)
    assert refused.code == ResumeError.exit_code, refused.err
    assert said in refused.err
    assert "--no-resume removes them and starts over" in refused.err
    assert sorted((folder / "checkpoints").rglob("*")) == before
    assert not (folder / ".lock").exists()


def test_checkpoints_whose_every_weight_is_damaged_are_refused_and_stay(runs):
    """Their manifests can be read: only the worker, which reads the files, can say it."""
    folder = runs.done("run", *SHORT)
    (folder / "status.json").write_text("")
    for weights in folder.glob("checkpoints/*/weights.safetensors"):
        cut(weights)
    refused = runs.run("run", *SHORT)
    assert refused.code == ResumeError.exit_code, refused.err
    assert refused.err.count("weights.safetensors has") == 2
    assert len(list(folder.glob("checkpoints/step-*"))) == 2
    assert runs.run("run", *SHORT, "--no-resume").code == 0


def test_an_older_checkpoint_of_another_version_is_kept_by_a_run_that_goes_on(runs):
    folder = runs.done("run", *SHORT)
    older = folder / "checkpoints" / "step-000001"
    shutil.copytree(folder / "checkpoints" / "step-000002", older)
    manifest = older / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 7}))
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    os.remove(folder / "status.json")
    runs.done("run", *SHORT, "save.keep=1")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000001", "step-000004"]


def test_words_of_how_an_earlier_start_ended_are_forgotten(runs):
    """Ranks that were killed leave theirs, and their signs of life."""
    for name in ("one", "two"):
        left = runs.folder / name / ".faults"
        left.mkdir(parents=True)
        (left / "rank-3.json").write_text("{}")
        (left / "pulse-3").write_text("17 starting")
    runs.done("one", *SHORT)
    ranks = runs.fork_ranks("two", 2, *SHORT)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    assert not list(runs.folder.glob("*/.faults/*"))


def test_ranks_started_by_hand_on_a_run_that_is_over_leave_nothing(runs):
    """A kill just after the last word leaves the lock, and perhaps a file beside its place."""
    ranks = runs.fork_ranks("run", 2, *SHORT)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    folder = runs.folder / "run"
    plan = (folder / "plan.json").read_bytes()
    (folder / ".lock").write_text("{")
    (folder / ".status.json.123456789.tmp").write_text("{")
    ranks = runs.fork_ranks("run", 2, *SHORT)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    assert (folder / "plan.json").read_bytes() == plan
    assert [path.name for path in folder.glob(".*")] == []


def test_a_loss_that_stays_high_ends_the_run_and_is_counted_on_after_a_resume(runs):
    """Killed steps are made again: the fifth high step in a row is the fifth, resumed or not."""
    words = (*SHORT, "train.max_steps=8", "train.loss_watchdog.patience=5")
    for resumed in (False, True):
        ended = runs.run("run", *words, "train.loss_watchdog.threshold=0.5")
        assert ended.code == 8
        assert "above 0.5 for 5 steps in a row" in ended.err
        assert "at step 5 (train.loss_watchdog)" in ended.err
        assert ("resumed at step 4" in ended.out + ended.err) == resumed
    runs.done("run", *words, "train.loss_watchdog.threshold=100.0")
