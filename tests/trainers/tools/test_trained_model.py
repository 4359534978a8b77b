"""Commands of other programs for a trained model, by what its folder says."""

import io
import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memtrain.__main__ import main
from memtrain.errors import LaunchError
from memtrain.memory.plan.plan import read_plan
from memtrain.recipes.sections.evaluation import LmEval
from memtrain.recipes.sections.model import Model, RopeScaling
from memtrain.trainers.model.heads.value_head import HEAD_FILE, OWN_FOLDER
from memtrain.trainers.online.rewards.reading import READING_FILE
from memtrain.trainers.tools import trained_model as module
from memtrain.trainers.tools.lm_eval import lm_eval_words
from memtrain.trainers.tools.push import VALUE_FOLDER, WRITTEN, upload_of
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
    expected = ["vllm", "serve", str(run / "final"), "--served-model-name", "my run"]
    assert shlex.split(line) == [*expected, "--host", "127.0.0.1", "--port", "9000"]


def test_a_server_listens_on_this_machine_alone_unless_a_key_opens_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run = run_of(tmp_path, LLAMA)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert main(["serve", str(run)]) == 0
    said = capsys.readouterr()
    assert "--host 127.0.0.1" in said.out
    assert "listens on this machine alone" in said.err
    for host in ("0.0.0.0", "::", "10.0.0.4", "node-7", "127.0.0.1.evil.org"):
        assert main(["serve", str(run), "--host", host]) == 5
        said = capsys.readouterr()
        assert said.out == ""
        assert "VLLM_API_KEY holds no key" in said.err
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    assert main(["serve", str(run), "--host", "0.0.0.0"]) == 0
    said = capsys.readouterr()
    assert "--host 0.0.0.0" in said.out
    assert "whoever sends the key in VLLM_API_KEY" in said.err
    assert "s3cret" not in said.out + said.err
    for host in ("127.0.0.1", "127.3.2.1", "localhost", "::1"):
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        assert main(["serve", str(run), "--host", host]) == 0
    for host in ("", "--x", "a b", "a;b", "-"):
        assert main(["serve", str(run), f"--host={host}"]) == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("base_model_name_or_path", "--trust-remote-code"),
        ("base_model_name_or_path", 3),
        ("base_model_name_or_path", ["a"]),
        ("base_model_name_or_path", "a\x1b[2J"),
        ("r", 0),
        ("r", "8"),
        ("r", True),
        ("r", 10**9),
        ("r", [8]),
        ("lora_alpha", "x"),
        ("target_modules", "(a+)+$"),
        ("target_modules", "(unclosed"),
        ("target_modules", [3]),
        ("modules_to_save", "lm_head"),
        ("rank_pattern", {"(a*)*b": 3}),
        ("rank_pattern", [1]),
        ("use_dora", "yes"),
        ("task_type", ["CAUSAL_LM"]),
        ("peft_type", 3),
        ("auto_mapping", "os"),
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["gguf"], ["push", "--dry-run"], ["lm-eval", "--tasks", "x"]])
def test_a_value_that_no_adapter_has_is_one_error_of_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], key: str, value: object
):
    run = run_of(tmp_path, LORA | {key: value}, "adapter_config.json")
    words = [command[0], str(run), *(["me/model"] if command[0] == "push" else []), *command[1:]]
    assert main(words) == 5
    said = capsys.readouterr()
    assert f"the adapter's config has {key}: " in said.err
    assert "adapter_config.json" in said.err
    assert "vllm" not in said.out


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '"x"', '{"r": NaN}', "[" * 100_000, "\x00", "\xff"]
)
@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
def test_a_configuration_that_is_none_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str
):
    run = run_of(tmp_path, {}, file)
    (run / "final" / file).write_bytes(text.encode("latin-1"))
    for words in (["serve"], ["gguf"], ["push", "me/model", "--dry-run"]):
        assert main([words[0], str(run), *words[1:]]) == 5
        assert file in capsys.readouterr().err


@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "[", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, null]}'])
def test_files_beside_an_adapter_are_read_or_are_an_error(tmp_path: Path, file: str, text: str):
    run = run_of(tmp_path, LORA, "adapter_config.json")
    (run / "final" / file).write_text(text)
    for command in ("serve", "gguf"):
        assert main([command, str(run)]) in (0, 5)


def test_names_that_are_options_or_lists_elsewhere_stay_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path, LLAMA).rename(tmp_path / "--x")
    words = serve_words(text_model(Path("--x")))
    assert words[2] == "./--x/final"
    assert words[words.index("--served-model-name") + 1] == "x"
    lora = run_of(tmp_path / "other", LORA, "adapter_config.json").rename(tmp_path / "a=b,c")
    words = serve_words(text_model(lora))
    given = json.loads(words[words.index("--lora-modules") + 1])
    assert given == {"name": "a=b,c", "path": str(lora / "final"), "base_model_name": "me/base"}
    with pytest.raises(LaunchError, match="takes no comma"):
        lm_eval_words(text_model(lora), LmEval(tasks=("x",)), tmp_path, "cpu")
    assert run.name == "--x"


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
        Path(words[3]).write_text("GGUF")
        return SimpleNamespace(returncode=len(ran) - 1)

    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr("subprocess.run", fake)
    monkeypatch.setattr("memtrain.trainers.tools.gguf_check.can_compare", lambda: False)
    out = tmp_path / "out.gguf"
    assert main(["gguf", str(run), "-o", str(out)]) == 0
    assert ran[0] == [
        *("/bin/convert_hf_to_gguf.py", str(run / "final")),
        *("--outfile", str(tmp_path / ".unchecked-out.gguf"), "--outtype", "f16"),
    ]
    assert out.read_text() == "GGUF"
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

        def create_commit(self, name: str, operations: list[Any], commit_message: str) -> None:
            if name == "me/gone":
                raise OSError("no route")
            files = {one.path_in_repo: one.path_or_fileobj for one in operations}
            calls.append(("upload", files))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert main(["push", str(run), "me/model", "--dry-run"]) == 0
    reported = capsys.readouterr().out
    assert "config.json" in reported
    assert "Nothing was uploaded." in reported
    assert main(["push", str(run), "me/model", "--private"]) == 5
    assert "there is no terminal to ask at" in capsys.readouterr().err
    for answer in ("n", ""):
        monkeypatch.setattr("sys.stdin", Typed(f"{answer}\n"))
        assert main(["push", str(run), "me/model", "--private"]) == 0
        reported = " ".join(capsys.readouterr().out.split())
        assert "Upload 2 files (84 B) to https://huggingface.co/me/model (private, if it is" in reported
        assert reported.endswith("Nothing was uploaded.")
    assert calls == []
    monkeypatch.setattr("sys.stdin", Typed("y\n"))
    assert main(["push", str(run), "me/model", "--private"]) == 0
    assert calls[0] == ("me/model", {"private": True, "exist_ok": True})
    assert calls[1][1] == {name: str(run / "final" / name) for name in ("chat_template.jinja", "config.json")}
    assert main(["push", str(run), "me/gone", "--yes"]) == 5
    assert "me/gone was not uploaded: no route" in capsys.readouterr().err
    assert main(["push", str(run), "model"]) == 2


class Typed(io.StringIO):
    """What somebody types at a terminal."""

    def isatty(self) -> bool:
        return True


def test_only_files_that_memtrain_wrote_are_pushed_and_no_link_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = run_of(tmp_path, LORA, "adapter_config.json")
    final, private = run / "final", tmp_path / "private"
    private.mkdir()
    (private / "id_rsa").write_text("key")
    (private / "model.safetensors").write_text("key")
    for name in (".env", ".git/config", "notes.txt", "wandb/key", "optimizer.pt", "rows.jsonl", "own.py"):
        (final / name).parent.mkdir(exist_ok=True)
        (final / name).write_text("s3cret")
    (final / "vocab.json").symlink_to(private / "id_rsa")
    (final / "model.safetensors").symlink_to(private / "model.safetensors")
    (final / "value").symlink_to(private)
    (final / "additional_chat_templates").mkdir()
    (final / "additional_chat_templates" / "rag.jinja").write_text("x")
    (final / "additional_chat_templates" / "key.pem").write_text("x")
    (final / "adapter_model.safetensors").write_text("x")
    made = upload_of(trained_model(run))
    assert [name for name, _ in made.files] == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
    ]
    told = dict(made.left_out)
    assert told["vocab.json"] == told["model.safetensors"] == told["value"] == "a link"
    assert told.keys() >= {".env", ".git", "notes.txt", "wandb", "own.py"}
    assert main(["push", str(run), "me/model", "--dry-run"]) == 0
    assert "Left out: .env (memtrain did not write it)" in capsys.readouterr().out
    os.mkfifo(final / "tokenizer.json")
    assert main(["push", str(run), "me/model", "--dry-run"]) == 5
    assert "it is a pipe, not a file" in capsys.readouterr().err
    (final / "tokenizer.json").unlink()
    final.rename(tmp_path / "elsewhere")
    final.symlink_to(tmp_path / "elsewhere")
    assert main(["push", str(run), "me/model", "--dry-run"]) == 5
    assert "links are not followed" in capsys.readouterr().err


def test_the_names_of_a_models_own_files_are_those_that_are_written():
    assert {READING_FILE, HEAD_FILE} <= set(WRITTEN)
    assert VALUE_FOLDER == OWN_FOLDER


def test_places_of_this_machine_in_what_is_pushed_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    here = LORA | {"base_model_name_or_path": "/srv/ann/models/base"}
    run = run_of(tmp_path, here, "adapter_config.json")
    assert main(["push", str(run), "me/model", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "adapter_config.json names a place of this machine, /srv/ann/models/base" in said


def test_a_run_that_is_not_there_leads_to_those_that_are(tmp_path: Path):
    (tmp_path / "alpaca-sft").mkdir()
    (tmp_path / "alpaca-sft" / "plan.json").write_text("{}")
    for look in (trained_model, lambda run: read_plan(run / "plan.json")):
        with pytest.raises(LaunchError, match=f"did you mean {tmp_path}/alpaca-sft"):
            look(tmp_path / "alpaca")
    with pytest.raises(LaunchError, match="give the folder of a run"):
        trained_model(tmp_path / "none" / "x")
