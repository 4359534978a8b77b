"""The `length:` section: how long a row may be, and how rows share the sequences that enter the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import model_validator

from memtrain.recipes.sections.base import PositiveInt, Section

Truncation = Literal["keep_start", "keep_end", "drop"]
Packing = Literal["none", "bfd", "bfd_split", "wrapped"]


OF_ANSWERS = ("max_prompt", "max_completion", "shared_prompts", "group_prompts")
"""Keys without effect on rows that are trained on whole."""
OF_READ_ROWS = ("max_completion", "group_prompts", "packing", "group_by_length")
"""Keys without effect on prompts whose answers are still to be written."""


class Length(Section):
    """Truncation, packing and padding. What is cut or dropped is always counted and reported."""

    max_length: PositiveInt | None = 1024
    """Longest row in tokens; `memtrain inspect-lengths` helps to choose. Higher: more memory, less cut.
    null: rows are never cut (not with packing)."""

    truncation: Truncation | None = None
    """Handling of a longer row: its start is kept, its end is kept, or the row is left out. With answers,
    `keep_end` cuts the beginning of the prompt and leaves the answers whole where they fit; `keep_start`
    cuts the end of the answers. If not set: `keep_start` for `sft`, `keep_end` for all other methods,
    whose rows begin with a prompt."""

    max_prompt: PositiveInt | None = None
    """Longest prompt in tokens (methods with answers); it is cut at the end that `truncation` does not
    keep."""

    max_completion: PositiveInt | None = None
    """Longest answer in tokens (methods with answers); it is cut at its end."""

    shared_prompts: bool | None = None
    """Compute a prompt once for all its answers (methods with answers). Same numbers. If not set: wherever
    a back end can. false: once for each answer."""

    group_prompts: bool = False
    """Put rows with the same prompt into one sequence, up to 8 of them, so that the prompt is computed
    once. A step's rows are then counted in prompts."""

    packing: Packing = "none"
    """Fill sequences of `max_length` with several rows. `bfd`: best-fit decreasing, longer rows are
    truncated; `bfd_split`: longer rows are split, no loss token is lost; `wrapped`: rows are concatenated
    and cut, so that every sequence is full and a row's order is kept. Where a cut leaves only the prompt
    in a sequence, `wrapped` spends tokens that nothing is learned from; `bfd_split` leaves such pieces
    out."""

    cross_document_attention: bool = False
    """With `wrapped`: let rows of one sequence attend to each other (pretraining style). false: they never
    do."""

    padding_free: bool | None = None
    """Lay the rows of a micro-batch end to end instead of padding them. If not set: wherever a back end
    keeps rows apart. Packing needs it."""

    pad_to_multiple_of: PositiveInt | None = None
    """Pad each sequence to a multiple of this many tokens (tensor cores like 8 or 64; context parallelism
    needs twice its degree)."""

    group_by_length: bool = False
    """In padded runs, put rows of similar length in one batch: less padding, a less random order."""

    @model_validator(mode="after")
    def _packing_needs_a_length(self) -> Length:
        if self.packing != "none" and self.max_length is None:
            raise ValueError(
                f"packing {self.packing} fills sequences of max_length tokens; set length.max_length"
            )
        if self.packing != "none" and self.padding_free is False:
            raise ValueError(
                "packed rows are never padded; remove length.padding_free or set length.packing to none"
            )
        if self.cross_document_attention and self.packing != "wrapped":
            raise ValueError(
                "cross_document_attention works with packing wrapped only; remove it, or set length.packing"
            )
        if self.packing == "wrapped" and self.truncation == "drop":
            raise ValueError(
                "packing wrapped removes no tokens, so truncation drop has no effect; remove one of them"
            )
        if self.group_by_length and self.padding_free:
            raise ValueError(
                "group_by_length saves padding, and padding_free rows have none; remove one of them"
            )
        if self.group_by_length and self.packing != "none":
            raise ValueError(
                "group_by_length has no effect on packed rows; remove it or set length.packing to none"
            )
        return self


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Limits of rows and of their packing, with nothing left open. Fields as in `Length`."""

    max_length: int | None
    truncation: Truncation
    max_prompt: int | None
    max_completion: int | None
    group_prompts: bool
    packing: Packing
    cross_document_attention: bool


def other_length(length: Length, max_length: int, truncation: str | None, packing: str = "none") -> Length:
    """The same with other limits, and packed otherwise."""
    return length.model_copy(update={"max_length": max_length, "truncation": truncation, "packing": packing})


def with_prompts_apart(length: Length) -> Length:
    """The same with a prompt for each answer."""
    return length.model_copy(update={"shared_prompts": False})


def truncations(*, has_prompts: bool) -> tuple[Truncation, ...]:
    """The ways to truncate, the one that is taken where the recipe says none first.

    The end of a prompt is what its answer follows; of rows trained on whole the start can be understood.
    """
    return ("keep_end", "keep_start", "drop") if has_prompts else ("keep_start", "keep_end", "drop")


def limits_of(length: Length, *, has_prompts: bool, to_write: int = 0) -> RowLimits:
    """The limits that a `length:` section stands for, of rows with prompts or of rows trained on whole.

    `to_write`: tokens that are written after a prompt, which leave it so much less of `max_length`.
    """
    limits = [length.max_prompt, length.max_length - to_write if to_write and length.max_length else None]
    return RowLimits(
        max_length=length.max_length,
        truncation=length.truncation or truncations(has_prompts=has_prompts)[0],
        max_prompt=min((limit for limit in limits if limit is not None), default=None),
        max_completion=length.max_completion,
        group_prompts=length.group_prompts,
        packing=length.packing,
        cross_document_attention=length.cross_document_attention,
    )
