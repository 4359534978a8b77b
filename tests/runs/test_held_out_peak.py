"""Held-out rows that are longer or shorter than those of training: their evaluation is predicted as it is."""

import json
from pathlib import Path

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
    plan = read_plan(tmp_path / "run" / PLAN_FILE)
    predicted = {phase.phase: phase.num_bytes for phase in plan.prediction.phases}
    of_evaluation = (one for one in reported if one["kind"] == "memory" and one["phase"] == "evaluation")
    measured = max(one["allocated"] for one in of_evaluation)
    assert 0.99 * measured <= predicted["evaluation"] <= 1.15 * measured
