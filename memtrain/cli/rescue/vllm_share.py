"""vLLM beside a run of another tool on the same card: its share, asleep or awake."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.memory.estimate.pricing import Priced
from memtrain.memory.estimate.static import needed
from memtrain.memory.generation.vllm import CUDA_ASLEEP, own_engine, shares_device
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.plan.units import gib
from memtrain.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Beside:
    """Bytes of a card that vLLM holds, and what the run and it need together."""

    share_bytes: int
    """Share of the card; 0 where it is on no card of the run."""
    sleeps: bool
    shared_bytes: int
    """Weights that it shares with the run, within its share."""
    together_bytes: int
    """Need of both, while the weights are trained or while completions are written, whichever is more."""

    def words(self) -> str:
        """A sentence; empty where there is no vLLM."""
        if not self.share_bytes:
            return ""
        when = "while completions are written" if self.sleeps else "while the weights are trained, too"
        shared = f", {gib(self.shared_bytes)} of them weights that both read" if self.shared_bytes else ""
        return f"vLLM holds {gib(self.share_bytes)} of each card {when}{shared}."


def beside_vllm(recipe: Recipe, priced: Priced, hardware: Hardware, *, shares_weights: bool) -> Beside:
    """The need of a run and of the vLLM that writes its completions on the same cards.

    `shares_weights`: it computes with the run's own weights, as Unsloth's does.
    """
    section = own_engine(recipe)
    if section is None or not shares_device(recipe) or section.memory_share == "auto":
        return Beside(0, False, 0, priced.need_bytes)
    phases = {phase.phase: phase for phase in priced.prediction.phases}
    share, resting = round(section.memory_share * hardware.memory_bytes), phases["saving"]
    weights = next((one.num_bytes for one in resting.owners if one.owner == "weights"), 0)
    shared = weights if shares_weights else 0
    sleeps = section.sleep not in ("auto", "off")
    trains = priced.need_bytes + (CUDA_ASLEEP if sleeps else share - shared)
    writes = needed(resting.num_bytes, priced.settings) + share - shared
    return Beside(share, sleeps, shared, max(trains, writes))
