"""What every stage works with: the device, sizes of models and rows, recipes, and plans with their prices."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from first_light.device import GIB, Device

SIZES = {"0.6B": "qwen3-0.6b", "1.7B": "qwen3-1.7b", "4B": "qwen3-4b", "8B": "qwen3-8b"}
TEXT = "the pens trains leave at noon each has more than costs whole half sum of answer is so"
WORDS = tuple(TEXT.split())
STAND_IN_SHARE = 128
"""A stand-in's rows are so many times shorter."""
STAND_IN = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 40_960,
}
STAND_IN_WIDTHS = {"0.6B": 32, "1.7B": 40, "4B": 48, "8B": 64}
ONLINE = ("grpo", "rloo", "online_dpo", "ppo")


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan of one process, and what its predictions are made of."""

    plan: Any
    facts: Any
    variant: Any


class Bench:
    """The device and the folder of one worker."""

    def __init__(self, work: Path, *, stand_in: bool, is_shared: bool = False) -> None:
        self.device = Device(stand_in=stand_in, is_shared=is_shared)
        self.work = work
        self.stand_in = stand_in
        self.stage = ""
        work.mkdir(parents=True, exist_ok=True)

    def tokens(self, count: int) -> int:
        """A length on this device: a stand-in's is shorter."""
        return max(24, count // STAND_IN_SHARE) if self.stand_in else count

    def gib(self, count: float) -> int:
        """Bytes of a card of so many GiB; a stand-in's budget is the machine's."""
        return int(count * GIB)

    def config(self, size: str) -> Path:
        """The configuration of a model, in a file."""
        from memtrain.memory.model_shape.known_models import known_config
        from memtrain.recipes.sections.model import Model
        from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

        path = self.work / f"{size}.config.json"
        if self.stand_in:
            width = STAND_IN_WIDTHS[size]
            vocabulary = len(tokenizer_of(Model(path="builtin:tiny")))
            given: dict[str, Any] = STAND_IN | {"hidden_size": width, "vocab_size": vocabulary}
        else:
            given = dict(known_config(SIZES[size]) or {})
        path.write_text(json.dumps(given))
        return path

    def saved(self, size: str) -> Path:
        """A folder with random weights of a size, for what reads weights from a disk (once for each size)."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from memtrain.recipes.sections.model import Model
        from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

        folder = self.work / f"model-{size}"
        if (folder / "done").is_file():
            return folder
        given = json.loads(self.config(size).read_text())
        config = AutoConfig.for_model(given.pop("model_type"), **given)
        torch.manual_seed(0)
        with torch.device(self.device.torch):
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        model.save_pretrained(folder)
        tokenizer_of(Model(path="builtin:tiny")).save_pretrained(folder)
        (folder / "done").touch()
        del model
        self.device.freed()
        return folder

    @property
    def dtype(self) -> Any:
        """Of weights: bfloat16 on a GPU."""
        import torch

        return torch.bfloat16 if self.device.is_cuda else torch.float32

    def rows(self, method: str, tokens: int, count: int) -> Path:
        """`count` rows of random words of about `tokens` tokens, the same for the same numbers."""
        path = self.work / f"rows-{method}-{tokens}-{count}.jsonl"
        if not path.is_file():
            made = made_rows(method, tokens, count)
            path.write_text("".join(json.dumps(row) + "\n" for row in made))
        return path

    def recipe(
        self,
        method: str,
        size: str,
        *,
        tokens: int,
        row_tokens: int | None = None,
        overrides: Sequence[str] = (),
        batch: int = 2,
        count: int = 192,
        generate: dict[str, Any] | None = None,
    ) -> tuple[str, list[str]]:
        """(path of a recipe, overrides): rows of at most `tokens` tokens, `batch` of them a step."""
        quantizes = any(word.startswith("model.quantize=") for word in overrides)
        source = {"path": str(self.saved(size))} if quantizes else {"config": str(self.config(size))}
        # Copies are of bfloat16 weights: a stand-in, which computes in float32, rehearses them in it.
        is_half = self.device.is_cuda or any(word.startswith("optim.copies=") for word in overrides)
        dtype = "bfloat16" if is_half else "float32"
        model = source | {"tokenizer": "builtin:tiny", "dtype": dtype}
        rows = self.rows(method, row_tokens or int(0.8 * tokens), count)
        given: dict[str, Any] = {
            "method": method,
            "model": model,
            "data": {"train": str(rows), "cache_dir": str(self.work / "cache")},
            "length": {"max_length": tokens},
            "train": {"batch_size": batch, "max_steps": 8},
            "memory": {"oom_recovery": "off"},
            "cluster": {"device": self.device.kind, "processes": 1},
        }
        if method in ONLINE:
            given["rewards"] = {"functions": [{"function": "length"}]}
            group = {
                "num_generations": 2 if method == "online_dpo" else 4,
                "max_tokens": min(self.tokens(256), tokens // 2),
            }
            given["generate"] = group | (generate or {})
        name = self.stage.replace("/", "-").replace(" ", "-") or "recipe"
        path = self.work / f"{name}.yaml"
        path.write_text(json.dumps(given))
        return str(path), [self._on_stand_in(word) for word in overrides]

    def _on_stand_in(self, word: str) -> str:
        """The override; lengths of a stand-in are distinguished by their key."""
        key, _, value = word.partition("=")
        if self.stand_in and key in ("memory.slice_tokens", "generate.max_tokens"):
            return f"{key}={self.tokens(int(value))}"
        return word

    def plan(self, recipe: str, overrides: Sequence[str], steps: int = 5) -> Planned:
        """The plan of a recipe on this device, and its price.

        Raises: MemtrainError of every kind, for a plan that cannot be made.
        """
        from memtrain.cli.measure.variants import variant
        from memtrain.cli.plan.make_plan import facts_of, make_plan
        from memtrain.cli.plan.model_config import model_config
        from memtrain.memory.hardware.devices import detect
        from memtrain.recipes.reading.load import load_recipe
        from memtrain.trainers.tools.verify.plans import on_one_process

        made = make_plan(load_recipe(recipe, list(overrides)), run_dir=str(self.work / "run"))
        plan = on_one_process(made.plan, steps=steps)
        hardware = detect(plan.recipe.cluster.device)
        facts = facts_of(plan.recipe, plan.data, model_config(plan.recipe.model), hardware)
        return Planned(plan, facts, variant("planned", plan, facts))

    def trace_job(self, planned: Planned) -> str | None:
        """The path of a file that says what a trace of this plan is to follow; None where none can."""
        from memtrain.cli.plan.answer import passes_batch
        from memtrain.memory.estimate.pricing import heaviest, may_accumulate
        from memtrain.trainers.tools.trace.client import can_trace, job_of

        plan, facts = planned.plan, planned.facts
        if can_trace(plan.recipe, plan.settings) is not None:
            return None
        seen = SimpleNamespace(
            prediction=plan.prediction, settings=plan.settings, case=SimpleNamespace(facts=facts)
        )
        job = job_of(
            plan.recipe,
            plan.settings,
            facts.config,
            heaviest(plan.settings, facts),
            accumulates=may_accumulate(plan.settings, facts),
            passes=passes_batch(seen),  # pyright: ignore[reportArgumentType]
        )
        name = self.stage.replace("/", "-").replace(" ", "-")
        path = self.work / f"{name}.trace.json"
        path.write_text(job.model_dump_json())
        return str(path)


def made_rows(method: str, tokens: int, count: int) -> list[dict[str, Any]]:
    """Rows of a method's format; the longest has `tokens` tokens, the others three tenths of it or more."""
    draw = random.Random(f"{method} {tokens} {count}")

    def words(share: float) -> str:
        return " ".join(draw.choices(WORDS, k=max(2, int(tokens * share))))

    made: list[dict[str, Any]] = []
    for number in range(count):
        size = 1.0 if number == 0 else draw.uniform(0.3, 1.0)
        if method in ONLINE:
            made.append({"prompt": words(0.9 * size)})
        elif method in ("dpo", "reward"):
            answers = {"chosen": f" {words(0.4 * size)}", "rejected": f" {words(0.3 * size)}"}
            made.append({"prompt": words(0.4 * size), **answers})
        elif method == "kto":
            row = {"prompt": words(0.5 * size), "completion": f" {words(0.4 * size)}"}
            made.append(row | {"label": number % 2 == 0})
        else:
            made.append({"prompt": words(0.5 * size), "completion": f" {words(0.4 * size)}"})
    return made
