"""Rows in slices against rows whole: how far apart the numbers are, and what each process still holds.

python benchmarks/context_parallel.py -o benchmarks/results/context_parallel.json

Processes on gloo, one thread each. First a packed row of documents that cross the borders of the slices: the
largest difference of logits, loss and gradients from one process that holds the row, in float32 and bfloat16.
So for both ways of attention, by gathered keys and by heads that are dealt out.
Then a long row: the peak of live tensors of each process in forward and backward pass (weights, gradients and
what the gathering takes included), one document in it or many. The peak does not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from result_files import write_result
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.recipes.sections.methods.sft import Sft as SftRecipe
from memtrain.trainers.batches.collate import MicroBatch, Piece, lay_end_to_end
from memtrain.trainers.distributed.context_parallel import shared
from memtrain.trainers.distributed.ddp import GradientAllReduce
from memtrain.trainers.memory_meter.live_tensors import TensorPeak
from memtrain.trainers.methods.sft import Sft
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.context_parallel.groups import ContextRanks, make_context
from memtrain.trainers.model.heads.context_parallel_scoring import sliced
from memtrain.trainers.model.heads.lm_head import Scorer

SIZES = (1, 2, 4)
MIB = 2**20
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
DOCUMENTS = [301, 17, 40, 1, 88, 133, 212, 120, 66, 46]
LONG = {"one document": [4096], "16 documents": [256] * 16}
WAYS = ("keys", "heads")
EXACT = [(kind, dtype) for kind in ("llama", "qwen3") for dtype in ("float32", "bfloat16")]


def main() -> None:
    """Measure everything and write the figures."""
    words = argparse.ArgumentParser()
    words.add_argument("-o", "--output", type=Path)
    asked = words.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        differences = {
            f"by {by}, {kind}, {dtype}": compared(Path(name), kind, dtype, by_heads=by == "heads")
            for by in WAYS
            for kind, dtype in EXACT
        }
        peaks = {
            f"by {by}, {which}, {'checkpointed' if is_checkpointed else 'all kept'}": peaks_of(
                Path(name), lengths, is_checkpointed=is_checkpointed, by_heads=by == "heads"
            )
            for by in WAYS
            for which, lengths in LONG.items()
            for is_checkpointed in (False, True)
        }
    reported = {
        "what": "context parallelism on gloo processes against one process",
        "device": f"CPU, {platform.machine()}, one thread a process",
        "command": "python benchmarks/context_parallel.py -o FILE",
        "commit": commit(),
        "versions": {one: version(one) for one in ("torch", "transformers")},
        "model": SHAPE,
        "documents_tokens": DOCUMENTS,
        "largest_difference": differences,
        "peak_mib_of_a_row_of_4096_tokens": peaks,
    }
    print(json.dumps(reported, indent=1))
    if asked.output:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        write_result(asked.output, reported)


def commit() -> str:
    """The commit that was measured."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def compared(folder: Path, kind: str, dtype: str, *, by_heads: bool) -> dict[str, dict[str, float]]:
    """By the number of processes: how far logits, loss and gradients are from those of one."""

    def learn(context: ContextRanks | None) -> dict[str, Any]:
        scorer = scorer_of(kind, dtype, context)
        batch = row(DOCUMENTS)
        return {"logits": logits_of(scorer, batch, context), "step": loss_tokens(scorer, batch, context)}

    whole = on_processes(1, folder, learn)[0]
    found: dict[str, dict[str, float]] = {}
    for size in SIZES[1:]:
        ranks = on_processes(size, folder, learn, by_heads=by_heads)
        logits = torch.cat([rank["logits"][0] for rank in ranks])
        index = torch.cat([rank["logits"][1] for rank in ranks])
        expected = whole["logits"][0][index]
        loss, gradients = ranks[0]["step"]
        of_gradients = [
            ((gradients[name] - grad).norm() / grad.norm()).item() for name, grad in whole["step"][1].items()
        ]
        found[f"{size} processes"] = {
            "logits": (logits - expected).abs().max().item(),
            "largest_logit": expected.abs().max().item(),
            "loss": abs(loss - whole["step"][0]),
            "gradients_relative": max(of_gradients),
        }
    return found


def peaks_of(folder: Path, lengths: list[int], *, is_checkpointed: bool, by_heads: bool) -> dict[str, Any]:
    """By the number of processes: the highest peak of live tensors of any of them, in MiB."""

    def learn(context: ContextRanks | None) -> dict[str, float]:
        scorer = scorer_of("llama", "float32", context)
        if is_checkpointed:
            scorer.model.gradient_checkpointing_enable({"use_reentrant": False})
        weights = sum(parameter.nbytes for parameter in scorer.parameters())
        with TensorPeak() as counted:
            loss_tokens(scorer, row(lengths), context)
        return {"peak": (weights + counted.peak_bytes) / MIB, "weights_and_gradients": 2 * weights / MIB}

    found: dict[str, Any] = {}
    for size in SIZES:
        ranks = on_processes(size, folder, learn, by_heads=by_heads)
        found["weights and gradients"] = round(ranks[0]["weights_and_gradients"], 1)
        found[f"{size} process{'es' if size > 1 else ''}"] = round(max(rank["peak"] for rank in ranks), 1)
    return found


def scorer_of(kind: str, dtype: str, context: ContextRanks | None) -> Scorer:
    """A random model of the shape, that attends by the packed CPU back end."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE))
    model.to(getattr(torch, dtype)).train()
    set_attention(model, AttentionBackend.TORCH_CPU)
    scorer = Scorer(model, tile_bytes=4 * MIB)
    scorer.context = context
    return scorer


def row(lengths: list[int]) -> MicroBatch:
    """Documents of random tokens end to end, every token trained on."""
    draw = np.random.Generator(np.random.Philox(key=1))
    pieces = [Piece(draw.integers(0, 512, n).astype(np.int32), np.ones(n, np.bool_)) for n in lengths]
    return lay_end_to_end(pieces, pad_id=0, multiple=2 * max(SIZES))


def logits_of(scorer: Scorer, batch: MicroBatch, context: ContextRanks | None) -> tuple[Tensor, Tensor]:
    """(logits of the rows that this process holds, which they are)."""
    inputs, index = batch.model_inputs(), torch.arange(batch.input_ids.shape[1])
    if context is not None:
        inputs, layout = sliced(inputs, context)
        index = layout.index
    with torch.no_grad():
        return scorer.model(**inputs, use_cache=False).logits[0].float(), index


def loss_tokens(
    scorer: Scorer, batch: MicroBatch, context: ContextRanks | None
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients), summed over the processes."""
    exchange = GradientAllReduce(list(scorer.parameters())) if context is not None else None
    method = shared(Sft(SftRecipe()), context.size if context is not None else 1)
    denominator = float(batch.num_loss_tokens)
    with exchange.sending() if exchange is not None else nullcontext():
        loss = method.loss(scorer, batch, denominator=denominator, want_stats=False)
        loss.value.backward()
    total = loss.value.detach().double()
    if exchange is not None:
        exchange.finish()
        dist.all_reduce(total)
    return total.item(), {name: p.grad.float() for name, p in scorer.named_parameters() if p.grad is not None}


def on_processes(
    size: int, folder: Path, act: Callable[[ContextRanks | None], Any], *, by_heads: bool = False
) -> list[Any]:
    """What each of `size` forked processes found."""
    place = Path(tempfile.mkdtemp(dir=folder))
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                if size > 1:
                    dist.init_process_group("gloo", f"file://{place}/store", rank=rank, world_size=size)
                torch.save(act(make_context(size, by_heads=by_heads)), place / f"{rank}.pt")
                if size > 1:
                    dist.barrier()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * size, f"the processes ended with {codes}"
    return [torch.load(place / f"{rank}.pt", weights_only=False) for rank in range(size)]


if __name__ == "__main__":
    main()
