"""Commands of other programs for a trained model, by what its folder says."""

import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from memtrain.__main__ import main
from memtrain.errors import LaunchError
from memtrain.memory.plan.plan import read_plan
from memtrain.recipes.sections.model import Model, RopeScaling
from memtrain.trainers.tools import trained_model as module
from memtrain.trainers.tools.trained_model import (
    convert_words,
    modelfile,
    ollama_name,
    serve_words,
    text_model,
    trained_model,
)

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LORA = {"base_model_name_or_path": "me/base", "r": 20, "task_type": "CAUSAL_LM", "use_dora": False}


def run_of(folder: Path, config: dict[str, object], file: str = "config.json") -> Path:
    run = folder / "my run"
    (run / "final").mkdir(parents=True)
    (run / "final" / file).write_text(json.dumps(config))
    (run / "final" / "chat_template.jinja").write_text("<|im_start|>{{ role }}")
    return run


def test_a_full_model_is_served_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = run_of(tmp_path, LLAMA)
    assert main(["serve", str(run), "--port", "9000"]) == 0
    line = capsys.readouterr().out.strip()
    expected = ["vllm", "serve", str(run / "final"), "--served-model-name", "my run", "--port", "9000"]
    assert shlex.split(line) == expected


def test_an_adapter_is_served_beside_its_base_with_a_rank_that_vllm_takes(tmp_path: Path):
    run = run_of(tmp_path, LORA, "adapter_config.json")
    words = serve_words(text_model(run))
    assert words[:6] == ["vllm", "serve", "me/base", "--enable-lora", "--max-lora-rank", "32"]
    assert f"my run={run / 'final'}" in words


def test_an_adapter_is_served_at_the_revision_of_its_base_with_its_own_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """vLLM took the newest commit of the base, and its chat template in place of the run's."""
    monkeypatch.setattr(module, "recipe_of", lambda _: Model(path="me/base", revision="v2"))
    run = run_of(tmp_path, LORA, "adapter_config.json")
    (run / "final" / "tokenizer_config.json").write_text("{}")
    line = shlex.join(serve_words(text_model(run)))
    assert line.endswith(f"--revision v2 --tokenizer '{run / 'final'}'")
    base = tmp_path / "base"
    base.mkdir()
    run = run_of(tmp_path / "other", LORA | {"base_model_name_or_path": str(base)}, "adapter_config.json")
    assert "--revision" not in serve_words(text_model(run))


def test_an_adapter_on_scaled_positions_is_served_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The base's own configuration does not say how they were scaled."""
    scaling = RopeScaling(rope_type="linear", factor=2)
    monkeypatch.setattr(module, "recipe_of", lambda _: Model(path="me/base", rope_scaling=scaling))
    run = run_of(tmp_path, LORA, "adapter_config.json")
    with pytest.raises(LaunchError, match=r"no adapter of a base with scaled positions"):
        serve_words(text_model(run))


def test_a_model_that_was_merged_before_the_run_went_on_is_not_taken(tmp_path: Path):
    run = run_of(tmp_path, LORA | {"use_dora": True}, "adapter_config.json")
    (run / "merged").mkdir()
    (run / "merged" / "config.json").write_text("{}")
    assert serve_words(text_model(run))[2] == str(run / "merged")
    os.utime(run / "merged" / "config.json", (1, 1))
    with pytest.raises(LaunchError, match="is older than the adapter") as caught:
        serve_words(text_model(run))
    assert caught.value.faults[0].fix.startswith("remove it; memtrain merge ")


@pytest.mark.parametrize("change", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"r": 1000}])
def test_an_adapter_that_vllm_cannot_load_is_served_merged(tmp_path: Path, change: dict[str, object]):
    run = run_of(tmp_path, LORA | change, "adapter_config.json")
    with pytest.raises(LaunchError, match="needs the full model") as caught:
        serve_words(text_model(run))
    assert caught.value.faults[0].fix.startswith("memtrain merge ")
    (run / "merged").mkdir()
    (run / "merged" / "config.json").write_text("{}")
    assert serve_words(text_model(run))[2] == str(run / "merged")


def test_a_run_without_a_model_and_a_reward_model_are_refused(tmp_path: Path):
    with pytest.raises(LaunchError, match="has no finished model"):
        trained_model(tmp_path)
    run = run_of(tmp_path, {"architectures": ["LlamaForSequenceClassification"]})
    with pytest.raises(LaunchError, match="is a reward model"):
        text_model(run)


def test_gguf_prints_the_exact_commands_where_the_converter_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run = run_of(tmp_path, LLAMA)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["gguf", str(run), "--type", "q8_0", "--system", "Be brief."]) == 0
    reported = capsys.readouterr().out
    line = next(one for one in reported.splitlines() if "--outtype" in one)
    words = ["python", "llama.cpp/convert_hf_to_gguf.py", str(run / "final"), "--outfile"]
    assert shlex.split(line) == [*words, str(run / "my run.gguf"), "--outtype", "q8_0"]
    text = (run / "Modelfile").read_text()
    assert text.startswith("FROM ./my run.gguf\nTEMPLATE ")
    assert 'PARAMETER stop "<|im_end|>"' in text
    assert text.endswith('SYSTEM """Be brief."""\n')
    assert main(["gguf", str(run), "--type", "q3"]) == 5


def test_gguf_runs_the_converter_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_of(tmp_path, LLAMA)
    ran: list[list[str]] = []

    def fake(words: list[str], check: bool) -> SimpleNamespace:
        ran.append(words)
        return SimpleNamespace(returncode=len(ran) - 1)

    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr("subprocess.run", fake)
    out = tmp_path / "out.gguf"
    assert main(["gguf", str(run), "-o", str(out)]) == 0
    assert ran[0] == [
        *("/bin/convert_hf_to_gguf.py", str(run / "final")),
        *("--outfile", str(out), "--outtype", "f16"),
    ]
    assert main(["gguf", str(run), "-o", str(out)]) == 5


@pytest.mark.parametrize("name", ["convert_hf_to_gguf.py", "llama-convert-hf-to-gguf", "convert-hf-to-gguf"])
def test_the_converter_is_found_by_the_names_of_its_packages(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda asked: f"/bin/{asked}" if asked == name else None)
    words, is_here = convert_words(Path("final"), Path("out.gguf"), "f16")
    assert is_here
    assert words[0] == f"/bin/{name}"


def test_the_lines_for_ollama_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The name of a run may have spaces and capitals, which Ollama's models have not."""
    run = run_of(tmp_path, LLAMA)
    assert main(["gguf", str(run)]) == 0
    lines = [shlex.split(one) for one in capsys.readouterr().out.splitlines() if one.startswith("  ollama ")]
    assert lines == [
        ["ollama", "create", "my-run", "-f", str(run / "Modelfile")],
        ["ollama", "run", "my-run"],
    ]
    assert ollama_name("Qwen3 8B / sft") == "qwen3-8b-sft"
    assert ollama_name("é") == "model"


def test_an_adapter_of_a_base_that_is_not_on_the_hub_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    here = run_of(tmp_path, LORA | {"base_model_name_or_path": str(tmp_path)}, "adapter_config.json")
    assert main(["push", str(here), "me/model", "--dry-run"]) == 0
    assert "Nobody else can load this adapter" in capsys.readouterr().out
    there = run_of(tmp_path / "other", LORA, "adapter_config.json")
    assert main(["push", str(there), "me/model", "--dry-run"]) == 0
    assert "Nobody else" not in capsys.readouterr().out


def test_an_end_of_turns_that_the_base_does_not_know_is_told_to_vllm(tmp_path: Path):
    """A base model stops at its end of text; the adapter has learned `<|im_end|>`."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"eos_token_id": 2}')
    run = run_of(tmp_path, LORA | {"base_model_name_or_path": str(base)}, "adapter_config.json")
    assert "--generation-config" not in serve_words(text_model(run))
    (run / "final" / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert serve_words(text_model(run))[-2:] == ["--generation-config", str(run / "final")]
    (base / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert "--generation-config" not in serve_words(text_model(run))


def test_a_template_that_is_not_chatml_is_left_to_the_gguf_file(tmp_path: Path):
    assert modelfile(tmp_path, tmp_path / "a.gguf", None) == "FROM ./a.gguf\n"


def test_push_is_dry_without_a_network_and_uploads_the_folder_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run = run_of(tmp_path, LLAMA)
    calls: list[tuple[str, dict[str, object]]] = []

    class Api:
        def create_repo(self, name: str, **given: object) -> str:
            calls.append((name, given))
            return f"https://huggingface.co/{name}"

        def upload_folder(self, **given: object) -> None:
            if given["repo_id"] == "me/gone":
                raise OSError("no route")
            calls.append(("upload", given))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert main(["push", str(run), "me/model", "--dry-run"]) == 0
    reported = capsys.readouterr().out
    assert "config.json" in reported
    assert "Nothing was uploaded." in reported
    assert calls == []
    assert main(["push", str(run), "me/model", "--private"]) == 0
    assert calls[0] == ("me/model", {"private": True, "exist_ok": True})
    assert calls[1][1]["folder_path"] == str(run / "final")
    assert main(["push", str(run), "me/gone"]) == 5
    assert "me/gone was not uploaded: no route" in capsys.readouterr().err
    assert main(["push", str(run), "model"]) == 2


def test_a_run_that_is_not_there_leads_to_those_that_are(tmp_path: Path):
    (tmp_path / "alpaca-sft").mkdir()
    (tmp_path / "alpaca-sft" / "plan.json").write_text("{}")
    for look in (trained_model, lambda run: read_plan(run / "plan.json")):
        with pytest.raises(LaunchError, match=f"did you mean {tmp_path}/alpaca-sft"):
            look(tmp_path / "alpaca")
    with pytest.raises(LaunchError, match="give the folder of a run"):
        trained_model(tmp_path / "none" / "x")
