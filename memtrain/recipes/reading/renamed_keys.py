"""Old spellings -> ours: keys and values of TRL, Transformers, PEFT, Axolotl and LLaMA-Factory recipes."""

from __future__ import annotations

_ROWS = "`train.batch_size` (rows of one optimizer step over all devices; accumulation is derived from it)"
_MICRO = "`train.micro_batch_size` (rows that one device takes at once; auto by default)"
_CHECKPOINTING = (
    "`memory.activation_checkpointing` (on, off or auto; auto by default: where the run does not fit without)"
)
_CHUNKED = "`memory.loss` (the chunked loss is taken by default)"
_RESUME = "remove it: a run continues from its run folder by itself; `--no-resume` starts over"
_ENGINE = "`cluster.engine` (auto, ddp, fsdp2, zero1, zero2 or zero3)"
_PRECISION = "`model.dtype` (bfloat16 where the device computes in it, by default)"
_ULYSSES = "`cluster.context_parallel`, and `cluster.context_parallel_mode: ulysses` for Ulysses"

RENAMED_KEYS: dict[str, str] = {
    # model
    "model_name_or_path": "`model.path` (memtrain import reads a whole file of another trainer)",
    "model_name": "`model.path`",
    "base_model": "`model.path`",
    "pretrained_model_name_or_path": "`model.path`",
    "model_revision": "`model.revision`",
    "model_init_kwargs": "`model.dtype` and `model.attention`",
    "tokenizer_name": "`model.tokenizer`",
    "tokenizer_name_or_path": "`model.tokenizer`",
    "tokenizer_config": "`model.tokenizer`",
    "chat_template_path": "`model.chat_template`",
    "chat_template_jinja": "`model.chat_template`",
    "template": "`model.chat_template`",
    "torch_dtype": "`model.dtype`",
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "tf32": _PRECISION,
    "attn_implementation": "`model.attention`",
    "flash_attention": "`model.attention: flash`",
    "flash_attn": "`model.attention: flash`",
    "sdp_attention": "`model.attention: auto`",
    "use_liger_kernel": "`model.liger`",
    "enable_liger_kernel": "`model.liger`",
    "use_liger": "`model.liger`",
    # adapters and quantization
    "use_peft": "`model.adapter` (an empty `{}` takes the defaults)",
    "adapter": "`model.adapter`",
    "finetuning_type": "`model.adapter` (not given: every weight is trained)",
    "lora_r": "`model.adapter.r`",
    "lora_rank": "`model.adapter.r`",
    "lora_alpha": "`model.adapter.alpha`",
    "lora_dropout": "`model.adapter.dropout`",
    "lora_target_modules": "`model.adapter.target_modules`",
    "lora_target_linear": "`model.adapter.target_modules: all-linear`",
    "lora_target": "`model.adapter.target_modules`",
    "lora_modules_to_save": "`model.adapter.modules_to_save`",
    "use_rslora": "`model.adapter.rslora`",
    "use_dora": "`model.adapter.kind: dora`",
    "peft_use_dora": "`model.adapter.kind: dora`",
    "load_in_4bit": "`model.quantize: 4bit`",
    "load_in_8bit": "`model.quantize: 8bit`",
    "quantization_bit": "`model.quantize` (4bit or 8bit)",
    "bnb_4bit_quant_type": "`model.quantize: 4bit` (always NF4)",
    "use_bnb_nested_quant": "`model.quantize: 4bit`",
    # data
    "dataset_name": "`data.train`",
    "datasets": "`data.train` (one source, or a list of them)",
    "dataset": "`data.train`",
    "dataset_path": "`data.train`",
    "train_file": "`data.train`",
    "dataset_config": "`data.train.name`",
    "dataset_train_split": "`data.train.split`",
    "dataset_test_split": "`data.eval.split`",
    "dataset_streaming": "`data.streaming`",
    "test_split_size": "`data.eval_fraction`",
    "val_set_size": "`data.eval_fraction`",
    "val_size": "`data.eval_fraction`",
    "dataset_text_field": "`data.columns.text`",
    "dataset_num_proc": "`data.processes`",
    "dataset_processes": "`data.processes`",
    "preprocessing_num_workers": "`data.processes`",
    "train_on_inputs": "`data.completion_only_loss` (its opposite)",
    "max_samples": "`data.train.limit`",
    "dataset_prepared_path": "`data.cache_dir`",
    # length
    "max_seq_length": "`length.max_length`",
    "max_seq_len": "`length.max_length`",
    "sequence_len": "`length.max_length`",
    "cutoff_len": "`length.max_length`",
    "model_max_length": "`length.max_length`",
    "block_size": "`length.max_length`",
    "max_prompt_length": "`length.max_prompt`",
    "max_completion_length": "`generate.max_tokens`, or `length.max_completion` of answers that are there",
    "truncation_mode": "`length.truncation`",
    "packing_strategy": "`length.packing` (none, bfd, bfd_split or wrapped)",
    "sample_packing": "`length.packing: bfd`",
    "eval_packing": "`length.packing`",
    "eval_sample_packing": "`length.packing`",
    "pad_to_sequence_len": "`length.pad_to_multiple_of`",
    "group_by_length": "`length.group_by_length`",
    "train_sampling_strategy": "`length.group_by_length`",
    # how much, how long
    "per_device_train_batch_size": _MICRO,
    "micro_batch_size": _MICRO,
    "per_device_eval_batch_size": _MICRO,
    "eval_batch_size": _MICRO,
    "gradient_accumulation_steps": _ROWS,
    "train_batch_size": _ROWS,
    "global_batch_size": _ROWS,
    "batch_size": _ROWS,
    "num_train_epochs": "`train.epochs`",
    "num_epochs": "`train.epochs`",
    "data_seed": "`train.seed`",
    "auto_find_batch_size": "`train.micro_batch_size: auto`",
    # optimizer
    "learning_rate": "`optim.lr`",
    "optimizer": "`optim.kind`",
    "adam_beta1": "`optim.betas`",
    "adam_beta2": "`optim.betas`",
    "adam_epsilon": "`optim.eps`",
    "lr_scheduler": "`optim.schedule`",
    "lr_scheduler_type": "`optim.schedule`",
    "lr_scheduler_kwargs": "`optim.min_lr_ratio`",
    "cosine_min_lr_ratio": "`optim.min_lr_ratio`",
    "gradient_clipping": "`optim.max_grad_norm`",
    "neftune_noise_alpha": "`optim.neftune_alpha`",
    "label_smoothing_factor": "`sft.label_smoothing`",
    "loss_type": "`sft.loss`",
    # memory
    "gradient_checkpointing": _CHECKPOINTING,
    "gradient_checkpointing_kwargs": _CHECKPOINTING,
    "activation_checkpointing_kwargs": _CHECKPOINTING,
    "use_liger_loss": _CHUNKED,
    "use_liger_fused_ce": _CHUNKED,
    "liger_fused_linear_cross_entropy": _CHUNKED,
    "torch_empty_cache_steps": "`memory.expandable_segments`",
    # saving, evaluation, logs
    "output_dir": "`run_dir`",
    "overwrite_output_dir": _RESUME,
    "resume_from_checkpoint": _RESUME,
    "save_strategy": "`save.every_steps` (not given: at the end of every epoch)",
    "save_steps": "`save.every_steps`",
    "save_total_limit": "`save.keep`",
    "load_best_model_at_end": "`save.keep_best`",
    "eval_strategy": "`eval.every_steps` (not given: at the end of every epoch)",
    "evaluation_strategy": "`eval.every_steps` (not given: at the end of every epoch)",
    "eval_steps": "`eval.every_steps`",
    "eval_on_start": "`eval.at_start`",
    "do_train": "remove it: the command gives the method",
    "do_eval": "`data.eval_fraction` or `data.eval`",
    "logging_steps": "`log.every_steps`",
    "report_to": "`log.trackers`",
    "wandb_project": "`log.project`",
    "run_name": "`run_dir`",
    # devices
    "use_cpu": "`cluster.device: cpu`",
    "no_cuda": "`cluster.device: cpu`",
    "num_processes": "`cluster.processes`",
    "num_gpus": "`cluster.processes`",
    "cp_size": "`cluster.context_parallel`",
    "context_parallel_size": "`cluster.context_parallel`",
    "sp_size": _ULYSSES,
    "sequence_parallel_size": _ULYSSES,
    "sequence_parallel_degree": _ULYSSES,
    "ulysses_sequence_parallel_size": _ULYSSES,
    "deepspeed": _ENGINE,
    "fsdp": _ENGINE,
    "fsdp_config": _ENGINE,
    "accelerate_config": _ENGINE,
    "stage": "`method`",
    "rl": "`method`",
    # sampling
    "use_vllm": "`generate.backend: vllm`",
    "vllm_mode": "`generate.vllm.server`; not given: a process of the run",
    "vllm_sleep_enabled": "`generate.vllm.sleep`",
    "vllm_enable_sleep_mode": "`generate.vllm.sleep`",
    "vllm_gpu_memory_utilization": "`generate.vllm.memory_share`",
    "num_generations": "`generate.num_generations`",
}
"""Replacements for keys of other tools; the way-out line of the error says `write <this>`."""

RENAMED_VALUES: dict[str, dict[object, str]] = {
    "length.packing": {True: "bfd", False: "none", "bfd-requeue": "bfd_split", "ffd": "bfd"},
    "length.truncation": {"right": "keep_start", "left": "keep_end", True: "keep_start"},
    "model.dtype": {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "fp32": "float32",
        "float": "float32",
        "torch.bfloat16": "bfloat16",
        "torch.float16": "float16",
        "torch.float32": "float32",
    },
    "model.attention": {
        "flash_attention_2": "flash",
        "flash_attention_3": "flash",
        "fa2": "flash",
        "flex_attention": "flex",
        "sdpa": "auto",
        "eager": "transformers",
    },
    "model.quantize": {4: "4bit", 8: "8bit", "nf4": "4bit", "int8": "8bit", True: "4bit", False: "none"},
    "optim.kind": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "paged_adamw_32bit": "paged_adamw",
    },
    "optim.schedule": {
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
        "warmup_stable_decay": "wsd",
    },
    "sft.loss": {"chunked_nll": "nll"},
    "method": {"qlora": "sft", "lora": "sft", "pt": "sft", "finetune": "sft"},
}
"""Replacements for values of other tools, by the key that holds them."""


def renamed_value(key: str, value: object) -> str | None:
    """Our word for another tool's value of a key; None when there is none (true is not 1)."""
    for old, new in RENAMED_VALUES.get(key, {}).items():
        if type(old) is type(value) and old == value:
            return new
    return None
