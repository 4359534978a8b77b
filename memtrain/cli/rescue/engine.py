"""The cards and the engine of a run, where its configuration does not say them but its output does."""

from __future__ import annotations

from dataclasses import replace

from memtrain.cli.rescue.traceback import OomReport
from memtrain.recipes.importers.importing import Foreign

SHARING = ("deepspeed", "fsdp", "accelerate_config")
"""Keys of engines that share a run among cards."""

_TITLES = {"zero2": "DeepSpeed's ZeRO-2", "zero3": "DeepSpeed's ZeRO-3", "fsdp2": "FSDP"}


def with_cards(foreign: Foreign, num_gpus: int | None, died: OomReport) -> tuple[Foreign, list[str]]:
    """(the configuration on as many cards as the output names, where nothing else says them, and under the
    engine of its frames; notes)."""
    foreign, notes = _with_ranks(foreign, num_gpus, died)
    says_engine = any(foreign.config.get(key) for key in SHARING)
    reads_engine = foreign.tool.name not in ("axolotl", "verl")
    if died.engine is None or foreign.processes == 1 or says_engine or not reads_engine:
        return foreign, notes
    words = f"The frames of the traceback are of {_TITLES[died.engine]}, and the run is planned under it."
    return replace(foreign, config={**foreign.config, "accelerate_config": died.engine}), [*notes, words]


def _with_ranks(foreign: Foreign, num_gpus: int | None, died: OomReport) -> tuple[Foreign, list[str]]:
    if num_gpus is not None or foreign.processes > 1:
        return foreign, []
    if died.ranks is not None and died.ranks > 1:
        words = f"The output names rank {died.ranks - 1}: {died.ranks} cards are taken (--num-gpus)."
        return replace(foreign, processes=died.ranks), [words]
    if died.device:
        words = (
            f"The message is of GPU {died.device}: --num-gpus says how many cards the run had; one is taken."
        )
        return foreign, [words]
    if any(foreign.config.get(key) for key in SHARING):
        return foreign, ["Nothing says how many cards the run had: one is taken (--num-gpus)."]
    return foreign, []
