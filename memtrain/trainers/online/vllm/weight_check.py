"""Whether another engine holds the weights of the policy: its log-probs of a few tokens against ours."""

# T tokens of prompt and completion, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.online.generation.protocol import Group, Sample, Sampling
from memtrain.trainers.online.generation.transformers_sampler import own_attention

TOKENS = 4
"""Tokens that are compared. Taste: stale weights show in the first one."""

MOST_PROMPT_TOKENS = 256


def canary_group(groups: Sequence[Group]) -> Group:
    """The beginning of a prompt, to be completed by its likeliest tokens."""
    shortest = min(groups, key=lambda group: len(group.prompt_ids))
    return Group(shortest.prompt_ids[:MOST_PROMPT_TOKENS], 1, 0)


CANARY_SAMPLING = Sampling(max_tokens=TOKENS, temperature=0.0)


def difference(model: PreTrainedModel | PeftModel, group: Group, sample: Sample) -> float:
    """Mean |log p here - log p there| of the tokens of a sample at temperature 0 (or 1), in nats."""
    return _differences(model, group, sample).mean().item()


def furthest(model: PreTrainedModel | PeftModel, group: Group, sample: Sample) -> float:
    """The largest of them."""
    return _differences(model, group, sample).max().item()


@torch.no_grad()
def _differences(model: PreTrainedModel | PeftModel, group: Group, sample: Sample) -> Tensor:
    """float32 [T], of a row alone under the model's own attention."""
    device = next(model.parameters()).device
    ids_T = torch.tensor([*group.prompt_ids, *sample.token_ids], device=device)
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with own_attention(base_model(model)):
            logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0].float()
    finally:
        for module in was_training:
            module.training = True
    first = len(group.prompt_ids)
    logp_TV = torch.log_softmax(logits_TV[first - 1 : -1], -1)
    ours_T = logp_TV.gather(1, ids_T[first:, None])[:, 0].cpu()
    return (ours_T - torch.tensor(sample.logprobs)).abs()
