"""Engines of other tools over several devices (DeepSpeed's stages, FSDP) as a `cluster:` section."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from memtrain.recipes.importers.tool import ToolReading
from memtrain.recipes.reading.regular_file import read_regular

UNREAD_STAGE = (
    "the DeepSpeed file is not here, and its name does not show the stage; without it each device holds all: "
    "put the file there, or set cluster.engine"
)
"""Reason why a DeepSpeed file is not carried over."""


def deepspeed(reading: ToolReading, key: str, value: object) -> None:
    """The stage of a DeepSpeed configuration: a mapping, a file that is here, or one whose name tells it."""
    found = _deepspeed_of(value)
    if found is None:
        reading.lose(key, UNREAD_STAGE)
        return
    stage, offload = found
    if stage == 0:
        return
    if reading.processes == 1:
        reading.notes.append(
            f"{key}: with one device there is nothing to share; `--processes` says how many there are"
        )
        if offload == "none":
            return
        # What waits on the host does so without shards too.
        if offload == "parameters":
            reading.set_recipe("memory.weights_offload", "on", f"{key} with its weights on the host")
        else:
            reading.set_recipe("memory.optimizer_offload", "on", f"{key} with its optimizer on the host")
        return
    reading.set_recipe("cluster.engine", f"zero{stage}", key)
    if offload != "none":
        reading.set_recipe("cluster.cpu_offload", offload, key)


def _deepspeed_of(value: object) -> tuple[int, str] | None:
    """(stage, offloaded parts); None where unknown."""
    if isinstance(value, str):
        path = Path(value)
        if path.suffix == ".json" and path.is_file():
            try:
                value = json.loads(read_regular(path))
            except (OSError, ValueError):
                return None
        else:
            return _by_name(path.name.lower())
    if not isinstance(value, Mapping):
        return None
    zero = cast(Mapping[str, Any], value).get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        return None
    shares = cast(Mapping[str, Any], zero)
    away = {name: _device(shares.get(f"offload_{name}")) for name in ("param", "optimizer")}
    offload = "parameters" if away["param"] else "optimizer" if away["optimizer"] else "none"
    stage = shares.get("stage", 0)
    return (stage, offload) if stage in (0, 1, 2, 3) else None


def _device(value: object) -> bool:
    return isinstance(value, Mapping) and cast(Mapping[str, Any], value).get("device") in ("cpu", "nvme")


def _by_name(name: str) -> tuple[int, str] | None:
    found = re.search(r"(?:z|zero|stage|ds|(?<=[_-])s)[_-]?([0-3])(?!\d)", name)
    if found is None:
        return None
    stage = int(found[1])
    is_away = re.search(r"offload|cpu", name) is not None
    all_away = stage == 3 and "optim" not in name
    return stage, "none" if not is_away else "parameters" if all_away else "optimizer"


def fsdp(reading: ToolReading, key: str, value: object, more: object) -> None:
    """FSDP of either generation is FSDP2 here."""
    words = " ".join(map(str, cast(list[object], value))) if isinstance(value, list) else str(value)
    if value in (None, False, "", []) and not more:
        return
    options: Mapping[str, Any] = cast(Mapping[str, Any], more) if isinstance(more, Mapping) else {}
    if reading.processes == 1:
        reading.notes.append(
            f"{key}: with one device there is nothing to share; `--processes` says how many there are"
        )
        return
    strategy = str(options.get("fsdp_sharding_strategy", options.get("sharding_strategy", words))).lower()
    if "shard_grad_op" in strategy:
        reading.notes.append(
            f"{key}: shard_grad_op keeps whole weights; the nearest here is cluster.engine: zero2"
        )
        reading.set_recipe("cluster.engine", "zero2", key)
        return
    reading.set_recipe("cluster.engine", "fsdp2", key)
    if (
        "offload" in words
        or options.get("fsdp_offload_params") is True
        or options.get("offload_params") is True
    ):
        reading.set_recipe("cluster.cpu_offload", "parameters", key)


def trainers_engine(reading: ToolReading) -> None:
    """The engine by the arguments of transformers' trainer, and a card that vLLM has for itself."""
    if reading.get("vllm_device") is not None and "vllm_mode" not in reading.trl:
        # TRL 0.14 and 0.15 take it from the devices that the training has not.
        reading.set_trl("vllm_mode", "server", "vllm_device")
    if reading.get("deepspeed") is not None:
        deepspeed(reading, "deepspeed", reading.config["deepspeed"])
    else:
        fsdp(reading, "fsdp", reading.get("fsdp"), reading.get("fsdp_config"))


def accelerate_file(path: Path) -> tuple[str | None, int | None]:
    """(accelerate's engine as TRL names it, its processes) of a file that is here; None for what it lacks."""
    try:
        read = yaml.safe_load(read_regular(path))
    except (OSError, ValueError, yaml.YAMLError):
        return None, None
    if not isinstance(read, Mapping):
        return None, None
    config = cast(Mapping[str, Any], read)
    number = config.get("num_processes")
    kind = str(config.get("distributed_type", "")).upper()
    engine = {"MULTI_GPU": "multi_gpu", "NO": "single_gpu"}.get(kind)
    if kind == "DEEPSPEED":
        engine = _accelerates_stage(config.get("deepspeed_config"))
    elif kind == "FSDP":
        more = config.get("fsdp_config")
        shares: Mapping[str, Any] = cast(Mapping[str, Any], more) if isinstance(more, Mapping) else {}
        engine = "fsdp2_offload" if shares.get("fsdp_offload_params") is True else "fsdp2"
    return engine, number if isinstance(number, int) else None


def _accelerates_stage(asked: object) -> str | None:
    shares: Mapping[str, Any] = cast(Mapping[str, Any], asked) if isinstance(asked, Mapping) else {}
    if isinstance(shares.get("deepspeed_config_file"), str):
        found = _deepspeed_of(shares["deepspeed_config_file"])
        stage, is_away = (found[0], found[1] != "none") if found else (None, False)
    else:
        stage = shares.get("zero_stage")
        away = (shares.get("offload_optimizer_device"), shares.get("offload_param_device"))
        is_away = any(one in ("cpu", "nvme") for one in away)
    if stage not in (1, 2, 3):
        return None
    return f"zero{stage}_offload" if is_away else f"zero{stage}"
