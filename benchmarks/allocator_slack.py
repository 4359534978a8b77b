"""What CUDA's caching allocator reserves beyond live tensors: traced steps of whole models, replayed.

    python benchmarks/allocator_slack.py [--again]     writes its rows, and the table in docs/memory.md

Each row is a model and a form of training on an A100 80 GB, its step traced layer by layer and its
allocations replayed by the rules of the allocator, with and without expandable segments: memory that it
reserves where the card has room, and the least that meets every request. Where fms-acceleration published
nvidia-smi's figure and torch's allocated peak of the same form (4 rows of 4,096 tokens, no segments), their
quotient stands beside, less the context. Made without a GPU. Rows that are there are kept, unless --again
asks for all of them; an interrupted run goes on.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from result_files import write_result

from memtrain.cli.plan.lookup import LookedAt, facts_without_data
from memtrain.memory.estimate.pricing import heaviest
from memtrain.memory.estimate.static import CONTEXT_BYTES
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.model_shape.known_models import known_config
from memtrain.memory.planner.resolve import open_space
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.tools.trace.cuda_allocator import replay, smallest_capacity
from memtrain.trainers.tools.trace.trace import Job, trace

RESULTS = Path(__file__).parent / "results" / "allocator_slack.json"
PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- allocator: begin -->", "<!-- allocator: end -->"
GIB = 2**30
ALL = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA = {"adapter": {"r": 16, "target_modules": ALL}}
QLORA = LORA | {"quantize": "4bit"}
ON, OFF = {"activation_checkpointing": "on"}, {"activation_checkpointing": "off"}
FULL, CHUNKED = {"loss": "full"}, {"loss": "chunked"}
FORMS: Mapping[str, tuple[str, int, Mapping[str, Any], Mapping[str, Any], tuple[float, float] | None]] = {
    "QLoRA, plain logits": ("mistral-7b", 4, QLORA, ON | FULL, (15.25, 19.45)),
    "QLoRA, chunked loss": ("mistral-7b", 4, QLORA, ON | CHUNKED, (12.14, 13.84)),
    "QLoRA, plain logits of 128k": ("llama-3.1-8b", 4, QLORA, ON | FULL, (25.39, 40.25)),
    "QLoRA, chunked loss, 128k": ("llama-3.1-8b", 4, QLORA, ON | CHUNKED, (13.42, 15.16)),
    "LoRA, plain logits": ("mistral-7b", 4, LORA, ON | FULL, (24.87, 28.88)),
    "LoRA, chunked loss": ("mistral-7b", 4, LORA, ON | CHUNKED, (21.91, 23.27)),
    "LoRA, chunked loss, 128k": ("llama-3.1-8b", 4, LORA, ON | CHUNKED, (23.20, 24.87)),
    "full, plain logits": ("mistral-7b", 4, {}, ON | FULL, (67.46, 75.45)),
    "full, chunked loss": ("mistral-7b", 4, {}, ON | CHUNKED, (67.46, 68.64)),
    "full, all activations": ("qwen3-0.6b", 4, {}, OFF | CHUNKED, None),
    "full, all activations, plain logits": ("qwen3-0.6b", 2, {}, OFF | FULL, None),
    "full, checkpointing": ("qwen3-1.7b", 4, {}, ON | CHUNKED, None),
    "full, all activations, 1B": ("llama-3.2-1b", 2, {}, OFF | CHUNKED, None),
    "LoRA, all activations": ("llama-3.2-1b", 4, LORA, OFF | CHUNKED, None),
    "LoRA, all activations, 3B": ("smollm3-3b", 1, LORA, OFF | CHUNKED, None),
    "LoRA, layer inputs on the host": (
        "smollm3-3b",
        4,
        LORA,
        ON | CHUNKED | {"activation_offloading": "on"},
        None,
    ),
    "full, states on the host": (
        "smollm3-3b",
        1,
        {},
        ON | CHUNKED | {"optimizer_offload": "on"},
        None,
    ),
}
"""Name: model, rows of 4,096 tokens, its section, strategies, published (allocated, nvidia-smi) in GiB."""
LEFT = {"checkpoint_every": 1, "activation_offloading": "off", "streamed_layers": "off"}
LEFT |= {"optimizer_offload": "off", "expandable_segments": False, "budget": 2**50}


def job_of(form: str) -> Job:
    """The step of a form: one micro-batch."""
    model, rows, section, memory, _ = FORMS[form]
    held = LEFT | dict(memory)
    if memory["activation_checkpointing"] == "off":
        held.pop("checkpoint_every")
    said: dict[str, Any] = {"method": "sft", "data": {"train": ("rows.jsonl",)}, "memory": held}
    said |= {"length": {"max_length": 4096, "packing": "bfd"}}
    said |= {"train": {"batch_size": rows, "micro_batch_size": rows}}
    said["model"] = {"path": "a/model", "kernels": "transformers"} | dict(section)
    if not section:
        said["optim"] = {"master_weights": False, "in_backward": "off"}
    asked = SourcedRecipe(Recipe.model_validate(said), lambda key: "default")
    config = known_config(model)
    assert config is not None, model
    presumed = frozenset({"bitsandbytes"})
    facts = facts_without_data(asked, LookedAt(dict(config)), Hardware.named("a100-80"), presumed)
    settings = open_space(asked, facts)[2].groups[0][0]
    return Job(recipe=asked.recipe, settings=settings, config=config, batch=heaviest(settings, facts))


def row(form: str) -> dict[str, Any]:
    """Reserved and least memory of a form, over its live tensors."""
    started = time.process_time()
    recorder = trace(job_of(form)).recorder
    made: dict[str, Any] = {"form": form, "model": FORMS[form][0], "rows": FORMS[form][1]}
    made["live_gib"] = round(recorder.peak_bytes / GIB, 2)
    for name, expandable in (("expandable", True), ("native", False)):
        reserved = replay(recorder.events, expandable=expandable).peak_reserved
        least = smallest_capacity(recorder.events, expandable=expandable)
        made[name] = round(reserved / recorder.peak_bytes - 1, 4)
        made[f"{name}_least"] = round(least / recorder.peak_bytes - 1, 4)
    published = FORMS[form][4]
    if published is not None:
        allocated, smi = published
        made["published"] = round((smi - CONTEXT_BYTES / GIB) / allocated - 1, 4)
    return made | {"seconds": round(time.process_time() - started, 1)}


def write_page(rows: list[dict[str, Any]], commit: str) -> None:
    """The rows as a table of docs/memory.md."""
    lines = [
        f"`python benchmarks/allocator_slack.py`, traces at commit {commit}, rows of 4,096 tokens.",
        "",
        "| form | model, rows | live GiB | with segments: reserved, least | without | published |",
        "|---|---|---|---|---|---|",
    ]
    for one in rows:
        published = f"{one['published']:+.1%}" if "published" in one else ""
        lines.append(
            f"| {one['form']} | {one['model']}, {one['rows']} | {one['live_gib']:.2f} | "
            f"{one['expandable']:+.1%}, {one['expandable_least']:+.1%} | "
            f"{one['native']:+.1%}, {one['native_least']:+.1%} | {published} |"
        )
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after)


def main() -> None:
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    is_kept = RESULTS.is_file() and "--again" not in sys.argv
    made: dict[str, Any] = json.loads(RESULTS.read_text()) if is_kept else {"rows": []}
    rows: list[dict[str, Any]] = made["rows"]
    for form in list(FORMS)[len(rows) :]:
        rows.append(row(form))
        print(rows[-1], flush=True)
        made = {"made": time.strftime("%Y-%m-%d"), "commit": commit, "rows": rows}
        write_result(RESULTS, made)
    write_page(rows, made["commit"])
    for name in ("expandable", "expandable_least", "native", "native_least"):
        found = sorted(one[name] for one in rows)
        print(f"{name}: median {statistics.median(found):.1%}, highest {found[-1]:.1%}")


if __name__ == "__main__":
    main()
