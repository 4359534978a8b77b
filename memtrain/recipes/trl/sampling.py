"""Keys of TRL for the sampler, and for the correction of its probabilities."""

from __future__ import annotations

from memtrain.recipes.peers.table import table
from memtrain.recipes.trl.translation import Translation

ONLINE = ("grpo", "rloo", "ppo")
"""Methods that write completions."""


def sampling(made: Translation) -> None:
    """Sampler of the completions: vLLM as a process of the run, or a server that is there."""
    written = [key for key in table("trl").rows if key.startswith("vllm_") and key in made.config]
    if made.config.get("ds3_gather_for_generation") is False:
        made.lose(
            "ds3_gather_for_generation",
            "`generate.gather_weights: off` says the same, with `cluster.engine: zero3` or `fsdp2`",
        )
    if made.config.get("use_vllm") is not True or made.method not in ONLINE:
        for key in written:
            made.lose(key, "use_vllm is not true: TRL reads it nowhere")
        return
    made.set("generate.backend", "vllm")
    if made.get("vllm_mode") == "server":
        host, port = made.get("vllm_server_host"), made.get("vllm_server_port")
        address = made.get("vllm_server_base_url", f"http://{host}:{port}")
        made.set("generate.vllm.server", str(address).replace("//0.0.0.0", "//localhost"))
        made.notes.append(
            "TRL's server is `trl vllm-serve`; here it is vLLM's own, started as docs/generation.md says"
        )
    else:
        made.set("generate.vllm.memory_share", made.get("vllm_gpu_memory_utilization"), of=written[:0])
        made.set("generate.vllm.sleep", "level2" if made.get("vllm_enable_sleep_mode") else "off")
    _mismatch(made)
    for key in written:
        row = table("trl").rows[key]
        if row.lost and not row.is_harmless(made.config[key]):
            made.lose(key, row.lost)


def _mismatch(made: Translation) -> None:
    """TRL corrects for vLLM's probabilities in GRPO alone, by default."""
    if made.method != "grpo":
        made.set(f"{made.method}.importance_correction", "none", comment="TRL corrects GRPO alone")
        return
    if not made.get("vllm_importance_sampling_correction"):
        made.set("grpo.importance_correction", "none", of=["vllm_importance_sampling_correction"])
        return
    of = ["vllm_importance_sampling_mode"]
    made.set("grpo.importance_correction", made.get(of[0]), of=of)
    made.set("grpo.importance_correction_min", made.config.get("vllm_importance_sampling_clip_min"), of=of)
    highest = made.config.get("vllm_importance_sampling_cap") or made.get("vllm_importance_sampling_clip_max")
    made.set("grpo.importance_correction_max", highest, of=of)
