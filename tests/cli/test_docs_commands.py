"""Every command in the README and docs/ runs: in order, page by page, on small files of the names they use.

Hub models become `builtin:tiny`, and SLURM is a stand-in that takes every script. All else is as written.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]

RECIPE = """\
method: sft
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16}
  tokenizer: builtin:tiny
data: {train: {source: builtin:arithmetic, limit: 32}}
length: {max_length: 128}
train: {batch_size: 16}
cluster: {threads: 1, slurm: {gpu: h100}}
"""

TRL = "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: some/rows\n"
AXOLOTL = (
    "base_model: meta-llama/Meta-Llama-3-8B\nsequence_len: 4096\nmicro_batch_size: 4\nadapter: qlora\n"
    "gradient_accumulation_steps: 4\ndatasets: [{path: some/rows}]\nlearning_rate: 2.0e-4\n"
)
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity; 21.97 GiB used)"
SCRIPT = "SFTConfig(max_length=512)\nAutoModelForCausalLM.from_pretrained('a/b')\nload_dataset('c/d')\n"
SLURM = {
    "sbatch": 'for to; do :; done; mkdir -p "${to%/*}/slurm"; echo > "${to%/*}/slurm/7.log"; echo 7',
    "scontrol": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
    "sacct": "exit 1",
}
STAND_INS = {"Qwen/Qwen3-0.6B": "builtin:tiny"}


def commands(page: str) -> list[str]:
    """The commands in the fenced blocks of a page: from the start of a line to a gap of two spaces or a #."""
    found: list[str] = []
    language: str | None = None
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("```"):
            language = line[3:] if language is None else None
        elif language == "" and line.strip().startswith("memtrain "):
            found.append(re.split(r"\s{2,}|\s#", line.strip())[0])
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every file that the commands name."""
    monkeypatch.setenv("MEMTRAIN_CALIBRATION", str(tmp_path / "store"))
    monkeypatch.setattr("memtrain.trainers.tools.calibrate.ENOUGH_S", 0.01)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "my.yaml").write_text(RECIPE)
    (tmp_path / "sft.yaml").write_text(TRL)
    (tmp_path / "axolotl.yml").write_text(AXOLOTL)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "oom.txt").write_text(OOM)
    (tmp_path / "bin").mkdir()
    for name, does in SLURM.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    rows = [{"question": f"{n} + {n}?", "answer": f"It is {n + n}."} for n in range(30)]
    pairs = [{"prompt": f"{n} + 1?", "chosen": f" {n + 1}", "rejected": f" {n}"} for n in range(30)]
    prompts = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    for name, lines in (("gsm8k", rows), ("pairs", pairs), ("data", prompts), ("my", rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    from pyarrow import parquet, table

    columns = {key: [row[key] for row in prompts] for key in prompts[0]}
    parquet.write_table(table(columns), tmp_path / "big.parquet")
    return tmp_path


def run(words: list[str]) -> tuple[int, str]:
    """The command in this process: its exit code, and what it printed."""
    from memtrain.__main__ import main

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(words)
    return code, said.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_every_command_of_a_page_runs(page: str, folder: Path):
    for command in commands(page):
        words = [STAND_INS.get(word, word) for word in shlex.split(command)[1:]]
        writes = words[0] in ("init", "import", "import-trl") or (words[0] == "rescue" and "-o" in words)
        if writes:
            words.append("--force")
        if words[0] in ("status", "logs") and not (folder / words[1]).exists():
            assert run(["sft", "my.yaml"])[0] == 0
        code, said = run([word for word in words if word != "-f"])
        assert code == 0, f"{command}\n{said}"
        if writes:
            (folder / "my.yaml").write_text(RECIPE)


def test_there_are_commands_to_run():
    assert sum(len(commands(page)) for page in PAGES) > 25


def test_every_text_of_the_errors_page_is_in_the_source():
    """A page of errors that no longer exist helps nobody."""
    source = "\n".join(path.read_text() for path in (ROOT / "memtrain").rglob("*.py"))
    flat = re.sub(r'"\s*\n\s*f?"', "", source)
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "errors.md").read_text(), re.M)
    texts = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(texts) > 15
    assert [text for text in texts if not all(part in flat for part in text.split(" ... "))] == []
