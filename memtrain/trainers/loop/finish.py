"""The end of a run: the best weights, the model for Hugging Face, its card, a sample."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any, cast

import torch

from memtrain.errors import first_line_of
from memtrain.memory.hardware.peak_history import note_run
from memtrain.trainers.batches.answer_batches import AnswerFeed
from memtrain.trainers.build.components import Built
from memtrain.trainers.checkpoints.checkpoint import best_complete, step_name
from memtrain.trainers.checkpoints.final_model import is_ours, note_final
from memtrain.trainers.checkpoints.manifest import facts_of, metric_of
from memtrain.trainers.checkpoints.snapshot import WHOLE_WEIGHTS, load_weights
from memtrain.trainers.loop.early_stopping import end_words
from memtrain.trainers.loop.final_scores import check_final_scores
from memtrain.trainers.loop.loop import Run
from memtrain.trainers.model.attention import attention_switched
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.heads.lm_head import Scorer
from memtrain.trainers.model.heads.reward_head import RewardScorer
from memtrain.trainers.model.heads.value_head import ValueScorer, save_value, value_of
from memtrain.trainers.model.loading.save import save_final
from memtrain.trainers.online.generation.backend import stop_tokens
from memtrain.trainers.online.rewards.reading import reading_of, write_reading
from memtrain.trainers.protocols.events import FinalEvent, HostMemoryEvent, MemoryEvent, NoteEvent
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.report.model_card import write_card
from memtrain.trainers.run_folder.report.report import DRY_RUN

KIB = 1024
"""Linux counts `ru_maxrss` in these."""
SAMPLE_TOKENS = 48
GATHERED_TOKENS = 16
"""Tokens of a sample where each one gathers every layer from the other ranks. Taste."""


def finish(run: Run, built: Built, folder: RunFolder) -> None:
    """Write `final/`; where the best weights are kept, those."""
    recipe, max_steps = run.plan.recipe, run.plan.settings.max_steps
    best_step, is_early = None, run.position.step < max_steps
    saved_step = run.position.step
    if recipe.keeps_best:
        best = best_complete(folder, metric_of(run.plan)).checkpoint
        if best is not None and best.manifest.facts.step != run.position.step:
            load_weights(best, built.scorer, run.ranks)
            best_step = saved_step = best.manifest.facts.step
    note_other_peaks(run)
    note_host_memory(run)
    state = built.spread.gather(built.model)
    scorer, gather = built.scorer, built.spread.gather
    value_state = gather(value_of(scorer)) if isinstance(scorer, ValueScorer) else None
    if run.ranks.is_main:
        # Before all else: whatever fails after this, the model is there.
        saved = folder.checkpoints / step_name(saved_step) / WHOLE_WEIGHTS

        def beside(made: Path) -> None:
            if isinstance(scorer, RewardScorer) and isinstance(built.train, AnswerFeed):
                write_reading(reading_of(built.train.store.meta), made)
            if isinstance(scorer, ValueScorer):
                save_value(scorer, built.tokenizer, made, value_state)
            note_final(folder, facts_of(run.plan, step=run.position.step, stopped_early=is_early), made)

        aside = save_final(
            built.model,
            built.tokenizer,
            folder.final,
            state,
            saved=saved,
            beside=beside,
            is_ours=is_ours(folder),
        )
        if aside is not None:
            text = f"final/ held what memtrain did not write, or was changed: that is {aside.name}/ now"
            run.observers.emit(NoteEvent(step=run.position.step, text=text))
    # Every rank writes the same words: with weights in shards no rank can do it alone.
    writes = recipe.log.final_sample and (run.ranks.is_main or built.spread.is_sharded)
    prompt, written = sample(run, built) if writes else ("", "")
    other_scores = _other_scores(run, built)
    if not run.ranks.is_main:
        return
    remember_peaks(run)
    if other_scores:
        run.observers.emit(NoteEvent(step=run.position.step, text=other_scores))
    run.observers.emit(
        FinalEvent(
            step=run.position.step,
            state="done",
            seconds=time.time() - run.observers.started,
            model=str(folder.final),
            best_step=best_step,
            sample=written,
            sample_prompt=prompt,
            stopped_early=end_words(run.position, recipe, max_steps) if is_early else "",
        )
    )
    write_card(folder)
    note_final(folder, facts_of(run.plan, step=run.position.step, stopped_early=is_early))


def _other_scores(run: Run, built: Built) -> str:
    """Sentence about the scores of `final/` in plain transformers; mostly empty."""
    feed = run.evaluation.feed or run.steps.feed
    if not isinstance(built.scorer, RewardScorer) or not isinstance(feed, AnswerFeed):
        return ""
    try:
        return check_final_scores(built, feed).fault
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        # The model is saved; classes of transformers fail on rows in ways of their own.
        return f"the scores of final/ in plain transformers were not checked: {first_line_of(error)}"


def note_other_peaks(run: Run) -> None:
    """Tell the peak of every phase in which another rank needed more than the main one."""
    phases = run.ranks.gather(run.observers.watch.phases)
    for name, mine in phases[0].items():
        most = max(of_rank.get(name, 0) for of_rank in phases)
        if most > mine:
            run.observers.emit(MemoryEvent(step=run.position.step, phase=name, allocated=most))


def note_host_memory(run: Run) -> None:
    """Tell the peak resident memory of all processes of the run; nothing where memory is not measured."""
    peaks = run.ranks.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB)
    if run.plan.recipe.memory.measure_peaks:
        run.observers.emit(HostMemoryEvent(step=run.position.step, resident=sum(peaks), processes=len(peaks)))


def remember_peaks(run: Run) -> None:
    """Put the measured peaks beside the predicted ones into this machine's store: the next plan reads it.

    Of the main rank's device; nothing where memory was not watched.
    """
    prediction, seen = run.plan.prediction, run.observers.watch.phases
    predicted = {phase.phase: phase.num_bytes for phase in prediction.phases}
    measured = {name: max(seen.get(name, 0), seen.get(f"{DRY_RUN}{name}", 0)) for name in predicted}
    both = [name for name, num_bytes in measured.items() if num_bytes]
    if not run.ranks.is_main or not both:
        return
    try:
        note_run(
            prediction.kind,
            predicted_bytes=max(predicted[name] for name in both),
            measured_bytes=max(measured[name] for name in both),
            had_preflight=any(name.startswith(DRY_RUN) for name in seen),
        )
    except OSError as error:
        text = f"the measured peaks could not be stored for later plans: {error.strerror}"
        run.observers.emit(NoteEvent(step=run.position.step, text=text))


def sample(run: Run, built: Built) -> tuple[str, str]:
    """Beginning of a held-out row (or of a training row), and the same with the model's text after it.

    Nothing where it scores sequences. Where its class cannot write (transformers' generate fails on some), or
    memory runs out, the reason: the model is saved all the same.
    """
    if not isinstance(built.scorer, Scorer):
        return "", ""
    was_training = built.model.training
    built.model.eval()
    try:
        return _written(run, built)
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        return (
            "",
            f"(no sample: {type(base_model(built.model)).__name__}.generate fails: {first_line_of(error)})",
        )
    finally:
        built.model.train(was_training)


def _written(run: Run, built: Built) -> tuple[str, str]:
    feed = run.evaluation.feed or run.steps.feed
    prompt_T = feed.sample_prompt().to(run.step.device)
    with attention_switched(base_model(built.model), "eager"), torch.no_grad():
        written = cast(Any, built.model).generate(
            input_ids=prompt_T[None],
            attention_mask=torch.ones_like(prompt_T)[None],
            max_new_tokens=GATHERED_TOKENS if built.spread.is_sharded else SAMPLE_TOKENS,
            do_sample=False,
            use_cache=True,
            pad_token_id=built.tokenizer.pad_token_id or built.tokenizer.eos_token_id,
            eos_token_id=list(stop_tokens(built)) or None,
        )
    decode = built.tokenizer.decode
    return str(decode(prompt_T, skip_special_tokens=False)), str(
        decode(written[0], skip_special_tokens=False)
    )
