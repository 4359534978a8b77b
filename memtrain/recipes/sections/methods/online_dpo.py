"""The section of Online DPO: `online_dpo:`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from memtrain.recipes.sections.methods.online_base import FromOwnCompletions, Needs


class OnlineDpo(FromOwnCompletions):
    """Online DPO: the best and the worst completion of each prompt are its pair (arXiv:2402.04792)."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid` is DPO's (arXiv:2305.18290); `ipo` (arXiv:2310.12036) wants one margin, 1 / (2 beta), of
    whole answers."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the pull towards the reference. Higher: stays closer."""

    min_reward_gap: Annotated[float, Field(ge=0)] = 0.0
    """A pair is made only where the best reward is more than this above the worst one. 0: wherever they
    differ. Prompts without a pair are counted, and teach nothing."""

    @property
    def needs(self) -> Needs:
        """The reference alone: a pair's loss knows no old log-probs."""
        return Needs(old=False, reference=True)
