"""Clues in the numbers of a traceback: the tensor that was asked for, fragments, other processes."""

from __future__ import annotations

from collections.abc import Iterator

from memtrain.cli.rescue.as_it_was import AsItWas, died_in
from memtrain.cli.rescue.traceback import OomReport
from memtrain.memory.estimate.host_phases import highest
from memtrain.memory.estimate.pricing import heaviest, phases_on_host
from memtrain.memory.estimate.static import COMMUNICATION_BYTES, weights_bytes
from memtrain.memory.plan.units import MIB, gib

EXACT = 0.004
"""A request this near to a tensor's bytes is that tensor: messages say two digits."""

LARGE = 0.08
"""Share of a card that is worth a sentence. Taste."""


AMD = (
    "The card is one of AMD's, and memtrain has not been run on ROCm: the plans are of its memory; their "
    "times are of a card of NVIDIA's with as much."
)

UNEXPLAINED = 0.95
"""Share of what torch had and asked for below which a plan does not explain it. Taste."""

VLLM = {
    "start": "vLLM asks for its share of the whole card as it starts, and less was free: give it a smaller "
    "share (gpu_memory_utilization), or end what else is on the card.",
    "cache": "vLLM's share of the card holds its weights and leaves no room for its cache: give it a larger "
    "share (gpu_memory_utilization).",
    "length": "vLLM's share of the card has no room for one row of its longest length: set max_model_len to "
    "prompt and completion together, or give it a larger share (gpu_memory_utilization).",
}
"""Sentences by vLLM's own refusal."""


NCCL = (
    f"NCCL asked the card for the buffers of a communicator, about {gib(COMMUNICATION_BYTES)} beside torch's "
    "allocator, whose reserved memory it cannot use: the card was full as the first collective ran."
)


def clues(died: OomReport, was: AsItWas | None, budget: int) -> Iterator[str]:
    """Sentences, the surest first."""
    if died.is_of_amd:
        yield AMD
    if died.on_host:
        yield from _host(died, was)
    if died.vllm is not None:
        yield VLLM[died.vllm]
    if died.in_nccl:
        yield NCCL
    if was is not None and died.asked_bytes is not None:
        yield from _tensor(died.asked_bytes, was)
    if died.capacity_bytes and died.others_bytes and died.others_bytes > LARGE * died.capacity_bytes:
        yield f"Other processes hold {gib(died.others_bytes)} of the card: stop them (nvidia-smi lists them)."
    if died.capacity_bytes and died.idle_bytes and died.idle_bytes > LARGE * died.capacity_bytes:
        grows = was is not None and was.priced.settings.expandable_segments
        less = "" if grows else " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces it."
        yield (
            f"{gib(died.idle_bytes)} were reserved by the allocator but held no tensor (fragmentation).{less}"
        )
    if was is None:
        return
    if not died.on_host:
        yield from _waiting(was)
    explains = True
    if died.allocated_bytes is not None:
        held, wanted = died_in(was, died.moment).num_bytes, died.allocated_bytes + (died.asked_bytes or 0)
        explains = held >= UNEXPLAINED * wanted
        yield _had(died, held, explains=explains)
    if was.need_bytes <= budget and not died.on_host:
        rest = ": what held the rest is not in the configuration (longer rows, other processes, its own code)"
        yield (
            f"By arithmetic the run needs {gib(was.need_bytes)} and should have fitted"
            f"{rest if explains else ''}."
        )


def _waiting(was: AsItWas) -> Iterator[str]:
    """A sentence on the host's memory, where a run keeps parts there that are worth one."""
    settings, host = was.priced.settings, was.facts.hardware.host_bytes
    if settings.shard_offload == "none" and not (settings.optimizer_offload or settings.weights_offload):
        return
    name, owners = highest(phases_on_host(was.priced, was.facts))
    held = sum(owners.values())
    more = " That is more than there is." if held > host else ""
    yield f"The host holds {gib(held)} meanwhile, most in its {name}, of {_there(was)}.{more}"


def _there(was: AsItWas) -> str:
    """The host's memory, and whether anybody said how much it is."""
    hardware = was.facts.hardware
    return f"{gib(hardware.host_bytes)} that {'are assumed' if hardware.presumes_host else 'are there'}"


def _had(died: OomReport, held: int, *, explains: bool) -> str:
    """A sentence on the bytes that torch had and asked for, beside the plan of that moment."""
    had = died.allocated_bytes or 0
    text = f"torch had {gib(had)} in tensors"
    if died.asked_bytes is not None:
        text += f" and asked for {gib(died.asked_bytes)} more, {gib(had + died.asked_bytes)} together"
    if explains:
        return f"{text}; the prediction for that moment is {gib(held)}."
    return (
        f"{text}; the prediction for that moment is only {gib(held)}: the rest is not in the configuration "
        "(longer rows, more rows at once, its own code), or another configuration ran."
    )


def _host(died: OomReport, was: AsItWas | None) -> Iterator[str]:
    """Sentences on a host that ran out of memory."""
    yield (
        "The host's memory ran out, not the card's: it holds rows, offloaded tensors and the copies of a "
        "save. Use fewer loader processes, or a machine with more memory."
    )
    if was is None:
        return
    settings, shape = was.priced.settings, was.facts.shape
    number = settings.num_processes
    if died.moment == "load":
        each = weights_bytes(settings.model_copy(update={"quantize": "none"}), shape)
        yield (
            f"It died while weights were loaded: a process that loads them whole on the host holds "
            f"{gib(each)} meanwhile" + (f", {number} of them {gib(number * each)}." if number > 1 else ".")
        )
    name, owners = highest(phases_on_host(was.priced, was.facts))
    listed = ", ".join(f"{owner} {gib(size)}" for owner, size in owners.items() if size > 64 * MIB)
    yield (
        f"As a run of memtrain's it would hold {gib(sum(owners.values()))} of the host in its {name}, of "
        f"{_there(was)} ({listed or 'no owner of size'})."
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
                    f"The allocation that failed, {gib(asked)}, was for {words} logits: {count:,} tokens x "
                    f"{vocabulary:,} vocabulary entries."
                )
                return
    scores = batch.rows * shape.num_heads * batch.longest**2
    for words, size in (("float32", 4), ("half-precision", 2)):
        if asked > 64 * MIB and _is_near(asked, size * scores):
            yield (
                f"The allocation that failed, {gib(asked)}, was for {words} attention scores: "
                f"{batch.longest:,} x {batch.longest:,} tokens. sdpa and flash_attention_2 keep none."
            )
            return
    if _is_near(asked, weights_bytes(settings, shape)):
        yield f"The allocation that failed, {gib(asked)}, was for the whole model."


def _is_near(asked: int, size: int) -> bool:
    return abs(asked - size) <= EXACT * size
