"""What the tests of one method's runs share: a tiny model, a run, and one that dies on its way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memtrain.cli.commands.train import run_recipe

MODEL = """
method: {method}
model:
  config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}}
  tokenizer: builtin:tiny
cluster: {{device: cpu, threads: 1}}
optim: {{lr: 1e-2}}
"""
ONLINE = (
    MODEL
    + """
data: {{train: {{source: builtin:arithmetic, limit: 40}}, eval_fraction: 0.1, cache_dir: {cache}}}
length: {{max_length: 128}}
generate: {{num_generations: 4, max_tokens: 10}}
train: {{batch_size: 16, max_steps: 4}}
eval: {{every_steps: 2}}
save: {{every_steps: 1, keep: 20}}
memory: {{measure_peaks: false}}
log: {{every_steps: 1}}
"""
)
"""A recipe of a method that learns from rewards, which are to be added."""


def run_in(folder: Path, method: str, recipe: str, overrides: tuple[str, ...], name: str) -> list[dict]:
    """Train by the text of a recipe to the end, in `folder`/`name`; the lines of the metrics."""
    path = folder / f"{method}.yaml"
    path.write_text(recipe)
    run_recipe(method, str(path), list(overrides), run_dir=str(folder / name))
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def steps(reported: list[dict]) -> list[dict]:
    """The lines of the steps."""
    return [line for line in reported if line["kind"] == "step"]


def curve(reported: list[dict]) -> list[tuple[float, ...]]:
    """Loss and gradient norm of every step."""
    return [(line["loss"], line["grad_norm"]) for line in steps(reported)]


@contextmanager
def dies_at(step: int) -> Iterator[None]:
    """A run inside is ended as Ctrl-C would, at the start of a step."""
    from memtrain.trainers.loop import loop

    plain = loop.one_step

    def dies(run, work, *rest):
        if work.step == step:
            raise KeyboardInterrupt
        return plain(run, work, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "one_step", dies)
        with pytest.raises(KeyboardInterrupt):
            yield
