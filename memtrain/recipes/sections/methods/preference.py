"""Sections of the methods that learn from preferences: `dpo:`, `kto:` and `reward:`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from memtrain.recipes.sections.base import Fraction, PositiveInt, Section, changes, one_or_many
from memtrain.recipes.sections.methods.pair_losses import PAIR_LOSSES, PairLoss, PairLossName

ReferenceKind = Literal["auto", "copy", "adapter_off", "adapter_start", "precomputed", "synced"]


class WithReference(Section):
    """Fields that the methods which stay near a reference model have in common."""

    reference: ReferenceKind = "auto"
    """Source of the reference's log-probs. `copy`: a frozen copy of the weights; `adapter_off`: the model
    without its adapter; `adapter_start`: the model with the adapter that `model.adapter.path` names, as the
    run began; `precomputed`: one pass before training, kept on disk, and no reference is loaded; `synced`: a
    copy that follows the policy. `auto`: the cheapest in memory, then in time; of an adapter that is
    continued its start."""

    reference_sync_steps: PositiveInt = 512
    """With `synced`: optimizer steps between two updates of the reference; 1 is a moving average
    (arXiv:2404.09656)."""

    reference_mixup: Annotated[float, Field(gt=0, le=1)] = 0.6
    """With `synced`: share of the policy in the updated reference. Higher: follows faster."""

    @model_validator(mode="after")
    def _syncs_a_copy(self) -> WithReference:
        for name in ("reference_sync_steps", "reference_mixup"):
            if changes(self, name) and self.reference != "synced":
                raise ValueError(
                    f"{name} has no effect with reference: {self.reference}; "
                    "set reference: synced, or remove it"
                )
        return self


class Dpo(WithReference):
    """Direct preference optimization and its relatives: make the chosen answer likelier than the rejected."""

    loss: Annotated[tuple[PairLossName, ...], BeforeValidator(one_or_many), Field(min_length=1)] = (
        "sigmoid",
    )
    """A loss or several, which are summed: `sigmoid` is DPO (arXiv:2305.18290); docs/preference.md lists the
    papers of the others. `simpo`, `orpo`, `cpo` and `sft` need no reference."""

    loss_weights: Annotated[tuple[float, ...], BeforeValidator(one_or_many)] = ()
    """A weight for each loss, in their order. If not set: 1 for each."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the pull towards the reference (SimPO: 2 and more). Higher: stays closer."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that chosen and rejected are the wrong way round (cDPO, `robust`, `exo_pair`)."""

    divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Distance from the reference (arXiv:2309.16240)."""

    divergence_alpha: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of `alpha_divergence`: towards 0 it is reverse KL, 1 is forward KL."""

    discopop_tau: Annotated[float, Field(gt=0)] = 0.05
    """Temperature of `discopop`'s mixture (arXiv:2406.08414)."""

    simpo_gamma: Annotated[float, Field(ge=0)] = 0.5
    """Margin per token by which `simpo` wants the chosen answer to win (arXiv:2405.14734)."""

    ld_alpha: Fraction | None = None
    """Weight of the tokens past the shorter answer's length (LD-DPO, arXiv:2409.06411); 1 is DPO. If not
    set: all tokens count the same."""

    use_weighting: bool = False
    """Weight each pair by how likely the policy is to write it (WPO, arXiv:2406.11827)."""

    @property
    def parts(self) -> dict[PairLossName, float]:
        """Each loss with its weight."""
        return dict(zip(self.loss, self.loss_weights or (1.0,) * len(self.loss), strict=True))

    @property
    def losses(self) -> tuple[PairLoss, ...]:
        """The facts of each loss."""
        return tuple(PAIR_LOSSES[name] for name in self.loss)

    @property
    def needs_reference(self) -> bool:
        """Whether any of the losses compares with a reference."""
        return any(loss.needs_reference for loss in self.losses)

    @property
    def ranks_the_batch(self) -> bool:
        """Whether any of the losses sorts the pairs of a step."""
        return any(loss.ranks_the_batch for loss in self.losses)

    @model_validator(mode="after")
    def _losses_and_weights(self) -> Dpo:
        if len(set(self.loss)) < len(self.loss):
            raise ValueError("loss lists a loss twice; list it once, with its weight in loss_weights")
        if self.loss_weights and len(self.loss_weights) != len(self.loss):
            raise ValueError(
                f"loss_weights has {len(self.loss_weights)} numbers for {len(self.loss)} losses; "
                "give one for each"
            )
        if "exo_pair" in self.loss and self.label_smoothing == 0:
            raise ValueError(
                "exo_pair needs label_smoothing above 0, the share of its target that the rejected answer "
                "gets; set label_smoothing: 1e-3, as in its paper"
            )
        if self.use_weighting and self.ranks_the_batch:
            raise ValueError(
                "use_weighting weights pairs, and aot compares sorted answers, not pairs; remove "
                "use_weighting or change loss"
            )
        if not self.needs_reference and self.reference != "auto":
            verb = "use" if len(self.loss) > 1 else "uses"
            raise ValueError(
                f"{' and '.join(self.loss)} {verb} no reference; remove reference: {self.reference}"
            )
        return self

    @model_validator(mode="after")
    def _every_knob_is_read(self) -> Dpo:
        read = {knob for loss in self.losses for knob in loss.reads}
        for knob in ("beta", "label_smoothing", "divergence", "discopop_tau", "simpo_gamma"):
            if changes(self, knob) and knob not in read:
                raise ValueError(f"{knob} has no effect on {' and '.join(self.loss)}; remove it")
        if changes(self, "divergence_alpha") and self.divergence != "alpha_divergence":
            raise ValueError(
                "divergence_alpha belongs to alpha_divergence; set divergence: alpha_divergence, or remove it"
            )
        if self.divergence != "reverse_kl":
            plain = [
                name
                for name, loss in zip(self.loss, self.losses, strict=True)
                if "divergence" not in loss.reads and not loss.counts_tokens
            ]
            if plain:
                raise ValueError(
                    f"{plain[0]} knows only reverse_kl; remove divergence, or that loss (the constant of "
                    "other divergences cancels only in the difference of two answers)"
                )
        return self


class Kto(WithReference):
    """KTO: learn from single answers that are desirable or not (arXiv:2402.01306)."""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """`kto`: measured against how far the policy has drifted, from mismatched prompts and answers.
    `apo_zero_unpaired`: without that term, with a third fewer forward passes (arXiv:2408.06266)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the pull towards the reference. Higher: stays closer."""

    desirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of desirable answers. The paper keeps the two sums (weight x rows) within 1:1 to 4:3."""

    undesirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of undesirable answers."""


class Reward(Section):
    """A reward model: one number for an answer, higher for the chosen one (arXiv:2203.02155, eq. 1)."""

    center_rewards_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of (R_chosen + R_rejected)^2, which keeps rewards around zero; 0.01 is usual
    (arXiv:2312.09244)."""

    use_margin: bool = True
    """Ask for a difference of at least the row's `margin`, where rows have one (arXiv:2307.09288)."""
