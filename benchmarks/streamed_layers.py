"""Streamed layers: is what a layer holds flat in the length of a row, and what does a step cost?

    python benchmarks/streamed_layers.py           # both questions: minutes; writes the results
    python benchmarks/streamed_layers.py --memory  # traces of a 25M model at 4,096 to 65,536 tokens
    python benchmarks/streamed_layers.py --passes  # passes without gradients: scoring, a sampler's prompts
    python benchmarks/streamed_layers.py --time    # processor time against checkpointing, in pairs
    python benchmarks/streamed_layers.py --host    # host memory of one row: read, tokenized and laid out

Memory: live tensors of the own trace (tensors without data, as `memtrain plan --trace`), at the peak
of the backward pass through the layers; what grows with the row by design is listed by owner, and the rest is
one slice. Time: forward and backward of the same row, one thread, the two ways by turns, the least of each.
Host: peak resident memory of a process each, at two lengths of the only row; the
slope is what a token takes. Results: benchmarks/results/streamed_layers.json.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from result_files import write_result
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from memtrain.memory.estimate.activations import layer_boundary
from memtrain.memory.estimate.streamed_layers import KEYS, ROW, streamed_backward
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.batches.collate import Piece, lay_end_to_end
from memtrain.trainers.data.store.prepare import prepare
from memtrain.trainers.data.store.token_store import TokenStore
from memtrain.trainers.losses.head.request import LogprobRequest
from memtrain.trainers.memory_meter.live_tensors import TensorPeak
from memtrain.trainers.model.attention import attention_switched, set_attention
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.heads.lm_head import Scorer
from memtrain.trainers.model.offload.activations import apply_checkpointing_and_offload
from memtrain.trainers.model.streamed.apply import stream_layers
from memtrain.trainers.online.generation.forward import NAME as SAMPLER
from memtrain.trainers.online.generation.forward import read_prompts
from memtrain.trainers.online.generation.forward import register as register_sampler
from memtrain.trainers.online.generation.kv_cache import KVCache
from memtrain.trainers.tools.trace.extrapolate import named_owners
from memtrain.trainers.tools.trace.trace import Job, trace

RESULTS = Path(__file__).parent / "results" / "streamed_layers.json"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
}
"""25 million weights."""
LENGTHS = (4_096, 8_192, 16_384, 32_768, 65_536)
SLICE_TOKENS = 4_096
TIMED = CONFIG | {"hidden_size": 256, "intermediate_size": 896, "vocab_size": 1024}
TIMED_TOKENS, TIMED_SLICE = 4_096, 1_024
MIB = 2**20


def settings_of(length: int, **changes: Any) -> Settings:
    """One row of `length` tokens on a CPU in float32."""
    known: dict[str, Any] = {
        "device": "cpu",
        "num_processes": 1,
        "threads": 1,
        "dtype": "float32",
        "attention": "torch_cpu",
        "liger": False,
        "adapter": None,
        "quantize": "none",
        "max_length": length,
        "truncation": "keep_start",
        "packing": "bfd",
        "cross_document_attention": False,
        "padding_free": True,
        "pad_to_multiple_of": None,
        "group_by_length": False,
        "batch_size": 1,
        "batch_tokens": None,
        "micro_batch_size": 1,
        "micro_tokens": None,
        "max_steps": 1,
        "checkpoint_every": 0,
        "offload": "none",
        "loss": "chunked",
        "loss_tile_bytes": 1 << 22,
        "optimizer": "adamw",
        "master_weights": False,
        "expandable_segments": True,
    }
    return Settings.model_validate(known | changes)


def layer_memory(length: int) -> dict[str, float]:
    """MiB at the peak of the backward pass through the last layer: by owner what grows, and the rest."""
    settings = settings_of(length, slice_tokens=SLICE_TOKENS)
    batch = HeaviestBatch(1, length, length, length)
    recipe = Recipe.model_validate(
        {"method": "sft", "model": {"config": {"model_type": "llama"}, "tokenizer": "builtin:tiny"}}
        | {"data": {"train": ("rows.jsonl",)}}
    )
    found = trace(Job(recipe, settings, CONFIG, batch, num_micro_batches=1, want_stats=False)).recorder
    held = named_owners(found)["steady step.backward.last"]
    load = Workload(settings, shape_of(CONFIG), batch)
    by_design = streamed_backward(load)
    reported = {
        "resting": sum(held.get(owner, 0) for owner in ("weights", "optimizer", "gradients", "batch")),
        "inputs of the layers": CONFIG["num_hidden_layers"] * layer_boundary(load),
        ROW: by_design[ROW],
        KEYS: by_design[KEYS],
    }
    reported["one slice, and sums of weights"] = sum(held.values()) - sum(reported.values())
    return {owner: round(size / MIB, 2) for owner, size in {"in all": sum(held.values()), **reported}.items()}


def pass_memory(length: int) -> dict[str, dict[str, float]]:
    """MiB made by passes without gradients over a row: log-probs of all its tokens, and a sampler's prompt.

    What grows by design: the embeddings, input and output of a layer, keys and values of one
    layer, or of all layers where a sampler keeps them.
    """
    known = {key: value for key, value in CONFIG.items() if key != "model_type"}
    # What a batch holds is known without a pass, and its rows are picked by data.
    batch = lay_end_to_end([Piece(np.zeros(length, np.int32), np.ones(length, np.bool_))], pad_id=0)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = LlamaForCausalLM(LlamaConfig(**known)).eval()
        set_attention(model, "torch_cpu")
        stream_layers(model, SLICE_TOKENS)
        scorer = Scorer(model, tile_bytes=1 << 22)
        keys = KVCache(1, 1, length, 1)
        with TensorPeak() as scoring:
            request = LogprobRequest(batch.targets)
            scorer(batch.model_inputs(), batch.scored_index, request)
        register_sampler()
        with attention_switched(model, SAMPLER), TensorPeak() as reading:
            read_prompts(model, [(0,) * length], keys, 0, AttentionBackend.TORCH_CPU)
    load = Workload(settings_of(length), shape_of(CONFIG), HeaviestBatch(1, length, length, length))
    a_layer = 2 * load.a * length * load.shape.kv_width
    rows = 3 * layer_boundary(load) + a_layer
    kept = CONFIG["num_hidden_layers"] * a_layer
    reported: dict[str, dict[str, float]] = {}
    for name, peak, grows in (
        ("scoring", scoring.peak_bytes, rows),
        ("reading a prompt", reading.peak_bytes, rows + kept),
    ):
        parts = {"in all": peak, "grows by design": grows, "rest": peak - grows}
        reported[name] = {part: round(size / MIB, 2) for part, size in parts.items()}
    return reported


def step_seconds(model: Any) -> float:
    """Processor seconds of a forward and a backward pass over one row."""
    layout = packed_layout([TIMED_TOKENS])
    ids = torch.randint(0, TIMED["vocab_size"], (1, TIMED_TOKENS))
    started = time.process_time()
    hidden = model.model(input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False)[0]
    hidden.square().mean().backward()
    return time.process_time() - started


def times(pairs: int) -> dict[str, Any]:
    """Least processor seconds of each way, made by turns, and their ratio."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ways = {
        "checkpointed": {"checkpoint_every": 1},
        "streamed": {"slice_tokens": TIMED_SLICE},
    }
    models: dict[str, Any] = {}
    for name, changes in ways.items():
        known = {key: value for key, value in TIMED.items() if key != "model_type"}
        models[name] = LlamaForCausalLM(LlamaConfig(**known)).train()
        set_attention(models[name], "torch_cpu")
        apply_checkpointing_and_offload(models[name], settings_of(TIMED_TOKENS, **changes))
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(pairs):
        for name, model in models.items():
            taken[name].append(step_seconds(model))
    least = {name: min(seconds) for name, seconds in taken.items()}
    return {
        "tokens": TIMED_TOKENS,
        "slice_tokens": TIMED_SLICE,
        "pairs": pairs,
        "seconds": {name: [round(one, 3) for one in seconds] for name, seconds in taken.items()},
        "ratio": round(least["streamed"] / least["checkpointed"], 3),
    }


HOST_CHARS = (500_000, 3_000_000)
"""Characters of the row; the tokenizer of builtin:tiny makes about a token of three."""


def host_memory() -> dict[str, Any]:
    """Bytes a token of one long row: peaks of its reading and tokenizing, and of laying it out."""
    reported = [
        json.loads(
            subprocess.run(
                [sys.executable, __file__, "--host-of", str(chars)], capture_output=True, check=True
            ).stdout
        )
        for chars in HOST_CHARS
    ]
    few, many = reported
    tokens = many["tokens"] - few["tokens"]
    slopes = {
        stage: round((many[stage] - few[stage]) / tokens, 1)
        for stage in ("reading", "laying out", "micro-batch")
    }
    return {"rows": reported, "bytes a token": slopes}


def host_of(chars: int) -> dict[str, int]:
    """Peaks above a process that has all imported, for a row of so many characters."""
    words = ("answer", "question", "memory", "row", "slice", "of", "the", "token")
    with TemporaryDirectory() as place:
        folder, rng = Path(place), random.Random(0)
        text = " ".join(rng.choice(words) for _ in range(chars // 6))
        warm, long = folder / "warm.jsonl", folder / "long.jsonl"
        warm.write_text(json.dumps({"text": "a short row"}) + "\n")
        long.write_text(json.dumps({"text": text}) + "\n")
        del text
        store_of(warm, folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        store = store_of(long, folder)
        read = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tracemalloc.start()
        made = lay_end_to_end([Piece(store.row(0), store.loss_mask(0))], pad_id=0)
        _, laid = tracemalloc.get_traced_memory()
        held = (made.input_ids, made.position_ids, made.scored_index, made.targets)
        return {
            "tokens": made.num_tokens,
            "reading": (read - before) * 1024,
            "laying out": laid,
            "micro-batch": sum(one.untyped_storage().nbytes() for one in held),
        }


def store_of(file: Path, folder: Path) -> TokenStore:
    """The tokenized rows of a file."""
    recipe = Recipe.model_validate(
        {"method": "sft", "model": {"path": "builtin:tiny"}}
        | {"data": {"train": str(file), "cache_dir": str(folder / "cache"), "processes": 1}}
    )
    return TokenStore.open(prepare(recipe).train.folder)


def main() -> None:
    """Answer the questions that are asked, keep the other's answer, and print both."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="traces alone")
    parser.add_argument("--passes", action="store_true", help="passes without gradients alone")
    parser.add_argument("--time", action="store_true", help="processor time alone")
    parser.add_argument("--host", action="store_true", help="host memory alone")
    parser.add_argument("--host-of", type=int, metavar="CHARS", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=5, help="how often the two ways take turns")
    asked = parser.parse_args()
    if asked.host_of:
        print(json.dumps(host_of(asked.host_of)))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    every = not (asked.memory or asked.passes or asked.time or asked.host)
    if asked.memory or every:
        results["config"], results["slice_tokens"] = CONFIG, SLICE_TOKENS
        results["memory_MiB"] = {}
        for length in LENGTHS:
            results["memory_MiB"][str(length)] = layer_memory(length)
            write_result(RESULTS, results)
    if asked.passes or every:
        results["passes_MiB"] = {str(length): pass_memory(length) for length in LENGTHS}
    if asked.host or every:
        results["host"] = host_memory()
    if asked.time or every:
        results["time"] = times(asked.pairs)
    write_result(RESULTS, results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
