"""A GGUF file that is another model than the one it was made of is refused, whatever the converter said."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from memtrain.__main__ import main

HEADS, WIDTH, VOCAB = 4, 32, 48
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens": (VOCAB, WIDTH),
        "lm_head": (VOCAB, WIDTH),
        "model.norm": (WIDTH,),
        f"{layer}.input_layernorm": (WIDTH,),
        f"{layer}.post_attention_layernorm": (WIDTH,),
        f"{layer}.self_attn.q_proj": (WIDTH, WIDTH),
        f"{layer}.self_attn.k_proj": (WIDTH // 2, WIDTH),
        f"{layer}.self_attn.v_proj": (WIDTH // 2, WIDTH),
        f"{layer}.self_attn.o_proj": (WIDTH, WIDTH),
        f"{layer}.mlp.gate_proj": (64, WIDTH),
        f"{layer}.mlp.up_proj": (64, WIDTH),
        f"{layer}.mlp.down_proj": (WIDTH, 64),
    }
    made = {f"{k}.weight": torch.randn(v, generator=draw).bfloat16() for k, v in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(made, folder / "model.safetensors")
    return made


def paired(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head in pairs (0, n/2), (1, n/2 + 1) ..., as llama.cpp's rotation takes them."""
    order = [h * (len(x) // heads) + i + j * (len(x) // heads // 2)
             for h in range(heads) for i in range(len(x) // heads // 2) for j in (0, 1)]  # fmt: skip
    return x[order]


def converter(
    weights: dict[str, torch.Tensor], change: Callable[[dict[str, np.ndarray], dict[str, Any]], None]
):
    """A converter for Llama: `change` takes the tensors and the settings before they are written."""
    import gguf

    def run(words: list[str], check: bool) -> SimpleNamespace:
        kind = gguf.GGMLQuantizationType[TYPES[words[-1]]]
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
        tensors = {}
        for name, weight in weights.items():
            numbers = weight.float().numpy()
            for part, heads in (("q_proj", HEADS), ("k_proj", 2)):
                numbers = paired(numbers, heads) if part in name else numbers
            tensors[names.get_name(name, (".weight",))] = numbers
        settings = {"freq_base": 500000.0, "block_count": 1}
        change(tensors, settings)
        writer = gguf.GGUFWriter(words[words.index("--outfile") + 1], "llama")
        writer.add_block_count(settings["block_count"])
        writer.add_embedding_length(WIDTH)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(settings["freq_base"])
        for name, numbers in tensors.items():
            own = kind if numbers.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(numbers, own), raw_dtype=own)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return SimpleNamespace(returncode=0)

    return run


def nothing(tensors: dict[str, np.ndarray], settings: dict[str, Any]) -> None:
    del tensors, settings


def moved(name: str, by: float):
    def change(tensors: dict[str, np.ndarray], settings: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[5] += by

    return change


WRONG: dict[str, tuple[Any, str]] = {
    "one number": (moved("blk.0.ffn_up.weight", 0.5), "ffn_up.weight does not hold the numbers of .*up_proj"),
    "a norm": (moved("output_norm.weight", 1e-3), r"differ by up to 0\.001"),
    "plus one": (lambda t, s: t.update({"blk.0.attn_v.weight": t["blk.0.attn_v.weight"] + 1}), "attn_v"),
    "not a number": (moved("blk.0.ffn_down.weight", float("nan")), "no finite numbers"),
    "missing": (lambda t, s: t.pop("blk.0.attn_k.weight"), "k_proj.weight of the model: not in it"),
    "another head": (lambda t, s: t.update({"output.weight": t["token_embd.weight"]}), "lm_head"),
    "swapped": (
        lambda t, s: t.update({"blk.0.ffn_up.weight": t["blk.0.ffn_gate.weight"]}),
        "ffn_up.weight does not hold",
    ),
    "more": (lambda t, s: t.update({"blk.0.attn_q_norm.weight": t["output_norm.weight"]}), "model has not"),
    "rows": (lambda t, s: t.update({"blk.0.attn_v.weight": t["blk.0.attn_v.weight"][:8]}), "256 numbers"),
    "another base": (lambda t, s: s.update(freq_base=10000.0), "rope.freq_base is 10000 and rope_theta"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    return tmp_path / "model"


@pytest.mark.parametrize("kind", TYPES)
def test_a_file_of_the_same_model_is_kept_and_the_difference_is_said(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("gguf", reason="reads GGUF files; part of the dev extra")
    monkeypatch.setattr("subprocess.run", converter(model_of(folder), nothing))
    assert main(["gguf", str(folder), "--type", kind]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r"12 tensors hold its numbers; the largest difference is ([\d.e-]+),", said)
    assert found, said
    # A number of bfloat16 is one of float16 and of float32 too, unless it is next to nothing.
    assert 1e-3 < float(found[1]) < 0.03 if kind == "q8_0" else float(found[1]) < 1e-7
    assert (folder / "model.gguf").is_file()
    assert not list(folder.glob(".unchecked*"))


def test_a_file_of_another_model_is_set_aside_with_its_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("gguf", reason="reads GGUF files; part of the dev extra")
    weights = model_of(folder)
    (folder / "model.gguf").write_text("the file of before")
    for kind in ("f16", "q8_0"):
        for what, (change, reason) in WRONG.items():
            if (kind, what) == ("q8_0", "not a number"):
                continue  # its blocks of whole numbers hold none
            monkeypatch.setattr("subprocess.run", converter(weights, change))
            assert main(["gguf", str(folder), "--type", kind]) == 5, (kind, what)
            said = " ".join(capsys.readouterr().err.split())
            assert "the GGUF file is not the model" in said, said
            assert re.search(reason, said), (kind, what, said)
    assert (folder / "model.gguf").read_text() == "the file of before"
    assert (folder / "model.refused.gguf").stat().st_size
    assert not (folder / "Modelfile").exists()


def test_what_is_no_gguf_file_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("gguf", reason="reads GGUF files; part of the dev extra")
    right = converter(model_of(folder), nothing)

    def cut(words: list[str], check: bool) -> SimpleNamespace:
        ended = right(words, check)
        file = Path(words[3])
        file.write_bytes(file.read_bytes()[:900])
        return ended

    def another(words: list[str], check: bool) -> SimpleNamespace:
        Path(words[3]).write_text("Model successfully exported" * 50)
        return SimpleNamespace(returncode=0)

    for one in (cut, another):
        monkeypatch.setattr("subprocess.run", one)
        assert main(["gguf", str(folder)]) == 5
        assert "it cannot be read" in capsys.readouterr().err


def test_a_converter_that_writes_nothing_is_no_success_and_without_the_package_it_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model_of(folder)
    monkeypatch.setattr("memtrain.trainers.tools.gguf_check.can_compare", lambda: False)
    monkeypatch.setattr("subprocess.run", lambda words, check: SimpleNamespace(returncode=0))
    assert main(["gguf", str(folder)]) == 5
    assert "ended without an error and wrote no model.gguf" in capsys.readouterr().err

    def write(words: list[str], check: bool) -> SimpleNamespace:
        Path(words[3]).write_text("something")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", write)
    assert main(["gguf", str(folder)]) == 0
    assert "pip install gguf" in " ".join(capsys.readouterr().out.split())
    assert (folder / "model.gguf").read_text() == "something"


def test_a_converter_that_cannot_run_and_a_place_that_holds_no_file_are_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model_of(tmp_path / "model")
    program = tmp_path / "convert_hf_to_gguf.py"
    monkeypatch.setattr("shutil.which", lambda name: str(program))
    for text in ("no program", "#!/nowhere/python\n"):
        program.write_text(text)
        program.chmod(0o755)
        assert main(["gguf", str(tmp_path / "model")]) == 5
        assert "converter cannot be started" in capsys.readouterr().err
    program.write_text('#!/bin/sh\nrm "$3"; mkdir "$3"\n')
    assert main(["gguf", str(tmp_path / "model")]) == 5
    assert "wrote no model.gguf" in capsys.readouterr().err
    assert not [one for one in (tmp_path / "model").iterdir() if "gguf" in one.name]
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, what in (("folder", "is a folder"), ("pipe", "is no regular file")):
        assert main(["gguf", str(tmp_path / "model"), "-o", str(tmp_path / f"{name}.gguf")]) == 5
        assert what in capsys.readouterr().err
