"""Sections of the methods that weigh completions against their group: `grpo:` and `rloo:`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from memtrain.recipes.sections.base import NonNegativeInt, changes
from memtrain.recipes.sections.methods.online_base import Needs, WithMismatch

PolicyLossName = Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]

KNOBS_OF: dict[str, tuple[str, ...]] = {
    "clip_low": ("dapo", "grpo", "dr_grpo", "bnpo", "luspo"),
    "clip_high": ("dapo", "grpo", "dr_grpo", "bnpo", "luspo"),
    "delta": ("dapo", "grpo", "dr_grpo", "bnpo", "luspo"),
    "cispo_max_weight": ("cispo",),
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "vespo_k_pos": ("vespo",),
    "vespo_lambda_pos": ("vespo",),
    "vespo_k_neg": ("vespo",),
    "vespo_lambda_neg": ("vespo",),
}
"""Knobs that only some losses read; one that the recipe's loss does not read is refused."""


def pair_of(value: object) -> object:
    """A list as a tuple."""
    if isinstance(value, list):
        items: list[object] = value  # pyright: ignore[reportUnknownVariableType]
        return tuple(items)
    return value


class Grpo(WithMismatch):
    """Group relative policy optimization: completions are better or worse than the others of their group."""

    loss: PolicyLossName = "dapo"
    """`dapo` (arXiv:2503.14476) is GRPO averaged over tokens; `grpo` (arXiv:2402.03300) over completions;
    `dr_grpo` (arXiv:2503.20783) over a constant; `bnpo` over the tokens of a step. `cispo`
    (arXiv:2506.13585), `sapo` (arXiv:2511.20347) and `vespo` (arXiv:2602.10693) clip differently; `luspo`
    (arXiv:2602.05261) sums."""

    level: Literal["token", "sequence"] = "token"
    """Importance ratios of tokens, or of whole completions (GSPO, arXiv:2507.18071: loss: grpo, level:
    sequence, clip_low: 3e-4, clip_high: 4e-4)."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped below 1 minus this."""

    clip_high: Annotated[float, Field(ge=0)] | None = None
    """The ratio is clipped above 1 plus this (DAPO: 0.28). If not set: as clip_low."""

    delta: Annotated[float, Field(gt=1)] | None = None
    """Upper bound of the ratio for bad completions too (arXiv:2505.07291). If not set: none."""

    cispo_max_weight: Annotated[float, Field(gt=0)] = 5.0
    """`cispo`: highest weight of a token (arXiv:2510.13786)."""

    sapo_temperature_pos: Annotated[float, Field(gt=0)] = 1.0
    """`sapo`: how sharply the gate closes for good completions."""

    sapo_temperature_neg: Annotated[float, Field(gt=0)] = 1.05
    """`sapo`: the same for bad ones."""

    vespo_k_pos: Annotated[float, Field(gt=0)] = 2.0
    """`vespo`: exponent of the weight, for good completions."""

    vespo_lambda_pos: Annotated[float, Field(gt=0)] = 3.0
    """`vespo`: decay of the weight, for good completions."""

    vespo_k_neg: Annotated[float, Field(gt=0)] = 3.0
    """`vespo`: exponent of the weight, for bad completions."""

    vespo_lambda_neg: Annotated[float, Field(gt=0)] = 2.0
    """`vespo`: decay of the weight, for bad completions."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group, of the rollout, or not (Dr. GRPO)."""

    combine_rewards: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several rewards: summed first, or each normalized in its group first (GDPO, arXiv:2601.05242)."""

    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term from the sampled tokens. Its gradient is that of the KL divergence with k1 and
    unbiased_kl, with k2 without it, and with k3 and unbiased_kl."""

    unbiased_kl: bool = False
    """Weight the KL term by the importance ratio (arXiv:2512.02556)."""

    entropy_coef: float = 0.0
    """Weight of the mean entropy, which is added to the objective. Higher: more varied."""

    top_entropy_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the tokens that are trained on, those of the highest entropy (arXiv:2506.01939: 0.2)."""

    dynamic_sampling: NonNegativeInt = 0
    """Times that groups whose rewards are all alike are replaced by groups of other prompts, before the
    rollout is trained on (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2). Counted as
    `groups_resampled`. Higher: more signal in a step, more time to generate it. 0: such groups stay."""

    off_policy_limit: Annotated[float, Field(gt=0)] | None = None
    """Leave out bad completions that have become less likely than this, in nats a token
    (arXiv:2512.02556). If not set: none is left out."""

    @property
    def resamples(self) -> int:
        """Times that groups without signal are replaced by those of other prompts."""
        return self.dynamic_sampling

    @property
    def needs(self) -> Needs:
        """Entropies where tokens are chosen by them; every answer where a term looks at all of them."""
        masks = self.top_entropy_fraction < 1
        return replace(
            super().needs,
            top_entropy_fraction=self.top_entropy_fraction if masks else None,
            skip_zero_advantage=not (self.beta or self.entropy_coef or masks),
        )

    @model_validator(mode="after")
    def _every_knob_is_read(self) -> Grpo:
        for knob, losses in KNOBS_OF.items():
            if changes(self, knob) and self.loss not in losses:
                raise ValueError(f"{knob} has no effect on loss: {self.loss}; remove it")
        for knob in ("kl", "unbiased_kl"):
            if changes(self, knob) and not self.beta:
                raise ValueError(f"{knob} has no effect with beta 0; set beta, or remove it")
        if self.beta and self.kl == "k1" and not self.unbiased_kl:
            raise ValueError(
                "kl: k1 without unbiased_kl has no effect: its gradient, that of log p of a sampled "
                "token, is 0 on average; set unbiased_kl: true, or kl: k3"
            )
        if self.beta and self.kl == "k2" and self.unbiased_kl:
            raise ValueError(
                "kl: k2 with unbiased_kl has a gradient other than that of the KL divergence: k2 is "
                "unbiased without the ratio; remove unbiased_kl, or set kl: k1 or k3"
            )
        if self.combine_rewards == "normalize_then_sum" and self.scale_rewards != "group":
            raise ValueError(
                "normalize_then_sum normalizes each reward in its group; remove scale_rewards, or set group"
            )
        return self

    @model_validator(mode="after")
    def _vespo_counts_sequences_itself(self) -> Grpo:
        if self.loss != "vespo":
            return self
        if self.level == "sequence":
            raise ValueError("vespo weighs whole completions by itself; remove level: sequence")
        if self.importance_correction.startswith("sequence"):
            raise ValueError(
                "vespo takes ratios of tokens; set importance_correction: "
                f"token{self.importance_correction[8:]}"
            )
        return self


class Rloo(WithMismatch):
    """REINFORCE with a leave-one-out baseline: the other completions of the group (arXiv:2402.14740)."""

    beta: Annotated[float, Field(ge=0)] = 0.05
    """Weight of the KL divergence from the reference, which is taken off the reward. 0: no reference."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio of a completion is clipped below 1 minus this."""

    clip_high: Annotated[float, Field(ge=0)] | None = None
    """The ratio of a completion is clipped above 1 plus this. If not set: as clip_low."""

    normalize_advantages: bool = False
    """Bring the advantages of a rollout to mean 0 and standard deviation 1."""

    reward_clip: Annotated[tuple[float, float] | None, BeforeValidator(pair_of)] = None
    """Lowest and highest reward; others are clipped, before the KL term. If not set: none are."""

    @property
    def needs(self) -> Needs:
        """Log-probs of both for the KL term, which is in the reward."""
        penalises = self.needs_reference
        return replace(super().needs, old=penalises or self.steps_in_window > 1, is_for_rewards=penalises)

    @model_validator(mode="after")
    def _range_is_a_range(self) -> Rloo:
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            raise ValueError(f"reward_clip {list(self.reward_clip)} is not a range; write [lowest, highest]")
        return self
