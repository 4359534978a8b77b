"""Words of TRL, Axolotl, LLaMA-Factory and Unsloth with a counterpart of another form, or with none."""

from memtrain.recipes.reading.peer_run_words import NOT_DONE as _NOT_DONE
from memtrain.recipes.reading.peer_run_words import PEER_RUN_WORDS

_LAYERS = f"{_NOT_DONE}; train every weight, or an adapter (`model.adapter`)"
_ONE_RATE = f"{_NOT_DONE}; all weights have one rate, `optim.lr`"
_OTHER_OPTIMIZER = (
    "`optim.kind` (the kinds are listed there; Adam-mini, APOLLO, BAdam and GaLore are not among them)"
)
_RESPONSES = "`data.assistant_only_loss`, or `data.completion_only_loss` of prompts with completions"
_TRACKER = "`log.trackers`, and `log.project`; for the rest, use the tracker's environment variables"
_PER_EPOCH = "(in steps; not given: at the end of every epoch)"
_KERNELS = "`model.kernels`, or `model.liger`"
_CLIP = "`grpo.clip_low`, and `grpo.clip_high`"
DOUBLE_QUANT = "remove it: `model.quantize: 4bit` is NF4 with double quantization always"

_SHAPE = "remove it: the architecture is read from the model's config.json"
_MERGED_BEFORE = "remove it: merge that adapter (memtrain merge), and name the result in `model.path`"
_OTHER_BITS = f"{_NOT_DONE}; the forms of weights are those of `model.quantize`"
_FROM_ZERO = f"{_NOT_DONE}; an adapter begins at zero"
_TARGETS = "`model.adapter.target_modules`"
_TEXT = "remove it: memtrain trains on text; vision-language models are planned"
_PACKS_ALL = "remove it: rows are packed over the whole data (`length.packing: bfd`)"

PEER_WORDS: dict[str, str] = {
    **PEER_RUN_WORDS,
    # model
    **dict.fromkeys(
        ("model_type", "tokenizer_type", "tokenizer_use_fast", "is_mistral_derived_model", "strict"), _SHAPE
    ),
    "_component_": "remove it: `model.path`, `data.train` and `optim.kind` say it",
    **dict.fromkeys(("checkpointer", "checkpoint_dir", "checkpoint_files", "sft_model_path"), "`model.path`"),
    **dict.fromkeys(("lora_model_dir", "adapter_name_or_path", "create_new_adapter"), _MERGED_BEFORE),
    "pure_bf16": "`model.dtype: bfloat16`, and `optim.master_weights: false`",
    "load_in_16bit": "`model.dtype`, without `model.quantize`",
    "quantization_method": "`model.quantize` (4bit or 8bit, by bitsandbytes)",
    "quantizer": "`model.quantize` (4bit or 8bit)",
    **dict.fromkeys(
        ("gptq", "torchao", "fp8", "qat", "load_in_fp8", "qat_scheme", "use_fp8_training", "float8_kv_cache"),
        _OTHER_BITS,
    ),
    "peft_use_rslora": "`model.adapter.rslora`",
    **dict.fromkeys(("init_lora_weights", "peft_init_lora_weights", "pissa_init", "pissa_iter"), _FROM_ZERO),
    **dict.fromkeys(
        (
            *("layers_to_transform", "layers_pattern", "peft_layers_to_transform"),
            *("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output"),
            *("finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules"),
        ),
        _TARGETS,
    ),
    "disable_dropout": "`model.adapter.dropout: 0.0`",
    "optim_target_modules": _OTHER_OPTIMIZER,
    **dict.fromkeys(("galore_rank", "galore_target"), _OTHER_OPTIMIZER),
    "lr_groups": _ONE_RATE,
    **dict.fromkeys(("use_llama_pro", "freeze_extra_modules"), _LAYERS),
    "eager_attention": "`model.attention: transformers`",
    "flex_attention": "`model.attention: flex`",
    "s2_attention": _NOT_DONE,
    **dict.fromkeys(
        ("booster", "use_kernels", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), _KERNELS
    ),
    "overrides_of_model_config": f"{_NOT_DONE}; positions are scaled by `model.rope_scaling`",
    "cast_lm_head_to_fp32": "remove it: log-probs are summed in float32",
    "eos_token": "`model.tokenizer` (another end token is set in the files of a tokenizer)",
    "pad_token": "remove it: padding is neither attended to nor in the loss",
    "eot_tokens": "remove it: the end of a turn is that of the chat template",
    "tokens": "`model.add_tokens`",
    "fix_untrained_tokens": f"{_NOT_DONE}; new tokens are named in `model.add_tokens`",
    **dict.fromkeys(("finetune_vision_layers", "media_dir", "image_max_pixels", "video_max_pixels"), _TEXT),
    # rows
    "pretraining_dataset": "`data.train`, with `data.streaming`",
    "dataset_kwargs": "remove it: rows are prepared in one way, and rows of token ids are used as they are",
    "shuffle_dataset": "`train.shuffle`",
    "disable_shuffling": "`train.shuffle: false`",
    "train_on_input": "`data.completion_only_loss` (its opposite)",
    **dict.fromkeys(("instruction_part", "response_part"), _RESPONSES),
    "ignore_pad_token_for_loss": "remove it: padding is never in the loss",
    "tool_format": "remove it: the chat template writes tools and their calls",
    "efficient_eos": "remove it: the end of a turn is that of the chat template",
    "excess_length_strategy": "`length.truncation`",
    "min_sample_len": f"{_NOT_DONE}; short rows are trained on",
    **dict.fromkeys(("packed", "neat_packing"), "`length.packing: bfd`"),
    **dict.fromkeys(
        ("sample_packing_group_size", "sample_packing_bin_size", "multipack_real_batches"), _PACKS_ALL
    ),
    "use_logits_to_keep": "remove it: logits are made of loss tokens alone",
    "base_model_config": "`model.config`",
    "is_llama_derived_model": "remove it: the model's own configuration says so",
    "lora_fan_in_fan_out": "remove it: it is known by the kind of the layer",
    "use_unsloth": "remove it: fused kernels are chosen by `model.kernels`",
    "fast_inference": "`generate.backend: vllm`",
    "full_finetuning": "remove it, with `model.adapter`: without an adapter every weight is trained",
    "bias": f"{_NOT_DONE}; an adapter trains no biases",
    "loftq_config": _NOT_DONE,
    "xformers_attention": "`model.attention: auto`",
    "shift_attn": _NOT_DONE,
    "mixture_of_depths": _NOT_DONE,
    "double_quantization": DOUBLE_QUANT,
    "upcast_layernorm": "remove it: norms are computed in float32",
    "additional_target": "`model.adapter.modules_to_save`",
    "unfrozen_parameters": _LAYERS,
    "freeze_trainable_layers": _LAYERS,
    "freeze_trainable_modules": _LAYERS,
    "special_tokens": "`model.add_tokens` for new ones; the end of a turn is that of the chat template",
    "added_tokens_overrides": "`model.add_tokens`",
    "new_special_tokens": "`model.add_tokens`",
    "resize_vocab": "remove it: the embeddings grow with `model.add_tokens`",
    "token": "remove it: the hub reads HF_TOKEN, or log in with hf auth login",
    "plugins": _KERNELS,
    "liger_rope": _KERNELS,
    "liger_rms_norm": _KERNELS,
    "liger_glu_activation": _KERNELS,
    "cut_cross_entropy": "`memory.loss` (the chunked loss is taken by default)",
    "resize_token_embeddings_to_32x": "remove it: the embeddings have the rows that `model.add_tokens` needs",
    "freeze_vision_tower": "remove it: memtrain trains on text; vision-language models are planned",
    "freeze_multi_modal_projector": "remove it: memtrain trains on text; vision-language models are planned",
    "unsloth": "remove it: fused kernels are chosen by `model.kernels`",
    # data
    "mask_prompt": "`data.completion_only_loss`",
    "num_samples": "`data.train.limit`",
    "shards": "`data.train.limit`",
    "train_on_responses_only": _RESPONSES,
    "response_template": _RESPONSES,
    "instruction_template": _RESPONSES,
    "train_on_eos": "`data.end_token` (the end of a completion is trained on)",
    "enable_thinking": "`data.chat_template_kwargs: {enable_thinking: false}`",
    "system": "`data.system_prompt`",
    "images": "remove it: memtrain trains on text; vision-language models are planned",
    "vision_tower": "remove it: memtrain trains on text; vision-language models are planned",
    "validation_file": "`data.eval`",
    "tokenized_path": "`data.cache_dir`",
    "skip_prepare_dataset": "remove it: tokens that are in `data.cache_dir` are used again",
    "shuffle_merged_datasets": "`train.shuffle`",
    "curriculum_sampling": "`train.shuffle: false` (rows in their order)",
    "buffer_size": "remove it: rows are shuffled over the whole data (`data.streaming` with a limit: 10,000)",
    "dataloader_prefetch_factor": _NOT_DONE,
    # steps
    "learning_rate_scheduler": "`optim.schedule`",
    "loraplus_lr_ratio": _ONE_RATE,
    "loraplus_lr_embedding": _ONE_RATE,
    "embedding_learning_rate": _ONE_RATE,
    "relora_steps": _NOT_DONE,
    **dict.fromkeys(
        ("use_galore", "use_badam", "badam_mode", "use_apollo", "use_adam_mini"), _OTHER_OPTIMIZER
    ),
    "random_state": "`train.seed`",
    "saves_per_epoch": f"`save.every_steps` {_PER_EPOCH}",
    "evals_per_epoch": f"`eval.every_steps` {_PER_EPOCH}",
    "save_every": "`save.every_steps`",
    "eval_every": "`eval.every_steps`",
    "export_dir": "remove it: the model is in RUN/final, and memtrain export writes it elsewhere",
    "compute_accuracy": "remove it: the accuracy of tokens is measured by itself",
    "include_num_input_tokens_seen": "remove it: tokens are counted in metrics.jsonl",
    **dict.fromkeys(
        ("wandb_run_id", "wandb_watch", "wandb_entity", "mlflow_experiment_name", "comet_project_name"),
        _TRACKER,
    ),
    # preferences and online methods
    "dpo_beta": "`dpo.beta`",
    "pref_loss": "`dpo.loss`",
    "pref_ftx": "`dpo.loss: [sigmoid, sft]`, and `dpo.loss_weights`",
    "epsilon": _CLIP,
    "epsilon_high": "`grpo.clip_high`",
    "importance_sampling_level": "`grpo.level`",
    "mask_truncated_completions": "`grpo.mask_truncated`",
    "steps_per_generation": "`grpo.steps_per_rollout`",
    "vllm_server_host": "`generate.vllm.server`",
}
"""A word of another trainer, and the key here in its place or why it is to be removed."""
