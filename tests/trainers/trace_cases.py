"""Recipes that traces are held against: every method, strategy and precision, and a dozen architectures."""

import gc
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch

from memtrain.memory.estimate.auxiliary_models import RewardShape, reward_scoring_bytes, with_beside
from memtrain.memory.estimate.kept import kept_bytes
from memtrain.memory.estimate.peaks import estimate, phase_peak
from memtrain.memory.estimate.pricing import head_output_of
from memtrain.memory.estimate.sharded.zero_buckets import bucket_of
from memtrain.memory.estimate.teachers import TeacherShape, teacher_load
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.model_shape.shape import is_measured, shape_of
from memtrain.memory.plan.engine_kinds import is_sharded, uses_zero
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS as METHOD_NAMES
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.memory_meter.cpu_allocator_peak import allocator_peak
from memtrain.trainers.memory_meter.live_tensors import Recorder
from memtrain.trainers.tools.trace import liger as kernels
from memtrain.trainers.tools.trace import operator_rules as oracle
from memtrain.trainers.tools.trace import trace as run
from memtrain.trainers.tools.trace.client import reward_model_jobs, uses_liger
from memtrain.trainers.tools.trace.fake_ranks import as_fake_ranks
from memtrain.trainers.tools.trace.fake_zero import as_fake_zero
from memtrain.trainers.tools.trace.layer_record import measure_layers
from memtrain.trainers.tools.trace.trace import Job, bare_models, run_steps

LLAMA = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 352}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = LLAMA | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEACHER = SMALL | {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6}
QWEN = LLAMA | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}
EVENED = {"router_aux_loss_coef": 0.01}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
BATCH = HeaviestBatch(rows=4, tokens=512, scored_tokens=400, longest=200)
LONGEST = 200
LORA = Adapter(r=8)
QLORA: dict[str, Any] = {"adapter": LORA, "quantize": "4bit"}
DOWN_ALONE = Adapter(r=8, target_modules=("q_proj",), target_parameters=("experts.down_proj",))
DORA = Adapter(r=8, kind="dora")
RANDOM_STATE_BYTES = 5056
"""torch's CPU random state, which each checkpointed layer keeps to draw again: no operator makes it. On a GPU
run it lies in host memory."""

BASE = {
    "device": "cpu",
    "num_processes": 1,
    "threads": 1,
    "dtype": "float32",
    "attention": "torch_cpu",
    "liger": False,
    "adapter": None,
    "quantize": "none",
    "max_length": 200,
    "truncation": "keep_start",
    "packing": "none",
    "cross_document_attention": False,
    "padding_free": True,
    "pad_to_multiple_of": None,
    "group_by_length": False,
    "batch_size": 4,
    "batch_tokens": None,
    "micro_batch_size": 4,
    "micro_tokens": None,
    "max_steps": 2,
    "checkpoint_every": 0,
    "offload": "none",
    "loss": "chunked",
    "loss_tile_bytes": 1 << 19,
    "optimizer": "adamw",
    "master_weights": False,
    "expandable_segments": True,
}
PADDED = {"attention": "transformers", "padding_free": False}
HALF = {"dtype": "bfloat16"}
FUSED = {"kernels": "fused"} | HALF
EVERY = {"checkpoint_every": 1}
SHARED = {"shared_prompts": True}
SPLIT = HALF | {"master_weights": True, "copies": "split"}
OWN_VALUE = {"value": "own"}
OWN = {"value": "own"}
NO_KL = {"beta": 0.0}
LORA_OFF = {"adapter": LORA, "reference": "adapter_off"}
NO_CLIP = {"optim": {"max_grad_norm": None}}
TWO = {"num_processes": 2}
FSDP = TWO | {"engine": "fsdp2", "loads_shards": True}
"""As every plan with FSDP2 has it: each rank reads its own rows."""


@dataclass(frozen=True)
class Case:
    """One recipe: a method on a model under some settings."""

    method: str = "sft"
    config: dict[str, Any] = field(default_factory=lambda: LLAMA)
    changes: dict[str, Any] = field(default_factory=dict)
    num_micro_batches: int = 1
    said: dict[str, Any] = field(default_factory=dict)
    """What the recipe says beside the settings."""
    batch: HeaviestBatch = BATCH
    rewards: tuple[RewardShape, ...] = ()
    """Reward models beside the policy, which read answers of 200 tokens with their prompts."""

    @property
    def settings(self):
        writes = {"sampler": "native"} if self.method in ONLINE else {}
        return Settings(**(BASE | writes | self.changes))

    @property
    def job(self):
        """The job that traces it."""
        settings = self.settings
        scores = self.method in ONLINE and settings.reference != "none"
        passes = HeaviestBatch(8, 1024, 1024, 200) if scores else None
        return Job(
            self.recipe,
            settings,
            self.config,
            self.batch,
            num_micro_batches=self.num_micro_batches,
            want_stats=True,
            passes=passes,
            judges=reward_model_jobs(self.rewards, LONGEST),
            teacher=TEACHER if settings.teacher == "model" else None,
        )

    def estimated(self):
        """What the arithmetic says."""
        head = METHOD_NAMES[self.method].head
        shape = measured(shape_of(self.config, head=head), self.config, self.settings)
        scored = 0 if head == "score" else self.batch.scored_tokens
        batch = self.batch._replace(asks=head_output_of(self.method, self.settings), scored_tokens=scored)
        teacher = TeacherShape(shape_of(TEACHER), "auto", "teacher", TEACHER)
        taught = teacher_load(self.settings, shape, self.recipe.taught, teacher, batch)
        batch = batch._replace(teacher=taught)
        load = Workload(self.settings, shape, batch)
        several = self.num_micro_batches > 1
        reported = estimate(self.settings, shape, batch, accumulates=several)
        reported = with_beside(reported, load, kept_bytes(load), self.rewards, accumulates=several)
        if uses_zero(self.settings):
            # What is gathered to be written is not part of a step.
            reported = reported.model_copy(
                update={"phases": tuple(p for p in reported.phases if p.phase != "saving")}
            )
        if not self.rewards:
            return reported
        resting = {one.owner: one.num_bytes for one in reported.phases[-1].owners}
        reading = reward_scoring_bytes(self.settings, self.rewards, LONGEST)
        judging = phase_peak("rewards", resting | {"activations": reading})
        return reported.model_copy(update={"phases": (*reported.phases, judging)})

    @property
    def recipe(self):
        """The recipe, as far as a step looks at it."""
        settings = self.settings
        said: dict[str, Any] = {
            "method": self.method,
            "model": {"config": {"model_type": "llama"}, "tokenizer": "builtin:tiny"},
            "data": {"train": ("rows.jsonl",)},
            "optim": {"kind": settings.optimizer, "master_weights": settings.master_weights},
        }
        if settings.adapter is not None:
            said["model"]["adapter"] = settings.adapter.model_dump()
        if self.method in ONLINE:
            said |= {"rewards": {"functions": ("builtin:length",)}}
            said |= {"generate": {"num_generations": 2, "max_tokens": 64}}
        if self.method == "distill":
            said["distill"] = {"teacher": "teacher"}
        for key, value in self.said.items():
            said[key] = said.get(key, {}) | value
        return Recipe.model_validate(said)


def measured(shape, config, settings):
    """The shape with the record of its layers, where a plan has one."""
    if not is_measured(shape, settings.adapter):
        return shape
    treatments = [
        *(["slices"] if settings.slice_tokens else []),
        *(["travelling"] if settings.offload == "all" else []),
    ]
    return replace(shape, record=measure_layers(config, settings, treatments))


ONLINE = ("grpo", "rloo", "online_dpo", "ppo")


def sft(config, changes=None, num_micro_batches=1, **said):
    return Case("sft", config, changes or {}, num_micro_batches, said)


def judge(config, dtype="auto", **more):
    """A reward model of that kind."""
    return RewardShape(shape_of(config, head="score"), dtype, config, **more)


def zero(stage, config=LLAMA):
    """Two ranks under a stage of DeepSpeed's."""
    return {"num_processes": 2, "engine": f"zero{stage}", "zero_bucket": bucket_of(shape_of(config))}


def arch(model_type, changes=None, **config):
    return sft(SMALL | {"model_type": model_type} | config, HALF | (changes or {}))


STRATEGIES = {
    "plain": sft(LLAMA, {"loss": "full"} | PADDED),
    "padding-free": sft(LLAMA, {"loss": "full"}),
    "chunked": sft(LLAMA),
    "checkpointed": sft(LLAMA, EVERY),
    "checkpointed, accumulating": sft(LLAMA, EVERY, 2),
    "every other layer": sft(LLAMA, {"checkpoint_every": 2}),
    "bfloat16": sft(LLAMA, HALF),
    "bfloat16, tied, checkpointed, accumulating": sft(QWEN, HALF | EVERY, 2),
    "bfloat16, tied, a large vocabulary, accumulating": sft(QWEN | {"vocab_size": 16384}, HALF | EVERY, 2),
    "master weights, accumulating": sft(LLAMA, HALF | {"master_weights": True}, 2),
    "master weights": sft(QWEN, HALF | {"master_weights": True}),
    "LoRA": sft(LLAMA, {"adapter": LORA} | HALF),
    "LoRA, checkpointed": sft(QWEN, {"adapter": LORA} | EVERY),
    "LoRA with dropout, padded": sft(LLAMA, {"adapter": Adapter(r=8, dropout=0.1)} | PADDED),
    "DoRA": sft(QWEN, {"adapter": DORA} | HALF),
    "norms on queries, padded": sft(QWEN, PADDED),
    "masked attention": sft(LLAMA, {"attention": "masked"}),
    "adafactor": sft(LLAMA, {"optimizer": "adafactor"} | HALF),
    "muon": sft(LLAMA, {"optimizer": "muon"} | EVERY),
    "SGD, noise on embeddings": sft(LLAMA, {"optimizer": "sgd"}, optim={"neftune_alpha": 5.0}),
    "dft": sft(LLAMA, sft={"loss": "dft"}),
    "offloading all": sft(LLAMA, {"offload": "all"}),
    "offloading boundaries": sft(LLAMA, {"offload": "boundaries"} | EVERY | HALF),
    "offloading boundaries, one layer kept": sft(LLAMA, {"offload": "boundaries", "offload_keep": 1} | EVERY),
    "weights on CPU, LoRA": sft(LLAMA, {"weights_offload": True, "adapter": LORA} | EVERY | HALF),
    "weights on CPU, QLoRA": sft(
        LLAMA, {"weights_offload": True, "adapter": LORA, "quantize": "4bit"} | EVERY | HALF
    ),
    "weights and adapter on CPU": sft(
        LLAMA, {"weights_offload": True, "adapters_offload": True, "adapter": LORA} | EVERY | HALF
    ),
    "weights on CPU": sft(LLAMA, {"weights_offload": True} | EVERY | HALF),
    "weights on CPU, accumulating": sft(
        LLAMA, {"weights_offload": True, "master_weights": True} | EVERY | HALF, 2
    ),
    "weights on CPU, tied": sft(QWEN, {"weights_offload": True} | EVERY),
    "weights on CPU, dpo, a copy": Case(
        "dpo", LLAMA, {"weights_offload": True, "reference": "copy"} | EVERY | HALF | SHARED
    ),
    "weights on CPU, distill, a model": Case(
        "distill", SMALL, {"weights_offload": True, "teacher": "model"} | EVERY | HALF
    ),
    "split copies, checkpointed": sft(QWEN, SPLIT | EVERY),
    "split copies, accumulating, checkpointed": sft(LLAMA, SPLIT | EVERY, 2),
    "split copies on the host": sft(QWEN, SPLIT | EVERY | {"optimizer_offload": True}),
    "split copies, step in backward": sft(LLAMA, SPLIT | EVERY | {"in_backward": True}, **NO_CLIP),
    "stochastic rounding, checkpointed": sft(LLAMA, SPLIT | EVERY | {"copies": "stochastic"}),
    "stochastic rounding, moments on the host": sft(
        QWEN, SPLIT | EVERY | {"copies": "stochastic", "optimizer_offload": True}
    ),
    "8-bit moments, checkpointed": sft(QWEN, {"compressed_moments": True} | EVERY),
    "8-bit moments, split copies, checkpointed": sft(LLAMA, SPLIT | {"compressed_moments": True} | EVERY),
    "8-bit moments, step in backward": sft(
        LLAMA, {"compressed_moments": True, "in_backward": True} | EVERY, **NO_CLIP
    ),
    "optimizer states on CPU": sft(LLAMA, {"optimizer_offload": True}),
    "moments and masters on the host": sft(QWEN, {"optimizer_offload": True, "master_weights": True} | HALF),
    "moments and masters on the host, accumulating, checkpointed": sft(
        LLAMA, {"optimizer_offload": True, "master_weights": True} | EVERY | HALF, 2
    ),
    "a save in the background": sft(LLAMA, {"background_save": True} | EVERY | HALF),
    "a save in the background, master weights": sft(
        QWEN, {"background_save": True, "master_weights": True} | EVERY | HALF
    ),
    "a save in the background, LoRA": sft(LLAMA, {"background_save": True, "adapter": LORA} | EVERY),
    "step in backward": sft(LLAMA, {"in_backward": True}, **NO_CLIP),
    "step in backward, adafactor": sft(
        QWEN, {"in_backward": True, "optimizer": "adafactor"} | EVERY | HALF, **NO_CLIP
    ),
    "step in backward, adafactor, untied": sft(
        LLAMA, {"in_backward": True, "optimizer": "adafactor"} | EVERY | HALF, **NO_CLIP
    ),
    "step in backward, adafactor, float32": sft(
        QWEN, {"in_backward": True, "optimizer": "adafactor"} | EVERY, **NO_CLIP
    ),
    "step in backward, adafactor, float32, untied": sft(
        LLAMA, {"in_backward": True, "optimizer": "adafactor"}, **NO_CLIP
    ),
    "8-bit AdamW": sft(LLAMA, {"optimizer": "adamw_8bit"} | HALF),
    "paged AdamW": sft(LLAMA, {"optimizer": "paged_adamw"} | HALF),
    "8-bit AdamW, master weights": sft(QWEN, {"optimizer": "adamw_8bit", "master_weights": True} | HALF),
    "QLoRA": sft(LLAMA, {"adapter": LORA, "quantize": "4bit"} | HALF),
    "QLoRA, checkpointed, 8-bit AdamW": sft(
        QWEN, {"adapter": LORA, "quantize": "4bit", "optimizer": "paged_adamw_8bit"} | EVERY | HALF, 2
    ),
    "fused kernels": sft(LLAMA, FUSED),
    "fused kernels, checkpointed": sft(QWEN, FUSED | EVERY, 2),
    "fused kernels, LoRA": sft(QWEN, FUSED | {"adapter": LORA}),
    "fused kernels, offloading all": sft(QWEN, FUSED | {"offload": "all"}),
    "8-bit weights": sft(LLAMA, {"adapter": LORA, "quantize": "8bit"} | HALF),
    "8-bit weights, checkpointed": sft(LLAMA, {"adapter": LORA, "quantize": "8bit"} | EVERY | HALF),
}
LONG = HeaviestBatch(rows=2, tokens=4096, scored_tokens=3000, longest=2048)
"""Rows that are long beside a slice of 512 tokens."""
IN_SLICES = {"slice_tokens": 512, "max_length": 2048}


LONG_ROW = HeaviestBatch(rows=1, tokens=4096, scored_tokens=4096, longest=4096)
"""Of which two ranks gather as many keys as they can."""
SLICED = {"num_processes": 2, "context_parallel": 2, "pad_to_multiple_of": 4}
ONE_ROW = SLICED | HALF | {"max_length": 4096}
SLIDING = SMALL | {"model_type": "mistral", "sliding_window": 64}
GPT_OSS = SMALL | EXPERTS | {"model_type": "gpt_oss", "head_dim": 32, "sliding_window": 64}
MIXTRAL = SMALL | EXPERTS | {"model_type": "mixtral", "sliding_window": None}
OF_STACKS = Adapter(
    r=8,
    target_modules=("q_proj",),
    target_parameters=("experts.gate_up_proj", "experts.down_proj"),
)
ADAFACTOR = {"in_backward": True, "optimizer": "adafactor"} | EVERY
GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"]}


def streamed(config, changes, *more, method="sft", **said):
    """Long rows in slices."""
    return replace(Case(method, config, IN_SLICES | changes, *more, **said), batch=LONG)


WIDE = {"intermediate_size": 1408}
"""An MLP in which a layer's backward pass has its peak."""
STREAMED = {
    "streamed": streamed(LLAMA, {}),
    "streamed, bfloat16, accumulating": streamed(QWEN, HALF, 2),
    "streamed, LoRA": streamed(LLAMA, {"adapter": LORA} | HALF),
    "streamed, LoRA with dropout": streamed(LLAMA, {"adapter": Adapter(r=8, dropout=0.1)} | HALF),
    "streamed, DoRA": streamed(QWEN, {"adapter": DORA} | HALF),
    "streamed, a large vocabulary": replace(
        streamed(LLAMA | {"vocab_size": 16384, "num_key_value_heads": 1}, {"loss_tile_bytes": 2**21} | HALF),
        batch=HeaviestBatch(rows=1, tokens=16384, scored_tokens=16384, longest=16384),
    ),
    "streamed, wide": streamed(QWEN | WIDE | {"num_key_value_heads": 4}, HALF),
    "streamed, wide, LoRA": streamed(LLAMA | WIDE, {"adapter": LORA}),
    "streamed, wide, fused kernels": streamed(QWEN | WIDE, FUSED),
    "streamed, fused kernels": streamed(QWEN, FUSED | {"adapter": LORA}),
    "streamed, QLoRA": streamed(LLAMA, {"adapter": LORA, "quantize": "4bit"} | HALF),
    "streamed, inputs on the host": streamed(LLAMA, {"adapter": LORA, "offload": "boundaries"} | HALF),
    "streamed, dpo, a copy": streamed(LLAMA, {"reference": "copy"} | SHARED, method="dpo"),
    "streamed, grpo": streamed(QWEN, HALF | SHARED, method="grpo"),
    "streamed, step in backward": streamed(LLAMA, {"in_backward": True}, said=NO_CLIP),
    "streamed, masked attention": streamed(LLAMA, {"attention": "masked"}),
    "streamed, masked attention, bfloat16": streamed(QWEN, {"attention": "masked"} | HALF),
    "streamed, sliding windows": streamed(LLAMA | {"model_type": "mistral", "sliding_window": 64}, {}),
    "streamed, capped scores": streamed(
        SMALL | {"model_type": "gemma2", "sliding_window": 64, "head_dim": 32, "query_pre_attn_scalar": 32},
        {"attention": "masked"},
    ),
    "streamed, padded": streamed(LLAMA, {"padding_free": False}),
    "streamed, FSDP2": streamed(LLAMA, FSDP),
    "streamed, FSDP2, accumulating": streamed(QWEN, FSDP | HALF, 2),
    "streamed, FSDP2, LoRA": streamed(LLAMA, FSDP | {"adapter": LORA}),
    "streamed, experts": streamed(
        SMALL | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 32, "moe_intermediate_size": 96}, HALF
    ),
    "streamed, experts, weights and adapter on CPU": streamed(
        SMALL | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 32, "moe_intermediate_size": 96},
        HALF | QLORA | {"weights_offload": True, "adapters_offload": True},
    ),
    "streamed, sliding windows, bfloat16": streamed(SLIDING, HALF),
    "streamed, gpt-oss": streamed(GPT_OSS, HALF),
    "streamed, gpt-oss, LoRA": streamed(GPT_OSS, HALF | {"adapter": LORA}),
    "streamed, gpt-oss, LoRA of experts": streamed(GPT_OSS, HALF | {"adapter": OF_STACKS}),
    "streamed, mixtral": streamed(MIXTRAL, HALF),
    "streamed, step in backward, adafactor": streamed(
        LLAMA, HALF | {"in_backward": True, "optimizer": "adafactor"}, said=NO_CLIP
    ),
    "streamed, slices": replace(streamed(LLAMA, ONE_ROW), batch=LONG_ROW),
    "streamed, slices, tied": replace(streamed(QWEN, ONE_ROW), batch=LONG_ROW),
    "streamed, slices, sliding windows": replace(streamed(SLIDING, ONE_ROW), batch=LONG_ROW),
}
TAUGHT = {"teacher": "model"}
FROM_FILE = {"teacher": "file", "teacher_top_k": 8}
FILE = {"distill": {"top_k": 8, "top_k_file": "folder"}}
METHODS = {
    "distill, a model": Case("distill", SMALL, TAUGHT | EVERY),
    "distill, a model, accumulating": Case("distill", SMALL, TAUGHT, 2),
    "distill, adapter off": Case(
        "distill",
        SMALL,
        {"adapter": LORA, "teacher": "adapter_off"},
        said={"distill": {"teacher": "adapter_off"}},
    ),
    "distill, a file": Case("distill", SMALL, FROM_FILE | HALF, said=FILE),
    "distill, whole logits": Case("distill", SMALL, TAUGHT | {"loss": "full"}),
    "distill, a file, whole logits": Case("distill", SMALL, FROM_FILE | {"loss": "full"}, said=FILE),
    "dpo, adapter off": Case("dpo", LLAMA, {"adapter": LORA, "reference": "adapter_off"} | SHARED),
    "dpo, a copy": Case("dpo", LLAMA, {"reference": "copy"} | SHARED, 2),
    "dpo, precomputed": Case("dpo", QWEN, {"reference": "precomputed"} | EVERY | HALF | SHARED),
    "dpo, synced": Case("dpo", LLAMA, {"reference": "synced"}, said={"dpo": {"reference": "synced"}}),
    "dpo, padded": Case("dpo", LLAMA, {"reference": "precomputed", "loss": "full"} | PADDED),
    "kto, a copy": Case("kto", LLAMA, {"reference": "copy"} | SHARED),
    "kto, adapter off": Case("kto", QWEN, {"adapter": LORA, "reference": "adapter_off"} | HALF),
    "reward": Case("reward", LLAMA, SHARED),
    "reward, LoRA": Case("reward", QWEN, {"adapter": LORA} | HALF | PADDED),
    "grpo": Case("grpo", LLAMA, SHARED),
    "grpo, a copy": Case("grpo", LLAMA, {"reference": "copy"} | SHARED, said={"grpo": {"beta": 0.04}}),
    "grpo, LoRA": Case(
        "grpo",
        QWEN,
        {"adapter": LORA, "reference": "adapter_off"} | EVERY | HALF | SHARED,
        2,
        {"grpo": {"beta": 0.04}},
    ),
    "grpo, all logits": Case("grpo", LLAMA, {"loss": "full"} | SHARED | HALF),
    "rloo": Case("rloo", LLAMA, {"reference": "copy"} | SHARED, said={"rloo": {"beta": 0.05}}),
    "online dpo": Case("online_dpo", LLAMA, {"reference": "copy"} | SHARED),
    "online dpo, LoRA": Case("online_dpo", QWEN, LORA_OFF | EVERY | HALF | SHARED),
    "online dpo, all logits": Case("online_dpo", LLAMA, {"loss": "full"} | SHARED),
    "ppo": Case("ppo", LLAMA, {"reference": "copy", "value": "shared"} | SHARED),
    "ppo, a value model of its own": Case("ppo", LLAMA, OWN_VALUE | HALF | SHARED, said={"ppo": OWN | NO_KL}),
    "ppo, LoRA, own value": Case(
        "ppo", QWEN, OWN_VALUE | LORA_OFF | EVERY | HALF | SHARED, 2, said={"ppo": OWN}
    ),
    "rloo, no reference": Case("rloo", LLAMA, HALF | EVERY | SHARED, said={"rloo": {"beta": 0.0}}),
}
JUDGES = {
    "grpo, a reward model": Case("grpo", LLAMA, HALF | SHARED, rewards=(judge(LLAMA),)),
    "rloo, reward models of two kinds": Case(
        "rloo",
        LLAMA,
        {"reference": "copy"} | SHARED,
        said={"rloo": {"beta": 0.05}},
        rewards=(judge(LLAMA, dtype="bfloat16"), judge(QWEN, is_alike=False)),
    ),
    "online dpo, LoRA, a reward model that reads less": Case(
        "online_dpo", QWEN, LORA_OFF | EVERY | SHARED, rewards=(judge(QWEN, max_length=150),)
    ),
    "ppo, a reward model, padded": Case(
        "ppo",
        LLAMA,
        {"reference": "copy", "value": "shared", "loss": "full"} | PADDED,
        rewards=(judge(LLAMA),),
    ),
}
METHODS |= JUDGES | STREAMED
ARCHITECTURES = {
    "qwen2": arch("qwen2"),
    "qwen3, checkpointed": arch("qwen3", EVERY, head_dim=32),
    "mistral": arch("mistral", sliding_window=None),
    "gemma2": arch("gemma2", PADDED, head_dim=32, tie_word_embeddings=True, query_pre_attn_scalar=32),
    "gemma3": arch("gemma3_text", head_dim=32, tie_word_embeddings=True, query_pre_attn_scalar=32),
    "phi3": arch("phi3", sliding_window=None),
    "phi3, LoRA": arch("phi3", {"adapter": LORA}, sliding_window=None),
    "smollm3": arch("smollm3", EVERY),
    "olmo2": arch("olmo2"),
    "olmo3": arch("olmo3", EVERY, sliding_window=None),
    "olmo3, LoRA": arch("olmo3", EVERY | {"adapter": LORA}, sliding_window=None),
    "granite": arch("granite", logits_scaling=2.0),
    "gemma": arch("gemma", head_dim=32, tie_word_embeddings=True),
    "qwen3_moe": arch("qwen3_moe", head_dim=32, moe_intermediate_size=96, **EXPERTS),
    "qwen3_moe, float32": sft(
        SMALL | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 32, "moe_intermediate_size": 96}, EVERY
    ),
    "qwen3_moe, checkpointed": arch("qwen3_moe", EVERY, head_dim=32, moe_intermediate_size=96, **EXPERTS),
    "qwen3_moe, LoRA": arch("qwen3_moe", {"adapter": LORA}, head_dim=32, moe_intermediate_size=96, **EXPERTS),
    "qwen3_moe, QLoRA": arch("qwen3_moe", QLORA, head_dim=32, moe_intermediate_size=96, **EXPERTS),
    "qwen3_moe, 8-bit, attention alone": arch(
        "qwen3_moe",
        EVERY | {"quantize": "8bit", "adapter": Adapter(r=8, target_modules=("q_proj", "o_proj"))},
        head_dim=32,
        moe_intermediate_size=96,
        **EXPERTS,
    ),
    "qwen3_moe, QLoRA of down projections": arch(
        "qwen3_moe",
        EVERY | {"quantize": "4bit", "adapter": DOWN_ALONE},
        head_dim=32,
        moe_intermediate_size=96,
        **EXPERTS,
    ),
    "qwen3_moe, QLoRA, weights and adapter on CPU": arch(
        "qwen3_moe",
        QLORA | EVERY | HALF | {"weights_offload": True, "adapters_offload": True},
        head_dim=32,
        moe_intermediate_size=96,
        **EXPERTS,
    ),
    "mixtral": arch("mixtral", sliding_window=None, **EXPERTS),
    "mixtral, bfloat16": arch("mixtral", HALF, sliding_window=None, **EXPERTS),
    "qwen3_moe, evened": arch("qwen3_moe", EVENED, head_dim=32, moe_intermediate_size=96, **EXPERTS),
    "gpt_oss": sft(GPT_OSS, HALF),
    "gpt_oss, LoRA, checkpointed": sft(GPT_OSS, HALF | EVERY | {"adapter": LORA}),
    "gpt_oss, LoRA of experts, checkpointed": sft(GPT_OSS, HALF | EVERY | {"adapter": OF_STACKS}),
    "qwen3_moe, step in backward": replace(
        arch("qwen3_moe", {"in_backward": True} | EVERY, head_dim=32, moe_intermediate_size=96, **EXPERTS),
        said=NO_CLIP,
    ),
    "qwen3_moe, step in backward, adafactor": replace(
        arch("qwen3_moe", ADAFACTOR, head_dim=32, moe_intermediate_size=96, **EXPERTS), said=NO_CLIP
    ),
    "mixtral, step in backward": sft(MIXTRAL, {"in_backward": True} | EVERY | HALF, **NO_CLIP),
    "mixtral, evened, checkpointed": arch("mixtral", EVENED | EVERY, sliding_window=None, **EXPERTS),
}
AWAY = {"shard_offload": "parameters"}
ULYSSES = {"context_by": "ulysses"}
LEARNT = HeaviestBatch(rows=1, tokens=512, scored_tokens=512, longest=512)
"""A slice of it has as many scored tokens as it can."""
RANKS = {
    "two ranks": sft(LLAMA, TWO, 2),
    "two ranks, bfloat16": sft(LLAMA, TWO | HALF | {"master_weights": True}),
    "two ranks, bfloat16, tied, a large vocabulary": sft(QWEN | {"vocab_size": 16384}, TWO | HALF | EVERY),
    "FSDP2": sft(LLAMA, FSDP),
    "FSDP2, checkpointed, accumulating": sft(QWEN, FSDP | EVERY | HALF, 2),
    "FSDP2, eight ranks, LoRA": sft(LLAMA, FSDP | {"num_processes": 8, "adapter": LORA} | EVERY),
    "distill, a model, FSDP2": Case("distill", SMALL, FSDP | TAUGHT | EVERY),
    "distill, a model, FSDP2, layers kept": Case("distill", SMALL, FSDP | TAUGHT),
    "FSDP2, QLoRA, checkpointed, accumulating": sft(
        QWEN, FSDP | {"adapter": LORA, "quantize": "4bit"} | EVERY | HALF, 2
    ),
    "FSDP2, 8-bit weights, checkpointed": sft(
        LLAMA, FSDP | {"adapter": LORA, "quantize": "8bit"} | EVERY | HALF
    ),
    "qwen3_moe, QLoRA, FSDP2": arch(
        "qwen3_moe", FSDP | QLORA | EVERY, head_dim=32, moe_intermediate_size=96, **EXPERTS
    ),
    "FSDP2, dpo, a copy": Case("dpo", LLAMA, FSDP | {"reference": "copy"} | EVERY | SHARED),
    "FSDP2, shards on the host": sft(LLAMA, FSDP | AWAY),
    "FSDP2, shards on the host, checkpointed, accumulating": sft(QWEN, FSDP | AWAY | EVERY | HALF, 2),
    "FSDP2, a save in the background": sft(LLAMA, FSDP | {"background_save": True} | EVERY | HALF),
    "FSDP2, a save in the background, of shards": sft(
        QWEN, FSDP | {"background_save": True, "checkpoint_layout": "sharded"} | EVERY | HALF, 2
    ),
    "slices": replace(sft(LLAMA, SLICED), batch=LEARNT),
    "slices, checkpointed": replace(sft(LLAMA, SLICED | EVERY | HALF, 2), batch=LEARNT),
    "slices, dpo": Case("dpo", LLAMA, SLICED | {"reference": "copy"} | EVERY | SHARED),
    "heads dealt out": replace(sft(LLAMA, SLICED | ULYSSES), batch=LEARNT),
    "heads dealt out, checkpointed": replace(sft(LLAMA, SLICED | ULYSSES | EVERY | HALF, 2), batch=LEARNT),
    "heads dealt out, dpo": Case("dpo", LLAMA, SLICED | ULYSSES | {"reference": "copy"} | EVERY | SHARED),
}
ON_GPU = {"device": "cuda", "attention": "torch_cpu"}
"""Liger refuses a CPU; attention is one that a CPU has."""
KERNELS = {"liger": True} | ON_GPU
LOSS = {"loss": "liger"}
LIGER = {
    "Liger": sft(LLAMA, KERNELS | HALF),
    "Liger, checkpointed": sft(QWEN, KERNELS | EVERY, 2),
    "Liger's loss": sft(LLAMA, ON_GPU | LOSS),
    "Liger and its loss, LoRA": sft(QWEN, KERNELS | LOSS | HALF | {"adapter": LORA}),
    # In half precision a CPU's product takes 200 kB for itself at the peak.
    "Liger, LoRA, checkpointed": sft(LLAMA, KERNELS | EVERY | {"adapter": LORA}),
    "Liger, dpo, a copy": Case("dpo", LLAMA, KERNELS | {"reference": "copy"} | EVERY | SHARED),
    "Liger, experts, LoRA": arch(
        "qwen3_moe",
        KERNELS | EVERY | HALF | {"adapter": LORA},
        head_dim=32,
        moe_intermediate_size=96,
        **EXPERTS,
    ),
    "Liger, experts, QLoRA": arch(
        "qwen3_moe", KERNELS | QLORA | EVERY | HALF, head_dim=32, moe_intermediate_size=96, **EXPERTS
    ),
    "Liger, padded": arch(
        "gemma2",
        KERNELS | LOSS | PADDED,
        head_dim=32,
        tie_word_embeddings=True,
        query_pre_attn_scalar=32,
    ),
}
"""Traced, and run, where liger-kernel is installed."""
WIDER = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 8192}
ZERO = {
    "ZeRO-1": sft(LLAMA, zero(1)),
    "ZeRO-2": sft(LLAMA, zero(2)),
    "ZeRO-3": sft(LLAMA, zero(3)),
    "ZeRO-2, bfloat16, checkpointed": sft(LLAMA, zero(2) | EVERY | HALF | {"master_weights": True}),
    "ZeRO-2, four ranks, accumulating": sft(QWEN, zero(2, QWEN) | EVERY | {"num_processes": 4}, 2),
    "ZeRO-3, bfloat16, checkpointed": sft(QWEN, zero(3, QWEN) | EVERY | HALF | {"master_weights": True}),
    "ZeRO-3, LoRA, checkpointed": sft(LLAMA, zero(3) | EVERY | {"adapter": LORA}),
    "ZeRO-3, dpo, a copy": Case("dpo", LLAMA, zero(3) | {"reference": "copy"} | EVERY | SHARED),
    "ZeRO-1, dpo, adapter off": Case("dpo", LLAMA, zero(1) | LORA_OFF | SHARED),
    "ZeRO-2, bfloat16": sft(LLAMA, zero(2) | HALF | {"master_weights": True}),
    "ZeRO-3, dpo, a copy, layers kept": Case("dpo", LLAMA, zero(3) | {"reference": "copy"} | SHARED),
    "ZeRO-3, dpo, adapter off": Case("dpo", LLAMA, zero(3) | LORA_OFF | EVERY | HALF | SHARED),
    "ZeRO-3, distill, a model": Case("distill", SMALL, zero(3) | TAUGHT),
    "ZeRO-2, bfloat16, tied": sft(QWEN, zero(2, QWEN) | HALF | {"master_weights": True}),
    "ZeRO-2, bfloat16, three ranks, accumulating": sft(
        LLAMA, zero(2) | HALF | EVERY | {"num_processes": 3, "master_weights": True}, 2
    ),
    "ZeRO-2, reward": Case("reward", LLAMA, zero(2) | SHARED),
    "ZeRO-2, LoRA": sft(LLAMA, zero(2) | {"adapter": LORA}),
    "ZeRO-3, LoRA": sft(LLAMA, zero(3) | {"adapter": LORA}),
    "ZeRO-3, DoRA, checkpointed": sft(LLAMA, zero(3) | EVERY | {"adapter": DORA}),
    "ZeRO-3, reward": Case("reward", LLAMA, zero(3) | SHARED),
    "ZeRO-3, bfloat16, three ranks, wide": sft(
        LLAMA | WIDER, zero(3, LLAMA | WIDER) | HALF | EVERY | {"num_processes": 3, "master_weights": True}
    ),
}
"""Traced, and run, where DeepSpeed is installed."""
CASES = RANKS | STRATEGIES | METHODS | ARCHITECTURES


def has_liger():
    """Whether Liger's own code is here."""
    return find_spec("liger_kernel") is not None and find_spec("triton") is not None


@contextmanager
def on_a_cpu(job):
    """Liger's kernels are not launched inside, and no one is shown a GPU: so that tensors with data can be
    counted in the same step. What is computed is meaningless, and weighs as much."""
    if not uses_liger(job.settings):
        yield
        return
    before = run.with_operator_rules, kernels.as_fake_cuda
    run.with_operator_rules = lambda kind, **skips: oracle.with_operator_rules("cpu", **skips)
    kernels.as_fake_cuda = lambda *names: nullcontext()
    try:
        with kernels.as_fake_liger(job.settings):
            yield
    finally:
        run.with_operator_rules, kernels.as_fake_cuda = before


class Nobody(Recorder):
    """Runs the steps and counts nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *details):
        return None

    def own(self, tensors, owner):
        return None

    def resizing(self):
        return nullcontext()


def real_peak(job):
    """Peak bytes of torch's own CPU allocator in the same steps, without the random states of checkpoints."""
    with as_fake_ranks(job.settings), as_fake_zero(job.settings):
        return _real_peak(job)


def _real_peak(job):
    gc.collect()
    if is_sharded(job.settings) or job.settings.weights_offload:
        # Whole weights are let go when they are cut, or moved: the allocator must have seen them come.
        # A trace has the batches beforehand.
        batches = bare_models(job, "meta")

        def whole():
            cast = bare_models(job, "cpu")
            cast = replace(cast, micro_batches=batches.micro_batches, passes=batches.passes)
            run_steps(cast, job, Nobody(), is_marked=False)

        return allocator_peak([], whole) - random_states(job)
    cast = bare_models(job, "cpu")
    peak = allocator_peak(cast.models, lambda: run_steps(cast, job, Nobody(), is_marked=False))
    return peak - random_states(job)


def random_states(job):
    """Bytes of the random states that the checkpointed layers of a job keep."""
    every, slice_tokens = job.settings.checkpoint_every, job.settings.slice_tokens
    models = 2 if job.settings.value == "own" else 1
    if slice_tokens and job.settings.adapter is not None and job.settings.adapter.dropout:
        # Each slice of each layer, and the state to come back to.
        num_slices = -(-job.batch.tokens // slice_tokens)
        return RANDOM_STATE_BYTES * (num_slices * job.config["num_hidden_layers"] + 1)
    return models * RANDOM_STATE_BYTES * -(-job.config["num_hidden_layers"] // every) if every else 0


def cpu_kernel_scratch(attention):
    """What torch's own attention on a CPU takes for itself, beside what a trace knows: see `kernel_scratch`.

    Blocks of scores for each thread, and the gradient in rows where heads share keys. Products of half
    precision take more, as the processor wants it. Source: torch 2.13,
    aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
    """
    aten = torch.ops.aten
    return oracle.kernel_scratch(attention) | {
        aten._scaled_dot_product_flash_attention_for_cpu.default: _blocks_forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _blocks_backward,
    }


def _block(query, key):
    """Queries and keys of a block."""
    tokens = query.shape[2]
    return min(256 if tokens >= 768 else 64 if tokens >= 192 else 32, tokens), min(512, key.shape[2])


def _blocks_forward(args, kwargs, out):
    queries, keys = _block(*args[:2])
    numbers = 4 * queries * (keys + 2 + args[0].shape[3])
    return torch.get_num_threads() * (numbers + 2 * queries * keys * (args[0].itemsize == 2))


def _blocks_backward(args, kwargs, out):
    queries, keys = _block(*args[1:3])
    narrow = args[1].itemsize == 2
    copy = 0 if args[0].transpose(1, 2).is_contiguous() else args[0].nbytes
    return torch.get_num_threads() * 2 * queries * keys * (4 + 2 * narrow) + 4 * queries + copy
