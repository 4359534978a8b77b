"""The parts of a causal LM: the model under its adapters, its backbone and its LM head."""

from typing import cast

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from memtrain.errors import LaunchError


def base_model(model: nn.Module) -> PreTrainedModel:
    """The causal LM itself, its adapters still in place."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def head_of(base: PreTrainedModel) -> nn.Module:
    """The module that turns hidden states into logits. Raises LaunchError where there is none."""
    head = base.get_output_embeddings()
    if head is None:
        raise LaunchError(
            f"{type(base).__name__} has no LM head",
            "model.path",
            "use a model whose class ends in ForCausalLM",
        )
    return head


def backbone_of(base: PreTrainedModel) -> nn.Module:
    """The module that turns ids into the hidden states that the head reads."""
    # transformers takes any part called `decoder` for it: in ModernBERT that is the head.
    no_backbones = (base, base.get_output_embeddings())
    for found in (base.get_decoder(), base.base_model):
        if found not in no_backbones:
            return found
    return cast(nn.Module, base.model)
