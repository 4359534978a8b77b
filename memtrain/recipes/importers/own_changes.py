"""Changes that save memory in other tools, by the keys to change there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]
Edit = Callable[[Config], Mapping[str, object]]

LEAST_LENGTH = 256
"""Tokens below which shorter rows are not proposed. Taste."""

_EIGHT_BIT = "moments are rounded to 8 bits"
_LORA = "an adapter is trained instead of all weights"
_QLORA = "the frozen weights are rounded to 4 bits"
_SYNONYMS = {"liger_fused_linear_cross_entropy": ("cut_cross_entropy", "chunked_cross_entropy")}
_AR = "actor_rollout_ref"


@dataclass(frozen=True, slots=True)
class OwnChange:
    """A change. Changes of the same kind exclude each other, the mildest stands first."""

    kind: str
    edit: Edit
    """The keys to write with their values; none where it is made already."""
    learns: str = ""
    """The difference in learning; empty: the same numbers up to rounding."""
    pins: Mapping[str, object] = field(default_factory=dict[str, object])
    """Changes of the run's computation, beyond the keys."""
    environment: str = ""
    """A variable to set in place of a key."""


def changes_of(tool: str, method: str, processes: int, *, is_script: bool = False) -> list[OwnChange]:
    """The changes that a tool has for a method, exact ones first. `is_script`: a script of TRL's trainers,
    read by Unsloth's table but without Unsloth."""
    common = [SEGMENTS, *_evaluation(tool, method)]
    if is_script:
        return [*common, *_script(method, processes)]
    made = {
        "trl": _trl,
        "axolotl": _axolotl,
        "llamafactory": _llamafactory,
        "unsloth": _unsloth,
        "verl": _verl,
    }
    return [*common, *made[tool](method, processes)]


def _evaluation(tool: str, method: str) -> list[OwnChange]:
    """Change to one row at a time where held-out rows are evaluated."""
    if tool == "verl" or method in ("grpo", "rloo"):
        return []
    key = "eval_batch_size" if tool == "axolotl" else "per_device_eval_batch_size"
    return [OwnChange("evaluation", _set(key, 1))]


SEGMENTS = OwnChange(
    "segments",
    lambda config: {},
    pins={"memory.expandable_segments": True},
    environment="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
"""Segments that grow in place of fragmenting: every tool on torch has them."""


def _set(
    key: str, value: object, *, default: object = None, only_where: Callable[[Config], bool] | None = None
) -> Edit:
    """A key set; nothing where it is so already."""

    def edit(config: Config) -> Mapping[str, object]:
        held = config.get(key, default)
        if held == value or any(config.get(other) is True for other in _SYNONYMS.get(key, ())):
            return {}
        return {key: value} if only_where is None or only_where(config) else {}

    return edit


def _fewer_rows(micro_batch: str, accumulation: str, default: int, share: int) -> Edit:
    """Micro-batches of fewer rows, as many more of them: the same batch. `share` 0: one row."""

    def edit(config: Config) -> Mapping[str, object]:
        rows, steps = config.get(micro_batch, default), config.get(accumulation, 1)
        if not isinstance(rows, int) or not isinstance(steps, int) or rows <= 1:
            return {}
        fewer = max(1, rows // share) if share else 1
        return {micro_batch: fewer, accumulation: steps * rows // fewer} if rows % fewer == 0 else {}

    return edit


def _shorter(key: str, default: int, divisor: int) -> Edit:
    def edit(config: Config) -> Mapping[str, object]:
        length = config.get(key, default)
        if not isinstance(length, int) or length // divisor < LEAST_LENGTH:
            return {}
        return {key: length // divisor}

    return edit


def _rows(micro_batch: str, accumulation: str, default: int) -> list[OwnChange]:
    return [OwnChange("rows", _fewer_rows(micro_batch, accumulation, default, share)) for share in (2, 4, 0)]


def _lengths(key: str, default: int) -> list[OwnChange]:
    words = "rows are cut at a shorter length"
    return [OwnChange("length", _shorter(key, default, divisor), words) for divisor in (2, 4, 8)]


def _trl(method: str, processes: int) -> list[OwnChange]:
    online = method in ("grpo", "rloo")
    length = "max_completion_length" if online else "max_length"
    made = [
        OwnChange("checkpointing", _set("gradient_checkpointing", True, default=True)),
        *_rows("per_device_train_batch_size", "gradient_accumulation_steps", 8),
        OwnChange("loss", _set("use_liger_kernel", True)),
        OwnChange("offloading", _set("activation_offloading", True)),
    ]
    if method in ("dpo", "kto"):
        made.append(OwnChange("reference", _set("precompute_ref_log_probs", True)))
    if online:
        asleep = _set("vllm_enable_sleep_mode", True, only_where=_has_vllm)
        made.append(OwnChange("sleep", asleep))
        made += [
            OwnChange("share", _lower("vllm_gpu_memory_utilization", share, 0.3, _has_vllm))
            for share in (0.2, 0.1)
        ]
    if processes > 1:
        made += [
            OwnChange("sharding", _set("accelerate_config", name)) for name in ("zero2", "zero3", "fsdp2")
        ]
    made += [
        OwnChange("optimizer", _set("optim", "adamw_8bit"), _EIGHT_BIT),
        OwnChange("optimizer", _set("optim", "paged_adamw_8bit"), _EIGHT_BIT),
        OwnChange("adapter", _set("use_peft", True), _LORA),
        OwnChange("adapter", _both({"use_peft": True, "load_in_4bit": True}), f"{_LORA}; {_QLORA}"),
        *_lengths(length, 512 if online else 1024),
    ]
    return made


def _has_vllm(config: Config) -> bool:
    shares = config.get("vllm_mode", "server" if config.get("vllm_device") else "colocate") == "colocate"
    return config.get("use_vllm") is True and shares


def _lower(key: str, share: float, default: float, only_where: Callable[[Config], bool]) -> Edit:
    """A share of the card set, where it is less than what is there."""

    def edit(config: Config) -> Mapping[str, object]:
        held = config.get(key, default)
        is_less = isinstance(held, int | float) and share < held
        return {key: share} if is_less and only_where(config) else {}

    return edit


def _both(keys: Mapping[str, object]) -> Edit:
    return lambda config: {key: value for key, value in keys.items() if config.get(key) != value}


def _axolotl(method: str, processes: int) -> list[OwnChange]:
    fused = {
        "plugins": ["axolotl.integrations.liger.LigerPlugin"],
        "liger_fused_linear_cross_entropy": True,
    }
    made = [
        OwnChange("checkpointing", _set("gradient_checkpointing", True, default=False)),
        *_rows("micro_batch_size", "gradient_accumulation_steps", 1),
        OwnChange("offloading", _set("activation_offloading", True)),
    ]
    if method == "sft":
        made.append(OwnChange("loss", lambda config: fused if _set(_LIGER, True)(config) else {}))
    if method == "dpo":
        made.append(OwnChange("loss", _set("dpo_use_liger_kernel", True)))
    made.append(OwnChange("attention", _flash))
    if method in ("dpo", "kto"):
        made.append(OwnChange("reference", _set("precompute_ref_log_probs", True)))
    if processes > 1:
        made += [
            OwnChange("sharding", _set("deepspeed", f"deepspeed_configs/{name}.json"))
            for name in ("zero2", "zero3")
        ]
    made += [
        OwnChange("optimizer", _set("optimizer", "adamw_bnb_8bit"), _EIGHT_BIT),
        OwnChange("optimizer", _set("optimizer", "paged_adamw_8bit"), _EIGHT_BIT),
        OwnChange(
            "adapter",
            _adapted({"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}),
            _LORA,
        ),
        OwnChange("adapter", _quantized, _QLORA),
        *_lengths("sequence_len", 512),
    ]
    return made


_LIGER = "liger_fused_linear_cross_entropy"


def _flash(config: Config) -> Mapping[str, object]:
    eager = config.get("attn_implementation") == "eager" or config.get("eager_attention") is True
    off = {"eager_attention": False} if config.get("eager_attention") is True else {}
    return {"attn_implementation": "flash_attention_2", **off} if eager else {}


def _adapted(keys: Mapping[str, object]) -> Edit:
    return lambda config: {} if config.get("adapter") else keys


def _quantized(config: Config) -> Mapping[str, object]:
    if config.get("load_in_4bit") is True:
        return {}
    keys: dict[str, object] = {"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": False}
    return (
        keys if config.get("adapter") else keys | {"lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}
    )


def _llamafactory(method: str, processes: int) -> list[OwnChange]:
    made = [
        OwnChange(
            "checkpointing",
            lambda config: (
                {"disable_gradient_checkpointing": False}
                if config.get("disable_gradient_checkpointing")
                else {}
            ),
        ),
        *_rows("per_device_train_batch_size", "gradient_accumulation_steps", 8),
        OwnChange("offloading", _set("use_unsloth_gc", True)),
    ]
    if method == "sft":
        made.append(OwnChange("loss", _set("enable_liger_kernel", True)))
    if processes > 1:
        made += [OwnChange("sharding", _stage(name)) for name in ("2", "3", "3_offload")]
    pure = {"pure_bf16": True}
    made += [
        OwnChange(
            "precision",
            lambda config: (
                pure if config.get("finetuning_type") == "full" and not config.get("deepspeed") else {}
            ),
            "small updates are rounded away",
        ),
        OwnChange("optimizer", _set("optim", "adamw_8bit"), _EIGHT_BIT),
        OwnChange(
            "adapter",
            lambda config: (
                {"finetuning_type": "lora", "lora_target": "all"}
                if config.get("finetuning_type") == "full"
                else {}
            ),
            _LORA,
        ),
        OwnChange("adapter", _four_bits, _QLORA),
        *_lengths("cutoff_len", 2048),
    ]
    return made


def _stage(name: str) -> Edit:
    """A stage of DeepSpeed, in accelerate's file where that starts the run: both at once are refused."""
    stage = _set("deepspeed", f"examples/deepspeed/ds_z{name}_config.json")
    accelerates = _set("accelerate_config", f"zero{name}")
    return lambda config: (accelerates if config.get("accelerate_config") else stage)(config)


def _four_bits(config: Config) -> Mapping[str, object]:
    if config.get("quantization_bit") == 4:
        return {}
    is_full = config.get("finetuning_type") == "full"
    return {"quantization_bit": 4} | ({"finetuning_type": "lora", "lora_target": "all"} if is_full else {})


def _unsloth(method: str, processes: int) -> list[OwnChange]:
    unsloth = "get_peft_model.use_gradient_checkpointing"

    made = [
        OwnChange("checkpointing", _set(unsloth, "unsloth")),
        *_rows("per_device_train_batch_size", "gradient_accumulation_steps", 8),
        OwnChange("sleep", _set("from_pretrained.unsloth_vllm_standby", True, only_where=_is_fast)),
        *(
            OwnChange("share", _lower("from_pretrained.gpu_memory_utilization", share, 0.5, _is_fast))
            for share in (0.5, 0.3)
        ),
        OwnChange("optimizer", _set("optim", "adamw_8bit"), _EIGHT_BIT),
        OwnChange("adapter", _set("from_pretrained.load_in_4bit", True), _QLORA),
    ]
    key = "max_completion_length" if method in ("grpo", "rloo") else "from_pretrained.max_seq_length"
    return [*made, *_lengths(key, 2048)]


def _is_fast(config: Config) -> bool:
    return config.get("from_pretrained.fast_inference") is True


def _script(method: str, processes: int) -> list[OwnChange]:
    """TRL's changes, with the keys of a script's calls."""
    lora: dict[str, object] = {"get_peft_model.r": 16, "get_peft_model.target_modules": "all-linear"}
    bits = {"from_pretrained.load_in_4bit": True}

    def adapted(config: Config) -> Mapping[str, object]:
        return {} if any(key.startswith("get_peft_model.") for key in config) else lora

    def rounded(config: Config) -> Mapping[str, object]:
        return {} if config.get("from_pretrained.load_in_4bit") is True else {**adapted(config), **bits}

    others = [one for one in _trl(method, processes) if one.kind not in ("adapter", "checkpointing")]
    adapters = [OwnChange("adapter", adapted, _LORA), OwnChange("adapter", rounded, f"{_LORA}; {_QLORA}")]
    checkpointing = OwnChange("checkpointing", _set("gradient_checkpointing", True))
    return [checkpointing, *others, *adapters]


def _counts_rows(config: Config) -> bool:
    return config.get(f"{_AR}.actor.use_dynamic_bsz") is not True


def _fewer_tokens(share: int) -> Edit:
    """Micro-batches of fewer tokens where verl counts them so, each as long as the longest row at least."""
    key = f"{_AR}.actor.ppo_max_token_len_per_gpu"

    def edit(config: Config) -> Mapping[str, object]:
        tokens = config.get(key, 16384)
        lengths = [config.get(f"data.max_{part}_length", 512) for part in ("prompt", "response")]
        if _counts_rows(config) or not all(isinstance(one, int) for one in (tokens, *lengths)):
            return {}
        return {key: tokens // share} if tokens // share >= sum(lengths) else {}

    return edit


def _verl(method: str, processes: int) -> list[OwnChange]:
    if method == "sft":
        micro_batch = "data.micro_batch_size_per_gpu"
        return [
            OwnChange("rows", lambda config: {micro_batch: 1} if config.get(micro_batch, 4) != 1 else {}),
            OwnChange("checkpointing", _set("model.enable_gradient_checkpointing", True, default=True)),
            OwnChange("away", _set("model.fsdp_config.cpu_offload", True)),
            *_lengths("data.max_length", 1024),
        ]
    micro_batch = f"{_AR}.actor.ppo_micro_batch_size_per_gpu"
    return [
        OwnChange("checkpointing", _set(f"{_AR}.model.enable_gradient_checkpointing", True, default=True)),
        *(OwnChange("rows", _set(micro_batch, rows, only_where=_counts_rows)) for rows in (4, 2, 1)),
        *(OwnChange("rows", _fewer_tokens(share)) for share in (2, 4, 8)),
        OwnChange("loss", _set(f"{_AR}.model.use_fused_kernels", True)),
        OwnChange("sleep", _set(f"{_AR}.rollout.free_cache_engine", True, default=True)),
        *(OwnChange("share", _set(f"{_AR}.rollout.gpu_memory_utilization", share)) for share in (0.5, 0.3)),
        OwnChange("offloading", _set(f"{_AR}.model.enable_activation_offload", True)),
        OwnChange(
            "away",
            _both(
                {
                    f"{_AR}.actor.fsdp_config.param_offload": True,
                    f"{_AR}.actor.fsdp_config.optimizer_offload": True,
                }
            ),
        ),
        OwnChange("adapter", _both({f"{_AR}.model.lora_rank": 32, f"{_AR}.model.lora_alpha": 64}), _LORA),
        *_lengths("data.max_response_length", 512),
    ]
