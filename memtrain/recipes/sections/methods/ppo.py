"""The section of PPO: `ppo:`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from memtrain.recipes.sections.base import Fraction, PositiveInt, changes
from memtrain.recipes.sections.methods.online_base import Needs, WithMismatch


class Ppo(WithMismatch):
    """Proximal policy optimization: a value model predicts the expected return, token by token."""

    beta: Annotated[float, Field(ge=0)] = 0.05
    """Weight of the KL divergence from the reference, which is taken off the reward of each token. 0: no
    reference. Higher: stays closer."""

    updates_per_rollout: PositiveInt = 4
    """Times that a rollout is trained on (the epochs of the paper). Higher: fewer rollouts, older
    completions."""

    value: Literal["shared", "own"] = "shared"
    """`shared`: a second head on the policy's own hidden states, next to nothing to hold. `own`: a model of
    its own, which begins as a copy of the policy's and is trained beside it: twice the memory."""

    value_coef: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the value loss beside the policy's."""

    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Values may move this far from those of the rollout before their loss stops falling. null: no limit."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped below 1 minus this."""

    clip_high: Annotated[float, Field(ge=0)] | None = None
    """The ratio is clipped above 1 plus this. If not set: as clip_low."""

    gamma: Fraction = 1.0
    """Discount: value of a reward one token later."""

    gae_lambda: Fraction = 0.95
    """Generalised advantage estimation (arXiv:1506.02438): 1 trusts what came, 0 trusts the value model."""

    normalize_advantages: bool = True
    """Bring the advantages of a rollout's tokens to mean 0 and standard deviation 1."""

    entropy_coef: float = 0.0
    """Weight of the mean entropy, which is added to the objective. Higher: more varied."""

    cut_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Taken off the reward of a completion that was cut at generate.max_tokens."""

    kl_target: Annotated[float, Field(gt=0)] | None = None
    """KL divergence of a completion from the reference, in nats, that beta is adapted to
    (arXiv:1909.08593). If not set: beta stays."""

    kl_horizon: PositiveInt = 10_000
    """With `kl_target`: completions after which beta has moved by about a fifth at most. Higher: slower."""

    @property
    def needs(self) -> Needs:
        """Log-probs and values of the rollout; the reference's where there is a KL term."""
        moves = self.needs_reference or self.steps_in_window > 1
        rewards = {"is_for_rewards": True, "skip_zero_advantage": False}
        return replace(super().needs, old=moves, values=True, **rewards)

    @model_validator(mode="after")
    def _adapts_what_there_is(self) -> Ppo:
        if self.kl_target is None and changes(self, "kl_horizon"):
            raise ValueError("kl_horizon has no effect without kl_target; set kl_target, or remove it")
        if self.kl_target is not None and not self.beta:
            raise ValueError("kl_target adapts beta, and beta is 0, without a reference; set beta above 0")
        return self
