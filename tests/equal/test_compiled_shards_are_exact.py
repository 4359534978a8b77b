"""Compiled layers under FSDP2: two processes have the gradients of one that compiles nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.distributed.fsdp2 import shard
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.loading.compiled_layers import compile_layers, recompute_compiled
from memtrain.trainers.model.offload.checkpointing import checkpoint_layers

ROWS = ((5, 9, 9), (4, 4, 4, 4), (17,))
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


class Scorer(nn.Module):
    """A model with the loss in its forward pass, as FSDP2 wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)).train()
        set_attention(self.model, AttentionBackend.TORCH_CPU)

    def forward(self, lengths: tuple[int, ...], seed: int) -> Tensor:
        layout, tokens = packed_layout(lengths), sum(lengths)
        ids = torch.randint(0, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))
        out = self.model(input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False)
        return out.logits.float().log_softmax(-1)[..., 0].mean()


def gradients(scorer: Scorer, ranks: tuple[int, ...]) -> list[Tensor]:
    """Of each step's rows, whose tokens follow the step and the rank; whole."""
    found: list[Tensor] = []
    for step, lengths in enumerate(ROWS):
        scorer.zero_grad()
        for rank in ranks:
            scorer(lengths, 2 * step + rank).backward()
        grads: list[Any] = [parameter.grad for parameter in scorer.parameters()]
        found += [one.full_tensor() if isinstance(one, DTensor) else one.clone() for one in grads]
    return found


def work(rank: int, folder: str, is_checkpointed: bool) -> None:
    """A process of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    scorer = Scorer()
    shard(scorer, SimpleNamespace(device="cpu", num_processes=2, shard_offload="none"))  # pyright: ignore
    if is_checkpointed:
        checkpoint_layers(scorer.model, 1, recompute_compiled())
    compile_layers(scorer.model, backend="aot_eager")
    found = gradients(scorer, (rank,))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if rank == 0:
        torch.save((found, graphs), f"{folder}/found.pt")
    dist.destroy_process_group()


@pytest.mark.slow  # Half a minute of compiling, in two processes.
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_two_processes_with_compiled_layers_have_the_gradients_of_one(tmp_path: Path, is_checkpointed: bool):
    """Captured and differentiated by torch's compiler, but not fused: only the order of sums differs."""
    expected = gradients(Scorer(), (0, 1))
    mp.spawn(work, args=(str(tmp_path), is_checkpointed), nprocs=2)
    found, graphs = torch.load(tmp_path / "found.pt")
    assert 0 < graphs <= 8
    for one, plain in zip(found, expected, strict=True):
        assert (one - plain).norm() <= 1e-5 * plain.norm() + 1e-9
