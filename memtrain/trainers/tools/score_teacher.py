"""A pass of a teacher alone over the data of a recipe: its likeliest tokens at every loss token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch

from memtrain.memory.plan.plan import PreparedData
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.batches.taught_batches import TaughtFeed
from memtrain.trainers.build.components import feeds_of
from memtrain.trainers.data.packing.step_order import micro_batches
from memtrain.trainers.data.store.top_k import TopKFacts, TopKWriter, key_of_piece
from memtrain.trainers.data.tokenize.teacher_vocabulary import vocabulary_digest
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of
from memtrain.trainers.losses.distill.request import TopKRequest, TopKResult
from memtrain.trainers.model.loading.load import local_device
from memtrain.trainers.reference.teacher import scorer_of_teacher
from memtrain.trainers.tools.teacher_server import TeacherServer, find_server

AT_ONCE = 8
"""Rows that a server is asked about at a time. Taste."""

Progress = Callable[[int, int], None]
"""Called with (tokens scored so far, tokens in all)."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Result of the pass."""

    facts: TopKFacts
    path: Path
    num_tokens: int
    num_bytes: int


def score_teacher(
    recipe: Recipe,
    data: PreparedData,
    settings: Settings,
    *,
    num_columns: int,
    progress: Progress = lambda done, total: None,
) -> Scored:
    """Write `distill.top_k_file`; `num_columns`: the student's vocabulary; `settings`: of the teacher alone.

    Every piece of a row is scored once, however often it comes. Raises: LaunchError when the teacher cannot
    be loaded, or trusted with rows that lie end to end, or its server does not answer.
    """
    section = recipe.taught
    assert section is not None, "The command checked the recipe."
    assert section.top_k is not None, "The command checked the recipe."
    torch.set_num_threads(settings.threads)
    tokenizer = tokenizer_of(recipe.model)
    pad_id = cast(int | None, tokenizer.pad_token_id)
    train, held_out = feeds_of(recipe, data, settings, TaughtFeed, pad_id if pad_id is not None else 0)
    work = [one for feed in (train, held_out) if feed is not None for one in _work(feed, settings)]
    pieces = dict[int, int]()
    for feed, sequences in work:
        for sequence in sequences.tolist():
            pieces |= dict(feed.keys_of(sequence))
    keys = np.fromiter(pieces, np.uint64, len(pieces))
    counts = np.fromiter(pieces.values(), np.int64, len(pieces))
    place = f"{recipe.method}.teacher_server"
    facts = TopKFacts(
        teacher=str(section.teacher),
        top_k=section.top_k,
        temperature=section.temperature,
        vocabulary=vocabulary_digest(tokenizer),
        num_columns=num_columns,
    )
    folder = Path(cast(str, section.top_k_file)).expanduser()
    number_of = {key: number for number, key in enumerate(pieces)}
    if section.teacher_server is None:
        longest = max(int(feed.tokens.max()) for feed, _ in work)
        scorer = scorer_of_teacher(recipe, settings, longest)
        writer = TopKWriter(folder, keys, counts, facts)
        _fill(writer, scorer, work, number_of, settings, facts, progress)
    else:
        server = find_server(
            section.teacher_server,
            str(section.teacher),
            top_k=facts.top_k,
            num_columns=num_columns,
            place=place,
        )
        writer = TopKWriter(folder, keys, counts, facts)
        _fill_from_server(writer, server, work, number_of, progress)
    made = writer.finish()
    return Scored(made, writer.path, int(counts.sum()), writer.path.stat().st_size)


def _work(feed: TaughtFeed, settings: Settings) -> Iterator[tuple[TaughtFeed, np.ndarray]]:
    """Sequences of each batch, longest first."""
    order = np.argsort(-feed.tokens, kind="stable")
    dealt = micro_batches(
        order,
        feed.tokens,
        num_ranks=1,
        micro_batch_size=settings.micro_batch_size,
        micro_tokens=settings.micro_tokens,
    )
    return ((feed, sequences) for sequences in dealt[0])


def _fill_from_server(
    writer: TopKWriter,
    server: TeacherServer,
    work: list[tuple[TaughtFeed, np.ndarray]],
    number_of: dict[int, int],
    progress: Progress,
) -> None:
    """Every piece is asked for once, several at a time: the server batches them."""
    pieces = {
        key_of_piece(piece.ids, piece.loss_mask): piece
        for feed, sequences in work
        for sequence in sequences.tolist()
        for piece in feed.pieces_of(sequence)
    }
    scored = {key: piece for key, piece in pieces.items() if piece.loss_mask[1:].any()}
    total, done = sum(len(piece) for piece in scored.values()), 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda piece: server.likely(piece.ids.tolist()), scored.values())
        for (key, piece), likely in zip(scored.items(), answers, strict=True):
            is_scored = piece.loss_mask[1:]
            writer.put(number_of[key], *(values[is_scored] for values in likely))
            done += len(piece)
            progress(done, total)


def _fill(
    writer: TopKWriter,
    scorer: torch.nn.Module,
    work: list[tuple[TaughtFeed, np.ndarray]],
    number_of: dict[int, int],
    settings: Settings,
    facts: TopKFacts,
    progress: Progress,
) -> None:
    request = TopKRequest(facts.top_k, facts.temperature, facts.num_columns)
    device, written, done = local_device(settings), set[int](), 0
    total = sum(int(feed.tokens[sequences].sum()) for feed, sequences in work)
    for feed, sequences in work:
        batch = feed.micro_batch(sequences).to(device)
        with torch.no_grad():
            found: TopKResult = scorer(batch.model_inputs(), batch.scored_index, request)
        ids, logps, tail = found.ids_NK.cpu().numpy(), found.logp_NK.cpu().numpy(), found.tail_N.cpu().numpy()
        at = 0
        for sequence in sequences.tolist():
            for key, count in feed.keys_of(sequence):
                if key not in written:
                    span = slice(at, at + count)
                    writer.put(number_of[key], ids[span], logps[span], tail[span])
                    written.add(key)
                at += count
        done += int(feed.tokens[sequences].sum())
        progress(done, total)
