"""The `model:` section: which weights, which tokenizer, in which precision, with which adapter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from memtrain.recipes.sections.base import Fraction, PositiveInt, Section, one_or_many

ALL_LINEAR = "all-linear"
"""Every linear layer but the head."""


class Adapter(Section):
    """Train a small adapter instead of the weights (PEFT)."""

    path: str | None = None
    """Folder of a trained LoRA or DoRA adapter, or of its run, that the training goes on from: its weights,
    rank, scale and modules, which need not be written again. Its optimizer begins anew. A reference model is
    the adapter as this run began (`reference: adapter_start`), or the model without it (`adapter_off`)."""

    base: str | None = None
    """The model that the adapter at `path` names as its own, where `model.path` has the same weights under
    another name."""

    kind: Literal["lora", "dora"] = "lora"
    """`lora` (arXiv:2106.09685) or `dora` (arXiv:2402.09353: also learns each column's magnitude; slower)."""

    r: PositiveInt = 16
    """Rank. Higher: more trainable parameters, gradients and optimizer state, all in proportion."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: the adapter's output is multiplied by alpha / r (alpha / sqrt(r) with `rslora`)."""

    dropout: Fraction = 0.0
    """Dropout on the adapter's input."""

    target_modules: Annotated[tuple[str, ...], BeforeValidator(one_or_many)] = ("all-linear",)
    """Module names that get an adapter; `all-linear` is every linear layer but the LM head, and of a mixture
    of experts the stacked experts (gate and up at twice the rank) and the router too."""

    target_parameters: Annotated[tuple[str, ...], BeforeValidator(one_or_many)] = ()
    """Stacked experts that get an adapter beside `target_modules`, by PEFT's names:
    `mlp.experts.gate_up_proj`, `mlp.experts.down_proj`. Each expert has its own matrices of rank `r`."""

    modules_to_save: Annotated[tuple[str, ...], BeforeValidator(one_or_many)] = ()
    """Module names that are trained in full and saved beside the adapter (`embed_tokens`, `lm_head`). Where
    a model ties the two, what is named is trained apart from the other, and the merged model is untied."""

    rslora: bool = False
    """Rank-stabilised scale, alpha / sqrt(r) (arXiv:2312.03732)."""

    @property
    def at_rest(self) -> Literal["adapter_off", "adapter_start"]:
        """What a policy with this adapter is compared with: the model without it, or its start where a run
        goes on from one."""
        return "adapter_off" if self.path is None else "adapter_start"

    @model_validator(mode="after")
    def _something_named(self) -> Adapter:
        if self.base is not None and self.path is None:
            raise ValueError("base has no effect without path; remove it")
        if self.target_parameters and ALL_LINEAR in self.target_modules:
            raise ValueError(
                f"{ALL_LINEAR} has all stacks of experts in it; name target_modules (such as [q_proj, "
                "v_proj], or [] for none) beside target_parameters"
            )
        return self


class RopeScaling(Section):
    """Rotary positions scaled for rows longer than the model was made for, in place of the model's own."""

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"]
    """`yarn` (arXiv:2309.00071), `llama3` (of Llama 3.1), `linear` (arXiv:2306.15595), `dynamic` (NTK by the
    length of each row)."""

    factor: Annotated[float, Field(ge=1)]
    """Times the length that the model was made for. A model that scales in the same way already: times what
    that one starts from, so that Llama 3.1's own factor is 8."""

    original_max_position_embeddings: PositiveInt | None = None
    """Tokens that the scaling starts from. If not set: the model's own scaling of this kind, or its
    `max_position_embeddings`."""

    attention_factor: Annotated[float, Field(gt=0)] | None = None
    """`yarn`: scale of queries and keys. If not set: by the factor."""

    beta_fast: Annotated[float, Field(gt=0)] | None = None
    """`yarn`: turns over the original length above which a frequency stays as it is."""

    beta_slow: Annotated[float, Field(gt=0)] | None = None
    """`yarn`: turns over the original length below which a frequency is divided by the factor."""

    low_freq_factor: Annotated[float, Field(gt=0)] | None = None
    """`llama3`: turns below which a frequency is divided by the factor."""

    high_freq_factor: Annotated[float, Field(gt=0)] | None = None
    """`llama3`: turns above which a frequency stays as it is."""

    @model_validator(mode="after")
    def _of_one_kind(self) -> RopeScaling:
        for name, kind in OF_KIND.items():
            if getattr(self, name) is not None and self.rope_type != kind:
                raise ValueError(f"{name} is of rope_type: {kind}; remove it, or set rope_type: {kind}")
        return self


OF_KIND = {
    "attention_factor": "yarn",
    "beta_fast": "yarn",
    "beta_slow": "yarn",
    "low_freq_factor": "llama3",
    "high_freq_factor": "llama3",
}
"""Keys of a scaling that one kind alone reads."""


class Model(Section):
    """Model to train: `path` (existing weights) or `config` (random weights)."""

    path: str | None = None
    """Hub id or folder of a causal LM in the Hugging Face format; `builtin:tiny` is built on the spot."""

    config: str | dict[str, JsonValue] | None = None
    """A model configuration (a mapping with `model_type`, or the path of a config.json): random weights."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""

    trust_remote_code: bool = False
    """Run the code that comes with the model, for architectures that transformers does not know. It can do
    anything that you can: read it first. Only with the code pinned: `model.revision` is a commit (40
    hexadecimal digits), for a folder, the `sha256:...` of its Python files, which the error message shows.
    Its tokenizer's code is never run."""

    tokenizer: str | None = None
    """Hub id or folder of the tokenizer; by default the model's own. `builtin:tiny` is always available."""

    chat_template: str | None = None
    """A Jinja file, or the name of a template that comes with memtrain, instead of the tokenizer's own:
    qwen3, qwen3-instruct, qwen2.5, llama3.2, llama3.1, llama3, llama4, llama2, gemma4, gemma3, gemma,
    mistral, phi4, phi3, deepseek3, falcon-h1, zephyr, chatml. Each marks the assistant's words."""

    add_tokens: Annotated[tuple[str, ...], BeforeValidator(one_or_many)] = ()
    """Tokens that the tokenizer does not have yet: their texts, or text files (`./tokens.txt`) with one a
    line. Each gets a row of the embedding (and of the head), which begins as the mean of all others; the
    model is saved with them and with the tokenizer that has them. Beside an adapter the embeddings are
    trained too: name them in `model.adapter.modules_to_save`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights in training. `auto`: bfloat16 where the device computes in it, float16 with a
    scaled loss on GPUs that do not (T4, V100), float32 elsewhere."""

    attention: Literal[
        "auto",
        "torch_cpu",
        "torch_varlen",
        "flash",
        "flash3",
        "flex",
        "torch_efficient",
        "masked",
        "transformers",
    ] = "auto"
    """Attention back end. `auto` takes the fastest that keeps rows apart; `memtrain doctor` lists them."""

    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary positions, for rows beyond the model's `max_position_embeddings`. Changes the
    numbers of the model at every length. A saved or merged model carries it; an adapter does not, and needs
    its base model scaled alike."""

    liger: Literal["auto", "on", "off"] = "auto"
    """Liger kernels for RMSNorm, SwiGLU and RoPE. `auto`: when installed and on CUDA."""

    kernels: Literal["auto", "fused", "transformers"] = "auto"
    """RMSNorm, SwiGLU and RoPE in few kernels that keep less memory, or transformers' own code. The loss
    is the same but for the order of sums in a norm, also in bfloat16; gradients are rounded less often.
    `auto`: `fused` on CUDA without Liger, where the model's family has them. Except with `transformers`,
    the chunked loss uses Triton kernels where Triton is installed, equal to the torch form up to rounding."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile each decoder layer (torch.compile): fewer, larger kernels, after a minute or more of
    compiling. Results differ by intermediate rounding. `auto`: off, as it was not measured on a GPU."""

    adapter: Adapter | None = None
    """Train an adapter. If not set: every weight is trained."""

    quantize: Literal["none", "4bit", "8bit"] = "none"
    """Keep the frozen weights in 4 or 8 bits (bitsandbytes; needs an adapter; computes in `model.dtype`).
    `4bit`: NF4 with double quantization (blocks of 64 weights, their scales in 8 bits): 0.516 bytes a weight.
    `8bit`: LLM.int8, 1 byte a weight. Embeddings, norms and LM head keep `model.dtype`."""

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.path is None) == (self.config is None):
            given = (
                "both model.path and model.config are given"
                if self.path
                else "neither model.path nor model.config is given"
            )
            raise ValueError(f"{given}; give one: path for weights that exist, config for random weights")
        if self.trust_remote_code:
            self._check_pin()
        if self.config is not None and self.tokenizer is None:
            raise ValueError(
                "model.config has no tokenizer; set model.tokenizer (builtin:tiny is always available)"
            )
        if self.add_tokens and self.adapter is not None and not self.adapter.modules_to_save:
            modules = "[embed_tokens, lm_head]" if self.quantize == "none" else "[embed_tokens]"
            raise ValueError(
                "model.add_tokens are trained in the embeddings, and an adapter leaves them frozen; set "
                f"model.adapter.modules_to_save: {modules}"
            )
        if self.quantize != "none" and self.adapter is None:
            raise ValueError(
                "quantized weights cannot be trained; add model.adapter, or set model.quantize to none"
            )
        return self

    def _check_pin(self) -> None:
        """Raise ValueError where code would be run that may change, or that there is none of."""
        if self.path is None:
            raise ValueError("model.trust_remote_code has no effect without a model.path; remove it")
        if self.path.startswith("builtin:"):
            raise ValueError(f"model.trust_remote_code has no effect: {self.path} has no code; remove it")
        is_folder = Path(self.path).expanduser().is_dir()
        if not is_folder and not re.fullmatch("[0-9a-f]{40}", self.revision or ""):
            at = f"model.revision {self.revision}" if self.revision else "the branch main"
            raise ValueError(
                f"model.trust_remote_code would run the code of {at}, which may change; set model.revision "
                "to a commit (40 hexadecimal digits) whose code you have read"
            )
