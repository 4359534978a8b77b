"""Rules for models whose numbers depend on the length of a row: positions, micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memtrain.memory.model_shape.config_names import canonical
from memtrain.memory.model_shape.length_rules import LengthRule, reached
from memtrain.memory.model_shape.rope_scaling import PATH, suggested
from memtrain.memory.rules.batching import Micro
from memtrain.memory.rules.ledger import DecisionLog


def decide_positions(
    ledger: DecisionLog, rules: Sequence[LengthRule], longest: int, *, padding_free: bool
) -> bool:
    """Whether padded rows carry positions that mark their lengths; notes the lengths of a run's rows.

    Notes a refusal where a completion would change what its own first tokens were sampled from.
    """
    placed = reached(rules, None, "place")
    if placed is not None and padding_free:
        ledger.decide("positions", "each row's own", f"{placed.summary}, not in the rows beside it")
    rule = reached(rules, longest, "row")
    if rule is None:
        return False
    if ledger.asked.recipe.online is not None:
        _refuse_growing(ledger, rule, longest)
    how = "rows are concatenated, each with its own" if padding_free else "rows are padded, one at a time"
    ledger.decide("positions", "by the length of each row", f"{rule.summary}; {how}")
    return not padding_free


def decide_scaling(ledger: DecisionLog, config: Mapping[str, Any], longest: int) -> None:
    """Note the recipe's scaling of positions, or rows beyond the length that the model was made for."""
    model, most = ledger.asked.recipe.model, canonical(config).get("max_position_embeddings")
    if model.rope_scaling is not None:
        of_adapter = "; the adapter does not carry it" if model.adapter is not None else ""
        value = f"{model.rope_scaling.rope_type} x {model.rope_scaling.factor:g}"
        ledger.decide("rope_scaling", value, f"rows of up to {most or 0:,} tokens{of_adapter}", PATH)
    elif isinstance(most, int) and longest > most:
        words = suggested(config, longest)
        ledger.decide(
            "rope_scaling",
            "none",
            f"the model was made for rows of {most:,} tokens, and the longest may have {longest:,}"
            + (f"; {PATH}: {words} scales its positions" if words else ""),
            PATH,
        )


def one_row_a_time(ledger: DecisionLog, micro_batches: list[Micro]) -> list[Micro]:
    """The smallest micro-batches alone, unless the recipe says how large they are: with a row beside it a
    padded row needs a mask of its length squared."""
    return micro_batches[-1:] if ledger.asked.recipe.train.micro_batch_size == "auto" else micro_batches


def _refuse_growing(ledger: DecisionLog, rule: LengthRule, longest: int) -> None:
    generate = ledger.asked.recipe.generation
    room = rule.tokens - (longest - generate.max_tokens)
    lower = (
        f"set generate.max_tokens to at most {room}" if room > 0 else f"keep prompts below {rule.tokens:,}"
    )
    ledger.refuse(
        f"prompt and completion may have {longest:,} tokens, and {rule.summary}: a completion that grows "
        "past this length changes the log-probs of its earlier tokens, which were sampled before",
        "generate.max_tokens",
        f"{lower} (length.max_prompt leaves out longer prompts), or name a model without this scaling",
    )
