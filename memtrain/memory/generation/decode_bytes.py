"""Bytes of a device while completions are written by the trained module, and between two steps."""

from __future__ import annotations

from memtrain.memory.estimate.peaks import phase_peak
from memtrain.memory.estimate.positions import positions_and_mask
from memtrain.memory.estimate.sharded.zero import TO_SAVE
from memtrain.memory.estimate.streamed_layers import forward_of_layer
from memtrain.memory.estimate.weights_offload import away
from memtrain.memory.estimate.workload import DTYPE_BYTES, Workload
from memtrain.memory.model_shape.families import ATTENTIONS_PER_LAYER
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.plan import PhasePeak, Prediction
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import MIB, gib
from memtrain.recipes.sections.generate import Generate

READ_TOKENS = 8192
"""Prompt tokens that the sampler reads in one forward pass, where no prompt is longer. Taste."""

CHOICE_TILE = 64 * MIB
"""Bytes of logits, in fp32, of the rows whose next tokens are chosen together."""
CHOICE_COPIES = 6
"""Copies of such a tile that are held while tokens are chosen."""


def resting_peak(prediction: Prediction) -> PhasePeak:
    """Bytes between two steps, without the tensors gathered for a save."""
    saving = next(phase for phase in prediction.phases if phase.phase == "saving")
    return phase_peak("rest", {one.owner: one.num_bytes for one in saving.owners if one.owner != TO_SAVE})


def fetched_words(settings: Settings, shape: ModelShape) -> str:
    """Weights that a written token waits for, to end a sentence; nothing where all are on the device."""
    if not settings.weights_offload or settings.device == "cpu":
        return ""
    return f"; fetches {gib(away(settings, shape).total)} of weights from the host for each token"


def generation_bytes(
    settings: Settings, shape: ModelShape, generate: Generate, prompt: int, rows: int
) -> dict[str, int]:
    """Bytes by owner while `rows` completions are written at a time.

    Native: a prompt's keys are held once for its group. Else once for each completion.
    """
    of_token = 2 * shape.kv_width * shape.num_layers * DTYPE_BYTES[settings.dtype]
    if settings.sampler == "native":
        of_token *= ATTENTIONS_PER_LAYER.get(shape.model_type, 1)
    prompts = rows if settings.sampler != "native" else -(-rows // generate.num_generations)
    keys = of_token * (prompts * prompt + rows * generate.max_tokens)
    read = max(prompt, min(READ_TOKENS, prompt * prompts))
    load = Workload(settings, shape, HeaviestBatch(1, read, 1, prompt))
    reading = forward_of_layer(load) + positions_and_mask(load)
    logits = rows * shape.vocab_size * DTYPE_BYTES[settings.dtype]
    choosing = logits + CHOICE_COPIES * min(CHOICE_TILE, 4 * rows * shape.vocab_size)
    drawn = 20 * rows * generate.max_tokens
    if settings.router_replay and shape.experts is not None:
        drawn += 2 * rows * generate.max_tokens * shape.num_expert_layers * shape.experts.num_per_token
    # Captured passes hold a pool of their own, beside what reading a prompt takes.
    passes = reading + choosing if settings.cuda_graphs else max(reading, choosing)
    return {"keys and values": keys, "sampling": passes + drawn}
