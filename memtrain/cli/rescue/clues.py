"""Clues in the numbers of a traceback: the tensor that was asked for, fragments, other processes."""

from __future__ import annotations

from collections.abc import Iterator

from memtrain.cli.rescue.as_it_was import AsItWas, died_in
from memtrain.cli.rescue.traceback import OomReport
from memtrain.memory.estimate.pricing import heaviest
from memtrain.memory.estimate.static import weights_bytes
from memtrain.memory.plan.units import MIB, gib

EXACT = 0.004
"""A request this near to a tensor's bytes is that tensor: messages say two digits."""

LARGE = 0.08
"""Share of a card that is worth a sentence. Taste."""


def clues(died: OomReport, was: AsItWas | None, budget: int) -> Iterator[str]:
    """Sentences, the surest first."""
    if died.on_host:
        yield (
            "The host's memory ran out, not the card's: rows, offloaded tensors and the copies of a save are "
            "there. Fewer loader processes, or a machine with more memory."
        )
    if was is not None and died.asked_bytes is not None:
        yield from _tensor(died.asked_bytes, was)
    if died.capacity_bytes and died.others_bytes and died.others_bytes > LARGE * died.capacity_bytes:
        yield f"Other processes hold {gib(died.others_bytes)} of the card: end them (nvidia-smi lists them)."
    if died.capacity_bytes and died.idle_bytes and died.idle_bytes > LARGE * died.capacity_bytes:
        yield (
            f"{gib(died.idle_bytes)} were reserved by the allocator and in no tensor: fragments. "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps them together."
        )
    if was is not None and died.allocated_bytes is not None:
        held = died_in(was, died.moment).num_bytes
        yield f"torch had {gib(died.allocated_bytes)} in tensors; the plan of that moment says {gib(held)}."
    if was is not None and was.priced.need_bytes <= budget:
        yield (
            f"By arithmetic the run needs {gib(was.priced.need_bytes)} and should have fitted: what held the "
            "rest is not in the configuration (longer rows, other processes, code of its own)."
        )


def _tensor(asked: int, was: AsItWas) -> Iterator[str]:
    """The tensor that is as large as the request."""
    settings, shape = was.priced.settings, was.facts.shape
    batch = heaviest(settings, was.facts)
    tokens = batch.rows * batch.longest
    vocabulary = shape.vocab_size
    for words, size in (("float32", 4), ("half-precision", 2)):
        for count in (tokens, tokens - batch.rows, batch.longest, batch.longest - 1):
            if count > 1 and _is_near(asked, size * count * vocabulary):
                yield (
                    f"The allocation that failed, {gib(asked)}, was of {words} logits: {count:,} tokens x "
                    f"{vocabulary:,} words of the vocabulary."
                )
                return
    scores = batch.rows * shape.num_heads * batch.longest**2
    for words, size in (("float32", 4), ("half-precision", 2)):
        if asked > 64 * MIB and _is_near(asked, size * scores):
            yield (
                f"The allocation that failed, {gib(asked)}, was of {words} attention scores: "
                f"{batch.longest:,} x {batch.longest:,} tokens. sdpa and flash_attention_2 keep none."
            )
            return
    if _is_near(asked, weights_bytes(settings, shape)):
        yield f"The allocation that failed, {gib(asked)}, was of the whole model."


def _is_near(asked: int, size: int) -> bool:
    return abs(asked - size) <= EXACT * size
