"""What a rank of FSDP2 holds while a model is loaded and cut: its part, not the whole model. Linux."""

import json
import os
from pathlib import Path

import pytest
from shared_out import assert_same_curve, write_method, write_online
from transformers import LlamaConfig, LlamaForCausalLM

from memtrain.trainers.build import components as build

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CLEAR.exists(), reason="needs Linux to measure a process"),
]
LAYERS = 6
MODEL = (
    "model.config={model_type: llama, hidden_size: 512, intermediate_size: 1408, num_attention_heads: 8, "
    f"num_hidden_layers: {LAYERS}, num_key_value_heads: 8, head_dim: 64, tie_word_embeddings: true}}"
)
WHOLE = 4 * LAYERS * (4 * 512**2 + 3 * 512 * 1408)
"""Bytes of its layers, 77 MB; its embedding has few rows."""


def resident(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


@pytest.fixture
def measured(monkeypatch, tmp_path: Path):
    """Every rank writes the most that was resident until its model was cut, above what was there before."""
    plain_made, plain_pass = build.made_in_parts, build._first_pass

    def made(settings, make):
        CLEAR.write_text("5")
        os.environ["BEFORE"] = str(resident("VmRSS"))
        return plain_made(settings, make)

    def first_pass(*given):
        place = tmp_path / f"peak-{os.environ['RANK']}-{settings_of(given)}.json"
        if not place.exists():
            place.write_text(json.dumps(resident("VmHWM") - int(os.environ["BEFORE"])))
        return plain_pass(*given)

    monkeypatch.setattr(build, "made_in_parts", made)
    monkeypatch.setattr(build, "_first_pass", first_pass)
    return lambda is_part: max(
        json.loads((tmp_path / f"peak-{rank}-{is_part}.json").read_text()) for rank in range(2)
    )


def settings_of(given: tuple) -> bool:
    return given[1].loads_shards


@pytest.fixture
def in_files(tmp_path: Path) -> tuple[str, ...]:
    """The same model with weights in files."""
    from memtrain.recipes.sections.model import Model
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    widths = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": LAYERS, "head_dim": 64}
    size = len(tokenizer_of(Model(path="builtin:tiny")))
    config = LlamaConfig(vocab_size=size, num_attention_heads=8, tie_word_embeddings=True, **widths)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    path = f"model.path={tmp_path / 'model'}"
    return ("model.config=null", path, "model.tokenizer=builtin:tiny")


CASES = {
    "random weights": ("sft", 1, ()),
    "an adapter": ("sft", 1, ("model.adapter={r: 8}",)),
    "DoRA, of files": ("sft", 1, ("files", "model.adapter={r: 8, kind: dora}")),
    "a row on both ranks": ("sft", 1, ("cluster.context_parallel=2",)),
    "a reward model": ("reward", 1, ()),
    "a reward model of files": ("reward", 1, ("files",)),
    "an adapter beside a copy, of files": ("dpo", 1, ("files", "model.adapter={r: 8}", "dpo.reference=copy")),
    "a value model of its own": ("ppo", 2, ("ppo.value=own",)),
}


SLOW = ("DoRA, of files",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_a_rank_makes_its_part_alone(runs, curve_of, monkeypatch, measured, in_files, case: str):
    """Measured when written, two ranks, a model of 75 MiB: 51 to 56 MiB, of which 38 are the rows, and 101 to
    104 where it was loaded whole; with a value model 90 and 179; of files 32 to 36, and 115 to 119."""
    method, models, overrides = CASES[case]
    config = in_files if "files" in overrides else (MODEL,)
    overrides = tuple(one for one in overrides if one != "files")
    write_online(runs, method) if method == "ppo" else write_method(runs, method)
    folders = []
    for is_part in (True, False):
        with monkeypatch.context() as patch:
            if not is_part:
                patch.setattr("memtrain.memory.rules.engines.loads_shards", lambda recipe, settings: False)
            name = f"part-{is_part}"
            said = ("cluster.engine=fsdp2", *config, "train.max_steps=1", *overrides)
            ranks = runs.fork_ranks(name, 2, *said, verb=method)
            assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
            folders.append(runs.folder / name)
    assert_same_curve(curve_of(folders[0]), curve_of(folders[1]))
    part, whole = measured(True), measured(False)
    print(f"{case}: {part / 2**20:.0f} MiB, whole {whole / 2**20:.0f}, weights {models * WHOLE / 2**20:.0f}")
    assert whole > models * WHOLE
    assert part < 0.8 * models * WHOLE
