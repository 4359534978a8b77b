"""The section of distillation: `distill:`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from memtrain.recipes.sections.base import Fraction, PositiveInt, Section, address_of_server, changes

ADAPTER_OFF = "adapter_off"
"""The teacher that is the student without its adapter."""

TeacherKind = Literal["none", "model", "adapter_off", "file"]
"""Source of a teacher's distribution: a model beside the student, the student without its adapter, or a file
of its likeliest tokens."""


class Distill(Section):
    """Distillation: make the student's next-token distribution the teacher's (GKD, arXiv:2306.13649)."""

    teacher: str | None = None
    """The teacher: hub id or folder of a model with the student's tokenizer, or `adapter_off`, the student
    without its adapter. Without `top_k` it stays in memory beside the student and runs in every step."""

    teacher_revision: str | None = None
    """Revision of the teacher on the hub."""

    teacher_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the teacher's weights. `auto`: the student's."""

    top_k: PositiveInt | None = None
    """Number of the teacher's most likely tokens that are read from `top_k_file` for each position; all
    other tokens count together as one outcome. If not set: the whole vocabulary, from a teacher in memory.
    Higher: closer to that, for 8 bytes more on disk each."""

    top_k_file: str | None = None
    """Folder of the teacher's top-k tokens, which `memtrain score-teacher` writes in one pass over the
    data. The run reads it, and loads no teacher."""

    teacher_server: str | None = None
    """Address of a vLLM server (or another with its `prompt_logprobs`) that holds the `teacher`, such as
    `http://localhost:8000`: `memtrain score-teacher` asks it for the top-k tokens, and loads no weights.
    Start the server with `--max-logprobs` of at least `top_k`. Its key, if it has one, is read from the
    environment variable VLLM_API_KEY."""

    beta: Fraction = 0.5
    """The divergence. 0: forward KL, which covers all that the teacher says; 1: reverse KL, which keeps to
    what it says most; between: the generalized Jensen-Shannon divergence."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of both distributions. Higher: more weight on unlikely tokens. The loss is not multiplied
    by its square."""

    cross_entropy_weight: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the loss that is the cross-entropy on the data's tokens; the rest is the divergence."""

    on_policy_fraction: Fraction = 0.0
    """Share of the optimizer steps that learn from completions which the student writes for the prompts of
    its rows (GKD's lambda), one each, by the keys of `generate`. The others learn from the rows
    themselves. Higher: closer to how the student will be used, more time."""

    @property
    def kind(self) -> TeacherKind:
        """Source of the teacher's distribution."""
        if self.top_k is not None:
            return "file"
        return "adapter_off" if self.teacher == ADAPTER_OFF else "model"

    @property
    def loads_teacher(self) -> bool:
        """Whether a model of its own is in memory beside the student."""
        return self.kind == "model"

    @model_validator(mode="after")
    def _completions_are_new(self) -> Distill:
        if self.on_policy_fraction and self.top_k is not None:
            raise ValueError(
                "on_policy_fraction needs a teacher that can score new text, but top_k_file covers only "
                "the rows; remove top_k and top_k_file, or on_policy_fraction"
            )
        return self

    @model_validator(mode="after")
    def _server_can_be_asked(self) -> Distill:
        if self.teacher_server is None:
            return self
        address_of_server("teacher_server", self.teacher_server)
        if self.teacher is None or self.teacher == ADAPTER_OFF:
            raise ValueError(
                "teacher_server needs teacher, the model that it serves: its tokenizer is compared with the "
                "student's"
            )
        if self.top_k is None:
            raise ValueError(
                "teacher_server gives only top-k tokens, which are read from a file; set top_k: 20 "
                "and top_k_file: FOLDER, and run memtrain score-teacher"
            )
        if self.temperature != 1:
            raise ValueError(
                f"temperature is {self.temperature:g}, and a server's log-probs are those at temperature 1; "
                "set it to 1, or remove teacher_server"
            )
        return self

    @model_validator(mode="after")
    def _top_k_is_whole(self) -> Distill:
        if (self.top_k is None) != (self.top_k_file is None):
            given, other = ("top_k_file", "top_k") if self.top_k is None else ("top_k", "top_k_file")
            raise ValueError(
                f"{given} is set without {other}; set both (top_k: 64, top_k_file: FOLDER), or remove {given}"
            )
        if self.teacher == ADAPTER_OFF:
            for name in ("teacher_revision", "teacher_dtype"):
                if changes(self, name):
                    raise ValueError(f"{name} has no effect with teacher: adapter_off; remove it")
        return self
