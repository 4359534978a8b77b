"""Held-out rows that are longer or shorter than those of training: their evaluation is predicted as it is."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import run_in

from memtrain.memory.plan.plan import PLAN_FILE, read_plan

SFT = """
method: sft
model: {{path: builtin:tiny}}
data: {{train: {{source: {train}}}, eval: {{source: {held_out}}}, cache_dir: {cache}}}
length: {{max_length: 1024}}
train: {{batch_size: 4, micro_batch_size: 4, max_steps: 2}}
log: {{every_steps: 1}}
cluster: {{device: cpu, threads: 1}}
"""
DPO = SFT.replace("sft", "dpo").replace("log:", "dpo: {{reference: precomputed}}\nlog:")
KTO = SFT.replace("sft", "kto")
GRPO = """
method: grpo
model: {{path: builtin:tiny}}
data: {{train: {{source: {train}}}, eval: {{source: {held_out}}}, cache_dir: {cache}}}
length: {{max_length: 1024}}
generate: {{num_generations: 2, max_tokens: 4}}
rewards: {{functions: [{{function: format, args: {{pattern: "k"}}}}]}}
train: {{batch_size: 4, micro_batch_size: 4, max_steps: 2}}
log: {{every_steps: 1}}
cluster: {{device: cpu, threads: 1}}
"""


def rows_of(method: str, words: int) -> list[dict[str, str]]:
    texts = ["one two three " * words + str(number) for number in range(12)]
    if method == "sft":
        return [{"text": text} for text in texts]
    if method == "grpo":
        return [{"prompt": text} for text in texts]
    return [{"prompt": "count", "chosen": text, "rejected": text + " four"} for text in texts]


@pytest.mark.parametrize(
    ("method", "of_train", "of_held_out"),
    [("sft", 3, 100), ("dpo", 3, 100), ("grpo", 3, 100), ("dpo", 60, 3)],
)
def test_the_evaluation_of_other_held_out_rows_is_predicted(
    method: str, of_train: int, of_held_out: int, tmp_path: Path
) -> None:
    """With the rows of training, evaluation of longer ones was 11.8 MiB, and 44.8 measured."""
    for name, words in (("train", of_train), ("held_out", of_held_out)):
        lines = map(json.dumps, rows_of(method, words))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "held_out")}
    recipe = {"sft": SFT, "dpo": DPO, "grpo": GRPO}[method].format(**files, cache=tmp_path / "cache")
    reported = run_in(tmp_path, method, recipe, (), "run")
    predicted, measured = of_evaluation(reported, tmp_path / "run")
    assert 0.99 * measured <= predicted <= 1.15 * measured


def of_evaluation(reported: list[dict[str, Any]], folder: Path) -> tuple[int, int]:
    """(bytes predicted, bytes measured)."""
    plan = read_plan(folder / PLAN_FILE)
    predicted = {phase.phase: phase.num_bytes for phase in plan.prediction.phases}
    found = (one for one in reported if one["kind"] == "memory" and one["phase"] == "evaluation")
    return predicted["evaluation"], max(one["allocated"] for one in found)


@pytest.mark.parametrize("padding_free", [True, False])
def test_ktos_evaluation_is_predicted_by_the_answers_that_its_prompts_meet(
    padding_free: bool, tmp_path: Path
) -> None:
    """By the longest row and the longest answer alone it was 13 % too high: long prompts meet short answers
    here."""
    lengths = [(118, 2), (2, 110), (2, 100), (60, 30), (30, 4), (3, 12), (2, 9), (4, 3)]
    rows = [
        {"prompt": f"{at} " + "one " * prompt, "completion": "two " * answer, "label": at % 2 == 0}
        for at, (prompt, answer) in enumerate(lengths)
    ]
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "held_out")}
    said = (f"length.padding_free={str(padding_free).lower()}", "memory.loss=chunked")
    reported = run_in(tmp_path, "kto", KTO.format(**files, cache=tmp_path / "cache"), said, "run")
    predicted, measured = of_evaluation(reported, tmp_path / "run")
    assert 0.999 * measured <= predicted <= 1.02 * measured
