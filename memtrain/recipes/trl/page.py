"""The page for users of TRL, in Markdown: every key, with its counterpart."""

from __future__ import annotations

from collections.abc import Mapping

from memtrain.recipes.trl import keys
from memtrain.recipes.trl.rules import Automatic, RecipeKey, Rule, Unmapped
from memtrain.recipes.trl.sampling import NO_VLLM_KEY

_HEAD = """\
# Migrating from TRL

Written from the rules in `memtrain/recipes/trl/` by `make docs-reference`; the keys are those of TRL 1.16.

```
memtrain import-trl sft.yaml --method sft -o my.yaml    # the YAML file that `trl sft --config` takes
memtrain check my.yaml
memtrain sft my.yaml --dry-run                          # what it will need, before anything starts
```

TRL's own defaults (three epochs, a linear schedule without warm-up, seed 42, LoRA
dropout 0.05, ...) are written into the recipe with the comment `TRL's default`, so that the recipe trains
what the configuration trained. Keys without a counterpart are listed on the screen and at the head of the
recipe. The batch is that of all devices: `--processes 8` (or `num_processes` in the file) says how many
there were.

What works differently:

- **Packing and padding-free.** Rows never see each other, on any attention back end; `padding_free` works
  for every method. Batches are made by the plan: `per_device_train_batch_size` is only a factor of
  `train.batch_size`.
- **The loss of a step** is the mean over the loss tokens of the whole step, over all devices and
  micro-batches.
- **Pairs.** A prompt is computed once for its answers (`length.shared_prompts`).
- **GRPO, RLOO.** A step is counted in completions: `train.batch_size` divided by
  `generate.num_generations` is its number of prompts.
- **GKD** is `--method distill`. Its `beta` means the same here (0: forward KL, 1: reverse KL). Its
  `temperature` is that of the completions alone; `distill.temperature` is that of the loss, which TRL takes
  at 1. A share `lmbda` of the optimizer steps, and not of the micro-batches, learns from completions.
- **Resuming** needs no flag: the same command continues the run, bit for bit (on a GPU with
  `train.deterministic`).
"""

_GROUPS: tuple[tuple[str, Mapping[str, Rule]], ...] = (
    ("Model and adapter", keys.MODEL),
    ("Data and lengths", keys.DATA),
    ("Steps, optimizer, memory", keys.TRAINING),
    ("Evaluation, saving, logging", keys.RUN),
    ("Devices", keys.DEVICES),
    ("DPO, KTO, reward models", keys.PREFERENCES),
    ("GRPO, RLOO", keys.ONLINE),
    ("GKD (`memtrain distill`)", keys.DISTILLATION),
    ("Sampling by vLLM", keys.VLLM),
    ("Keys of earlier versions", keys.OLD),
)

_TOGETHER: Mapping[str, str] = {
    **dict.fromkeys(("dtype", "torch_dtype", "bf16", "fp16"), "`model.dtype`, `optim.master_weights`"),
    "model_init_kwargs": "`model.dtype`, `model.revision`; the rest is listed",
    **dict.fromkeys(
        ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save"),
        "`model.adapter`",
    ),
    "lora_target_parameters": "`model.adapter.target_parameters`, beside named `target_modules`",
    "deepspeed": "`cluster.engine: zero1`, `zero2` or `zero3`, `cluster.cpu_offload`",
    **dict.fromkeys(("fsdp", "fsdp_config"), "`cluster.engine: fsdp2`, `cluster.cpu_offload`"),
    "use_rslora": "`model.adapter.rslora`",
    "use_dora": "`model.adapter.kind: dora`",
    "load_in_8bit": "`model.quantize: 8bit`",
    "load_in_4bit": "`model.quantize: 4bit`",
    "disable_dropout": "`model.adapter.dropout: 0.0`",
    **dict.fromkeys(("datasets", "dataset_name", "dataset_config", "dataset_train_split"), "`data.train`"),
    "dataset_test_split": "`data.eval`, where `eval_strategy` is not `no`",
    **dict.fromkeys(("packing", "packing_strategy"), "`length.packing`"),
    "train_sampling_strategy": "`train.shuffle`, `length.group_by_length`",
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        "`train.batch_size`: their product, times the devices",
    ),
    "num_train_epochs": "`train.epochs`",
    "max_steps": "`train.max_steps`",
    "lr_scheduler_type": "`optim.schedule`",
    "lr_scheduler_kwargs": "`optim.min_lr_ratio`",
    **dict.fromkeys(
        ("warmup_steps", "warmup_ratio"),
        "`optim.warmup_steps` or `optim.warmup_ratio`; the first of w steps has 1/w of the rate, TRL's has 0",
    ),
    "optim": "`optim.kind`",
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "`optim.betas`"),
    "label_smoothing_factor": "`sft.label_smoothing`",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "eval_steps"), "`eval.every_steps`"),
    **dict.fromkeys(("save_strategy", "save_steps"), "`save.every_steps`, `save.keep_best`"),
    "save_total_limit": "`save.keep`",
    "report_to": "`log.trackers`",
    "use_cpu": "`cluster.device: cpu`",
    "accelerate_config": "`cluster.engine`",
    "num_processes": "a factor of `train.batch_size`",
    "loss_type": "`sft.loss`, `dpo.loss`, `kto.loss`, `grpo.loss`",
    "use_bias_correction_kl": "`grpo.unbiased_kl`",
    **dict.fromkeys(("reward_funcs", "reward_model_name_or_path", "reward_weights"), "`rewards.functions`"),
    **dict.fromkeys(
        ("generation_batch_size", "steps_per_generation"),
        "`grpo.steps_per_rollout`, `rloo.steps_per_rollout`",
    ),
    "max_prompt_length": "`length.max_prompt`",
    "teacher_model_init_kwargs": "`distill.teacher_dtype`, `distill.teacher_revision`; the rest is listed",
    "use_vllm": "`generate.backend: vllm`",
    **dict.fromkeys(
        ("vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
        "`generate.vllm.server`",
    ),
    "vllm_gpu_memory_utilization": "`generate.vllm.memory_share`",
    "vllm_enable_sleep_mode": "`generate.vllm.sleep`",
    **dict.fromkeys(
        ("vllm_server_timeout", "vllm_group_port"), "not needed: a server is used over HTTP only"
    ),
    "vllm_importance_sampling_correction": "`grpo.importance_correction: none`, where it is false",
    "vllm_importance_sampling_mode": "`grpo.importance_correction`",
    "vllm_importance_sampling_clip_min": "`grpo.importance_correction_min`",
    **dict.fromkeys(
        ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
        "`grpo.importance_correction_max`",
    ),
    **{key: f"no counterpart: {why}" for key, why in NO_VLLM_KEY.items()},
    "ds3_gather_for_generation": "`generate.gather_weights`, with `cluster.engine: zero3`",
}


def trl_page() -> str:
    """docs/coming-from-trl.md. Written by `make docs-reference`."""
    parts = [_HEAD]
    for name, rules in _GROUPS:
        rows = [f"| `{key}` | {_becomes(key, rule)} |" for key, rule in rules.items()]
        parts += [f"## {name}", "", "| TRL | memtrain |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def _becomes(key: str, rule: Rule) -> str:
    match rule:
        case RecipeKey():
            words = ", ".join(
                f"`{_word(old)}` is `{_word(new)}`"
                for old, new in rule.values.items()
                if new is not None and type(old) is not bool
            )
            return f"`{rule.key.replace('{method}', 'METHOD')}`" + (f" ({words})" if words else "")
        case Automatic():
            return f"not needed: {rule.why}"
        case Unmapped():
            return f"no counterpart: {rule.why}"
        case _:
            return _TOGETHER.get(key, "read with the keys beside it, or listed")


def _word(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
