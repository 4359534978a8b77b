"""The common section of methods that learn from their own completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from memtrain.recipes.sections.base import PositiveInt, changes
from memtrain.recipes.sections.generate import Generate
from memtrain.recipes.sections.methods.preference import WithReference

MismatchChoice = Literal["auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
MismatchMode = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


BY_ITSELF = "the trained module generates the completions itself"


@dataclass(frozen=True, slots=True)
class Needs:
    """Passes without gradients that come before an update; each costs a forward pass over all answers."""

    old: bool
    """Log-probs of the policy as it was when the answers were written: where the policy
    moves before all answers were learned, or rewards are penalised."""
    reference: bool
    top_entropy_fraction: float | None = None
    """Share of tokens that are kept, those of the highest entropy."""
    is_for_rewards: bool = False
    """Rewards depend on the passes; else advantages come first, and answers without signal are left out."""
    skip_zero_advantage: bool = True
    """Answers of advantage 0 add nothing: no KL term and no entropy looks at them."""
    values: bool = False
    """Whether a value model's expectation before each token is needed."""

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of the numbers of each token that are made; none where no pass is."""
        asked = {
            "old": self.old,
            "reference": self.reference,
            "values": self.values,
            "entropy": self.top_entropy_fraction is not None,
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)

    @property
    def asks_policy(self) -> bool:
        """Whether the policy itself is asked."""
        return bool(set(self.passes) - {"reference"})


class FromOwnCompletions(WithReference):
    """Fields that the methods which learn from their own completions have in common."""

    beta: Annotated[float, Field(ge=0)] = 0.0
    """Strength of the pull towards the reference. 0: no reference is loaded. Higher: stays closer."""

    steps_per_rollout: PositiveInt = 1
    """Optimizer steps that the completions of one rollout are divided over. Higher: the later ones learn from
    a policy that is some steps old."""

    updates_per_rollout: PositiveInt = 1
    """Times that a rollout is trained on. Higher: fewer rollouts, older completions."""

    mask_truncated: bool = False
    """Do not learn from completions that were cut at generate.max_tokens (DAPO's overlong filtering)."""

    @property
    def resamples(self) -> int:
        """Times that groups without signal are replaced by those of other prompts."""
        return 0

    @property
    def needs_reference(self) -> bool:
        """Whether a reference is asked."""
        return self.beta > 0

    @property
    def needs(self) -> Needs:
        """Log-probs before the update where the policy moves meanwhile, and the reference's."""
        return Needs(old=self.steps_in_window > 1, reference=self.needs_reference)

    @property
    def steps_in_window(self) -> int:
        """Optimizer steps from one rollout to the next."""
        return self.steps_per_rollout * self.updates_per_rollout

    @model_validator(mode="after")
    def _reference_is_live(self) -> FromOwnCompletions:
        if self.reference == "precomputed":
            raise ValueError(
                "a reference cannot be precomputed for completions that are generated during training; "
                "set reference: copy or adapter_off"
            )
        if self.reference != "auto" and not self.needs_reference:
            raise ValueError(
                f"beta is 0, so no reference is needed; remove reference: {self.reference}, or set beta"
            )
        return self


class WithMismatch(FromOwnCompletions):
    """The methods whose loss weighs the sampler's probabilities against the trainer's."""

    importance_correction: MismatchChoice = "auto"
    """Correct for differences between the probabilities of the sampler and of the trainer (another engine,
    or bfloat16): weight each token, or answer, by their ratio, and truncate the ratio or leave out what
    lies outside the bounds. Not together with top_k, top_p, min_p. `auto`: token_truncate where another
    engine samples (generate.backend: vllm) and returns comparable probabilities, else none."""

    importance_correction_min: Annotated[float, Field(ge=0)] | None = 0.5
    """Lower bound of that ratio. null: none."""

    importance_correction_max: Annotated[float, Field(gt=0)] | None = 2.0
    """Upper bound of that ratio. null: none."""

    router_replay: bool = False
    """Mixtures of experts: the update sends every token to the experts that the sampler chose for it
    (rollout routing replay), even if its router has changed meanwhile, or rounds differently. Needs the
    native sampler. Costs 2 bytes a token, layer and chosen expert, on the host and in a checkpoint."""

    def correction(self, generate: Generate) -> tuple[MismatchMode, str]:
        """Correction for the sampler's probabilities, and its reason where the recipe leaves it open."""
        if self.importance_correction != "auto":
            return self.importance_correction, ""
        if generate.backend != "vllm":
            return "none", BY_ITSELF
        if generate.truncates:
            return "none", "top_k, top_p or min_p leave the sampler fewer tokens: the ratios would be wrong"
        if generate.repetition_penalty != 1 and generate.temperature != 1:
            return "none", "vLLM gives no probabilities before its repetition_penalty at this temperature"
        return "token_truncate", (
            "another engine generates the completions, and its probabilities differ a little"
        )

    @model_validator(mode="after")
    def _bounds_are_bounds(self) -> WithMismatch:
        low, high = self.importance_correction_min, self.importance_correction_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"importance_correction_min {low} is not below importance_correction_max {high}; swap them"
            )
        if self.importance_correction == "none":
            for name in ("importance_correction_min", "importance_correction_max"):
                if changes(self, name):
                    raise ValueError(
                        f"{name} has no effect with importance_correction: none; set importance_correction, "
                        "or remove it"
                    )
        return self
