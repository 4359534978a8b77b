"""The reference's log-probs once, before training, kept on disk under a key of their inputs."""

# Q things asked, V values, A answers of a batch, K answers of an item

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from xxhash import xxh3_128_hexdigest

from memtrain.errors import DataError
from memtrain.memory.plan.engine_kinds import is_sharded
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.batches.answer_batch import AnswerBatch
from memtrain.trainers.batches.answer_batches import AnswerFeed
from memtrain.trainers.data.packing.step_order import micro_batches
from memtrain.trainers.data.store.cache import kept, key_of
from memtrain.trainers.reference.reference import AskLogps, FrozenReference
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.weight_layout import full_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

VERSION = 3
"""Changes whenever the same question would have another answer."""
VALUES_FILE = "values.npy"
DIGEST_FILE = "values.xxh3"
SAMPLED = 4096
"""Values of each weight that its fingerprint reads one by one, beside the sums of all of them."""


@dataclass(frozen=True, slots=True)
class Question:
    """Answers to be scored once: Q things that are asked, V values in all."""

    tokens: Ints
    """[Q] tokens of each thing that is asked."""
    batch: Callable[[Ints], AnswerBatch]
    """The batch of some of the Q."""
    places: Callable[[Ints], Ints]
    """Places among the V for the values of its answers."""
    num_values: int
    made_of: dict[str, Any]
    """Properties of the tokens and their answers: equal where all of them are equal."""


Answered = Callable[[Question], Floats]
"""The values of a question: float32 [V]."""


def asked_once(
    question: Question,
    reference: FrozenReference,
    ask: AskLogps,
    *,
    settings: Settings,
    ranks: Ranks,
    device: torch.device,
    folder: Path,
) -> Floats:
    """float32 [V], the log-probs of the answers asked for: from the cache, or computed now by all ranks.

    NaN where nothing was asked.
    """
    key = key_of(
        question.made_of
        | {
            "layout": VERSION,
            "weights": fingerprint(reference.scorer),
            "dtype": settings.dtype,
            "attention": settings.attention,
            "shared": settings.shared_prompts,
            "flat": settings.padding_free,
        }
    )
    place = folder / "reference" / key
    is_there = ranks.broadcast((place / VALUES_FILE).is_file())
    if not is_there:
        values = _computed(question, reference, ask, settings, ranks, device)
        if ranks.is_main:
            kept(place, VALUES_FILE, lambda part: write_values(part, values))
        ranks.barrier()
        return values
    return read_values(place)


def write_values(folder: Path, values: Floats) -> None:
    """Write values, and the digest of their file."""
    np.save(folder / VALUES_FILE, values)
    (folder / DIGEST_FILE).write_text(xxh3_128_hexdigest((folder / VALUES_FILE).read_bytes()))


def read_values(folder: Path) -> Floats:
    """The values of a folder.

    Raises: DataError when they differ from the written bytes.
    """
    path, digest = folder / VALUES_FILE, folder / DIGEST_FILE
    content = path.read_bytes()
    if not digest.is_file() or digest.read_text() != xxh3_128_hexdigest(content):
        raise DataError(
            f"'{VALUES_FILE}' is damaged: its checksum differs",
            str(path),
            f"remove '{folder}'; it will be made again",
        )
    return np.load(io.BytesIO(content))


def _computed(
    question: Question,
    reference: FrozenReference,
    ask: AskLogps,
    settings: Settings,
    ranks: Ranks,
    device: torch.device,
) -> Floats:
    """Longest first, so that little is padded, in batches of as many tokens as in training."""
    values = np.zeros(question.num_values, np.float32)
    is_asked = np.zeros(question.num_values, np.bool_)
    dealt = micro_batches(
        np.argsort(-question.tokens, kind="stable"),
        question.tokens,
        num_ranks=ranks.num_replicas,
        micro_batch_size=settings.micro_batch_size,
        micro_tokens=settings.micro_tokens,
    )
    made: list[tuple[Ints, Tensor]] = []
    for which in dealt[ranks.replica]:
        if len(which) or is_sharded(settings):
            made.append((which, reference.logps(question.batch(which).to(device), ask)))
    # Ranks that hold the same rows have the same answers: one of them brings them in.
    for which, logp_A in made if ranks.rank % ranks.num_sharing == 0 else ():
        if len(which):
            values[question.places(which)] = logp_A.float().cpu().numpy()
    if ranks.world > 1:
        total = torch.from_numpy(values).to(ranks.device)
        dist.all_reduce(total)
        values = total.cpu().numpy()
    is_asked[question.places(np.arange(len(question.tokens)))] = True
    values[~is_asked] = np.nan
    return values


def own_answers(feed: AnswerFeed, sequences: Ints) -> Question:
    """The answers of some sequences of a feed, each to its own prompt: K values an item."""
    num_answers = feed.sequences.num_answers

    def places(which: Ints) -> Ints:
        items = feed.items_of(sequences[which])
        return (items[:, None] * num_answers + np.arange(num_answers)).reshape(-1)

    return Question(
        tokens=feed.tokens[sequences],
        batch=lambda which: feed.micro_batch(sequences[which]),
        places=places,
        num_values=feed.num_items * num_answers,
        made_of=feed.made_of() | {"sequences": digest_of(sequences)},
    )


def digest_of(values: NDArray[Any]) -> str:
    """A digest of an array's values."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def fingerprint(model: nn.Module) -> str:
    """A digest of all weights that a reference computes with (adapters are not among them).

    Read in place: two sums over each tensor, and some of its values one by one.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        if "lora_" in name or ".modules_to_save." in name:
            continue
        flat = full_of(weight.detach()).reshape(-1)
        step = max(1, flat.numel() // SAMPLED)
        sums = [flat[::stride].sum(dtype=torch.float64) for stride in (1, 3)]
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(torch.stack(sums).cpu().numpy().tobytes())
        digest.update(flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
