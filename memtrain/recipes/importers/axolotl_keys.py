"""Every key of Axolotl's configuration, with its rule. Schema: axolotl 0.19, commit 067b021c."""

from __future__ import annotations

from memtrain.recipes.importers.axolotl_run_keys import DEVICES, ONLINE, PREFERENCES, RUN, TRAINING
from memtrain.recipes.importers.tool import ToolRule, TrlKey
from memtrain.recipes.trl.rules import Automatic, ReadTogether, RecipeKey, Unmapped

_MODEL_CODE = Automatic("the architecture is read from the model's config.json")
_UPLOAD = Unmapped("nothing is uploaded; `hf upload` takes the run's final/ folder")
_PREPARED = Automatic("tokenized rows are kept in memtrain's own cache (data.cache_dir)")
_LOADER = Automatic("rows are read from memory-mapped files; there are no loader processes to set")
_EXOTIC = Unmapped("methods that memtrain does not have")
_KERNEL = Unmapped("the tool's own kernels; `model.liger` and `memory.loss` name the available kernels")
_IMAGES = Unmapped("rows are text")
_PEFT = Unmapped("LoRA here has a rank, a scale, a dropout and module names")

MODEL: dict[str, ToolRule] = {
    "base_model": TrlKey("model_name_or_path"),
    "revision_of_model": TrlKey("model_revision"),
    "tokenizer_config": RecipeKey("model.tokenizer"),
    "chat_template_jinja": ReadTogether(),
    "chat_template": ReadTogether(),
    "chat_template_kwargs": TrlKey("chat_template_kwargs"),
    "trust_remote_code": TrlKey("trust_remote_code"),
    **dict.fromkeys(
        (
            "base_model_config",
            "cls_model_config",
            "type_of_model",
            "model_type",
            "is_falcon_derived_model",
            "is_llama_derived_model",
            "is_mistral_derived_model",
            "is_qwen_derived_model",
            "tokenizer_type",
            "tokenizer_use_fast",
            "tokenizer_legacy",
            "tokenizer_use_mistral_common",
            "tokenizer_save_jinja_files",
            "low_cpu_mem_usage",
            "experimental_skip_move_to_device",
            "save_safetensors",
            "num_labels",
            "strict",
        ),
        _MODEL_CODE,
    ),
    **dict.fromkeys(
        (
            "special_tokens",
            "bos_token",
            "eos_token",
            "pad_token",
            "unk_token",
            "additional_special_tokens",
            "tokens",
            "added_tokens_overrides",
            "eot_tokens",
            "fix_untrained_tokens",
            "resize_token_embeddings_to_32x",
            "mean_resizing_embeddings",
            "shrink_embeddings",
        ),
        ReadTogether(),
    ),
    "overrides_of_model_config": ReadTogether(),
    "overrides_of_model_kwargs": Unmapped("arguments of the model's loading"),
    "rope_scaling": ReadTogether(),
    "embeddings_skip_upcast": Automatic("embeddings are held in the run's precision"),
    "reinit_weights": Unmapped("`model.config` instead of `model.path` starts from random weights"),
    "bf16": ReadTogether(),
    "fp16": ReadTogether(),
    "bfloat16": ReadTogether(),
    "float16": ReadTogether(),
    "float32": ReadTogether(),
    "tf32": Automatic("TensorFloat-32 keeps torch's setting"),
    "fp8": Unmapped("FP8 training"),
    "fp8_enable_fsdp_float8_all_gather": Unmapped("FP8 training"),
    **dict.fromkeys(("fp32_norms", "fp32_norm_classes"), Automatic("norms are computed in float32")),
    **dict.fromkeys(
        (
            "attn_implementation",
            "flash_attention",
            "sdp_attention",
            "flex_attention",
            "eager_attention",
            "xformers_attention",
            "sage_attention",
            "s2_attention",
        ),
        ReadTogether(),
    ),
    **dict.fromkeys(
        (
            "flex_attn_compile_kwargs",
            "flash_attn_cross_entropy",
            "flash_attn_fuse_mlp",
            "flash_attn_rms_norm",
            "flash_attn_d512",
            "flash_optimum",
            "gemma4_hybrid_attn_impl",
            "large_head_attention",
            "sdpa_varlen",
            "fused_attn_kernel",
            "experts_implementation",
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
            "lora_embedding_kernel",
            "use_kernels",
            "use_onebitllms",
            "llama4_linearized_experts",
            "liger_use_token_scaling",
        ),
        _KERNEL,
    ),
    **dict.fromkeys(("scaling_softmax", "scaling_softmax_factor", "scaling_softmax_bias"), _EXOTIC),
    **dict.fromkeys(
        (
            "liger_rope",
            "liger_rms_norm",
            "liger_rms_norm_gated",
            "liger_layer_norm",
            "liger_swiglu",
            "liger_glu_activation",
            "liger_cross_entropy",
            "liger_fused_linear_cross_entropy",
            "cut_cross_entropy",
            "chunked_cross_entropy",
            "plugins",
        ),
        ReadTogether(),
    ),
    "chunked_cross_entropy_num_chunks": Automatic("memory.loss_chunk_size is the size of a tile"),
    **dict.fromkeys(
        ("processor_type", "processor_kwargs", "image_*", "role_boundaries", "freeze_mm_modules"), _IMAGES
    ),
    **dict.fromkeys(("model_quantization_config*", "qat", "quantization", "gptq"), _EXOTIC),
}
"""Keys about the model and how it computes."""

ADAPTER: dict[str, ToolRule] = {
    "adapter": ReadTogether(),
    "load_in_8bit": TrlKey("load_in_8bit"),
    "load_in_4bit": TrlKey("load_in_4bit"),
    "lora_r": TrlKey("lora_r"),
    "lora_alpha": TrlKey("lora_alpha"),
    "lora_dropout": TrlKey("lora_dropout"),
    "lora_target_modules": ReadTogether(),
    "lora_target_linear": ReadTogether(),
    "lora_modules_to_save": TrlKey("lora_modules_to_save"),
    "peft_use_dora": TrlKey("use_dora"),
    "peft_use_rslora": TrlKey("use_rslora"),
    "lora_model_dir": Unmapped("an adapter that is trained on: merge it into its base model first"),
    "lora_target_parameters": TrlKey("lora_target_parameters"),
    "quantize_moe_experts": ReadTogether(),
    "unfrozen_parameters": Unmapped(
        "some weights trained, others frozen: `model.adapter.modules_to_save` is nearest"
    ),
    **dict.fromkeys(
        (
            "lora_fan_in_fan_out",
            "lora_on_cpu",
            "peft_autocast_adapter_dtype",
            "qlora_sharded_model_loading",
            "peft_ensure_weight_tying",
        ),
        Automatic("adapters are float32, and are made where the model is"),
    ),
    **dict.fromkeys(
        (
            "lora_alpha_pattern",
            "lora_rank_pattern",
            "loftq_config",
            "peft",
            "peft_init_lora_weights",
            "peft_layer_replication",
            "peft_layers_pattern",
            "peft_layers_to_transform",
            "peft_trainable_token_indices",
            "loraplus_lr_embedding",
            "loraplus_lr_ratio",
            "bnb_config_kwargs",
        ),
        _PEFT,
    ),
    **dict.fromkeys(("merge_lora", "merge_method"), Automatic("`memtrain merge` folds an adapter")),
    **dict.fromkeys(("relora*", "lisa_*", "jagged_restart_*"), _EXOTIC),
}
"""Keys about the adapter."""

DATA: dict[str, ToolRule] = {
    **dict.fromkeys(("datasets", "test_datasets", "pretraining_dataset", "val_set_size"), ReadTogether()),
    "dataset_processes": TrlKey("dataset_num_proc"),
    "dataset_num_proc": TrlKey("dataset_num_proc"),
    "streaming": TrlKey("streaming"),
    "train_on_inputs": TrlKey("completion_only_loss", {True: False, False: True}),
    "sequence_len": TrlKey("max_length"),
    "max_packed_sequence_len": TrlKey("max_length"),
    "max_prompt_len": TrlKey("max_prompt_length"),
    "excess_length_strategy": TrlKey(
        "truncation_mode", {"drop": "drop", "truncate": "keep_start", "raise": None}
    ),
    "pad_to_sequence_len": ReadTogether(),
    "pad_to_multiple_of": TrlKey("pad_to_multiple_of"),
    "sample_packing": ReadTogether(),
    "group_by_length": TrlKey("group_by_length"),
    "batch_flattening": TrlKey("padding_free", {"auto": None}),
    "dpo_padding_free": TrlKey("padding_free"),
    "shuffle_merged_datasets": ReadTogether(),
    "default_system_message": RecipeKey("data.system_prompt"),
    "min_sample_len": Unmapped("short rows are not left out"),
    "dataset_exact_deduplication": Unmapped("rows that are there twice are trained on twice"),
    "eval_sequence_len": Unmapped("held-out rows are cut as training rows are"),
    "curriculum_sampling": Unmapped("rows are shuffled, or in their order (train.shuffle: false)"),
    **dict.fromkeys(("use_pose", "pose_*"), _EXOTIC),
    **dict.fromkeys(
        (
            "dataset_prepared_path",
            "dataset_shard_num",
            "dataset_shard_idx",
            "dataset_keep_in_memory",
            "skip_prepare_dataset",
            "num_dataset_shards_to_save",
            "shuffle_before_merging_datasets",
            "preprocess_iterable",
            "is_preprocess",
            "remove_unused_columns",
            "total_num_tokens",
            "total_supervised_tokens",
        ),
        _PREPARED,
    ),
    **dict.fromkeys(
        (
            "sample_packing_*",
            "multipack_real_batches",
            "pretrain_multipack_*",
            "pretraining_sample_concatenation",
            "streaming_multipack_buffer_size",
        ),
        Automatic("memtrain packs by best-fit decreasing, over all rows"),
    ),
    "eval_sample_packing": TrlKey("eval_packing"),
    "dataloader_*": _LOADER,
    **dict.fromkeys(("push_dataset_to_hub", "hf_use_auth_token"), _UPLOAD),
}
"""Keys about rows."""

KEYS: dict[str, ToolRule] = MODEL | ADAPTER | DATA | TRAINING | PREFERENCES | ONLINE | RUN | DEVICES
"""Every key by its name; a key with `*` stands for all matching keys."""
