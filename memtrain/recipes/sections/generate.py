"""The `generate:` section: how the methods that learn from their own completions write them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from memtrain.recipes.sections.base import Fraction, PositiveInt, Section, one_or_many
from memtrain.recipes.sections.vllm import Vllm


class Generate(Section):
    """Completions for each prompt, and how their tokens are sampled."""

    num_generations: PositiveInt = 8
    """Completions of one prompt, which form a group: at least 2 (`ppo`: 1). Their prompt is computed once.
    Higher: a better baseline, more time."""

    max_tokens: PositiveInt = 256
    """Longest completion in tokens; a longer one is cut. Higher: more time, more memory."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by it, in sampling and in the loss. Higher: more varied."""

    top_k: PositiveInt | None = None
    """Sample from the k most likely tokens. If not set: from all."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens whose probabilities sum to this."""

    min_p: Fraction = 0.0
    """Sample from tokens with at least this share of the most likely token's probability."""

    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1: tokens that were written before, or are in the prompt, become less likely."""

    stop: Annotated[tuple[str, ...], BeforeValidator(one_or_many)] = ()
    """Texts that end a completion, beside the end-of-sequence token."""

    backend: Literal["auto", "native", "transformers", "vllm"] = "auto"
    """`native`: the trained module itself; each prompt is computed once for its group. `transformers`: the
    `generate` of transformers, for architectures that native does not support. `vllm`: a vLLM engine with
    its own copy of the weights, updated for each rollout (docs/generation.md). `auto`: native wherever it
    can, else transformers."""

    vllm: Vllm | None = None
    """`backend: vllm`: the place of the engine and its share of memory."""

    max_logprob_gap: Annotated[float, Field(gt=0)] | None = 0.3
    """End the run when the sampler's log-probs differ from the trainer's by this much, in nats, on average
    over a step: it then samples from outdated weights, or from another model. null: never."""

    gather_weights: Literal["auto", "on", "off"] = "auto"
    """Gathering of weights for generation where every process holds a part of them (`fsdp2`, `zero3`): `on`
    gathers all weights once for a rollout; `off` layer by layer for every token: less memory, many times
    slower. Same completions. `auto`: gathered where that fits."""

    rows: PositiveInt | Literal["auto"] = "auto"
    """Completions generated at a time. Higher: faster, more memory for the KV cache. Same completions.
    `auto`: as many as fit into the memory that the update needs anyway."""

    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Capture the native sampler's decoding pass as a CUDA graph, which launches all its kernels in one
    call. Same completions. `auto`: on a GPU where every process holds all weights, in full precision."""

    show: Annotated[int, Field(ge=0)] = 4
    """Completions of each logged step that are kept in completions.jsonl, with their rewards."""

    eval_temperature: Annotated[float, Field(ge=0)] = 0.0
    """Temperature for held-out prompts, one completion each; 0: greedy."""

    @model_validator(mode="after")
    def _stops_are_texts(self) -> Generate:
        if any(not text for text in self.stop):
            raise ValueError("generate.stop has an empty text, which would end every completion; remove it")
        return self

    @model_validator(mode="after")
    def _vllm_is_asked(self) -> Generate:
        if self.vllm is not None and self.backend != "vllm":
            raise ValueError(
                f"generate.vllm has no effect with backend: {self.backend}; set backend: vllm, or remove it"
            )
        return self

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be chosen."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0
