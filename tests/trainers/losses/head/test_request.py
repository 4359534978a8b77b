"""The scorer under FSDP2 on two CPU processes: the gradients of one process with all logits."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from memtrain.trainers.losses.head.linear import NllOptions
from memtrain.trainers.losses.head.request import LogprobRequest, NllRequest
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.heads.lm_head import Scorer

VOCAB, RANKS = 128, 2
IDS = torch.randint(1, VOCAB, (RANKS, 17), generator=torch.Generator().manual_seed(7))
WEIGHTS = torch.rand(RANKS, 16, generator=torch.Generator().manual_seed(8))


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=2, tie_word_embeddings=kind == "tied")
    model = LlamaForCausalLM(config)
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    return model


def expected_gradients(kind: str) -> dict[str, torch.Tensor]:
    model = build(kind)
    logits = model(input_ids=IDS, use_cache=False).logits[:, :-1]
    logp = logits.log_softmax(-1).gather(2, IDS[:, 1:, None])[..., 0]
    (-(logp * WEIGHTS).sum() / RANKS).backward()  # FSDP averages over ranks
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def run_rank(rank: int, check: Callable[[int, str], None], kind: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    check(rank, kind)
    dist.barrier()
    # Torch 2.13's gloo threads, torn down by a loaded machine's interpreter at exit, now and then abort.
    os._exit(0)


def check_gradients(rank: int, kind: str) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    expected = expected_gradients(kind)
    for request in ("nll", "logprob"):
        scorer = Scorer(build(kind), tile_bytes=5 * VOCAB * 4)
        base = base_model(scorer.model)
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        if kind != "tied":
            fully_shard(base.lm_head, mesh=mesh)
        fully_shard(scorer, mesh=mesh)
        targets, weights, index = IDS[rank, 1:], WEIGHTS[rank], torch.arange(16)
        if request == "nll":
            loss = scorer({"input_ids": IDS[rank : rank + 1]}, index, NllRequest(targets, weights)).loss
        else:
            logp = scorer({"input_ids": IDS[rank : rank + 1]}, index, LogprobRequest(targets)).logp_N
            loss = -(logp * weights).sum()
        loss.backward()
        got = {
            n.removeprefix(
                "model.",
            ): p.grad
            for n, p in scorer.named_parameters()
            if p.grad is not None
        }
        assert got.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(got[name].full_tensor(), grad, rtol=1e-4, atol=2e-6)


def check_mixed_precision(rank: int, kind: str) -> None:
    """bf16 parameters and inputs; a request's fp32 weights, and the answer, are left alone."""
    scorer = Scorer(build(kind))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(scorer, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
    weights = torch.full((16,), 1.0 + 2**-12)  # not a bf16 number
    index, ids = torch.arange(16), IDS[rank : rank + 1]
    result = scorer({"input_ids": ids}, index, NllRequest(ids[0, 1:], weights, NllOptions(want_stats=True)))
    result.loss.backward()
    assert result.loss.dtype == result.logp_N.dtype == torch.float32
    torch.testing.assert_close(result.loss, -(result.logp_N * weights).sum(), rtol=1e-6, atol=0)


def spawn(check: Callable[[int, str], None], kind: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run_rank, (check, kind, port), nprocs=RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "tied", "lora"])
def test_sharded_head_gives_the_gradients_of_one_process(kind):
    spawn(check_gradients, kind)


@pytest.mark.slow
def test_mixed_precision_does_not_round_the_weights_of_a_request():
    spawn(check_mixed_precision, "untied")
