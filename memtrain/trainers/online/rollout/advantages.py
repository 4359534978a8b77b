"""From rewards to advantages: groups, batches, leave-one-out, several rewards, and tokens (GAE).

A reward that is NaN is no verdict: it is left out of every mean, and its advantage is 0.
"""

# G groups (prompts) of k answers, flat: R = G * k rewards, the answers of a group next to each other.
# F reward functions. N tokens of answers.
# A answers, N tokens of answers, F reward functions.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memtrain.trainers.online.rollout.protocol import OnlineMethod, ScoredRollout, WeightsTokens
from memtrain.trainers.online.rollout.rollout_batches import PolicyFeed, Rollout
from memtrain.trainers.online.rollout.scoring_passes import Passes
from memtrain.trainers.protocols.events import REWARD

EPSILON = 1e-4
"""Added to a standard deviation, as TRL does; groups without signal then give 0 and not NaN."""

Scale = Literal["group", "batch", "none"]


def weighted_rewards(reward_RF: Tensor, weight_F: Tensor) -> Tensor:
    """The weighted sum of the verdicts that there are [R]; NaN for an answer that has none."""
    total_R = torch.nan_to_num(reward_RF * weight_F, nan=0.0).sum(1)
    return total_R.masked_fill(reward_RF.isnan().all(1), torch.nan)


def group_advantages(reward_R: Tensor, group_size: int, scale: Scale) -> Tensor:
    """reward - mean of its group, over a standard deviation [R].

    That of the group, of the batch, or none; with Bessel's correction.
    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, section 4.1.2 (group); Liu et al. 2025 (Dr. GRPO),
    arXiv:2503.20783, eq. 3 (none); batch: Liu et al. 2025, arXiv:2508.08221.
    """
    reward_Gk = reward_R.view(-1, group_size)
    advantage_Gk = reward_Gk - reward_Gk.nanmean(1, keepdim=True)
    if scale == "group":
        advantage_Gk = advantage_Gk / (_deviation(reward_Gk, 1) + EPSILON)
    elif scale == "batch":
        advantage_Gk = advantage_Gk / (_deviation(reward_R, 0) + EPSILON)
    return torch.nan_to_num(advantage_Gk.reshape(-1), nan=0.0)


def decoupled_advantages(reward_RF: Tensor, weight_F: Tensor, group_size: int) -> Tensor:
    """Every reward normalised in its group by itself, then their weighted sum over the batch [R].

    Source: Liu et al. 2026 (GDPO), arXiv:2601.05242.
    """
    reward_GkF = reward_RF.view(-1, group_size, reward_RF.shape[1])
    centred_GkF = reward_GkF - reward_GkF.nanmean(1, keepdim=True)
    normal_RF = (centred_GkF / (_deviation(reward_GkF, 1) + EPSILON)).view(reward_RF.shape)
    total_R = weighted_rewards(normal_RF, weight_F)
    total_R = (total_R - total_R.nanmean()) / (_deviation(total_R, 0) + EPSILON)
    return torch.nan_to_num(total_R, nan=0.0)


def leave_one_out_advantages(reward_R: Tensor, group_size: int, *, normalise: bool) -> Tensor:
    """reward - mean of the other answers of its group [R]; `normalise`: to mean 0, deviation 1 in the batch.

    A group with one verdict only has nothing to compare and gives 0.
    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024
    (RLOO), arXiv:2402.14740, section 2.3.
    """
    reward_Gk = reward_R.view(-1, group_size)
    counts_G1 = (~reward_Gk.isnan()).sum(1, keepdim=True)
    others_Gk = (reward_Gk.nansum(1, keepdim=True) - reward_Gk) / (counts_G1 - 1)
    advantage_R = (reward_Gk - others_Gk).reshape(-1)
    advantage_R = advantage_R.masked_fill(advantage_R.isinf(), torch.nan)
    if normalise:
        advantage_R = (advantage_R - advantage_R.nanmean()) / (_deviation(advantage_R, 0) + EPSILON)
    return torch.nan_to_num(advantage_R, nan=0.0)


def zero_std_groups(reward_R: Tensor, group_size: int) -> Tensor:
    """bool [G]: groups whose verdicts are all alike, or which have fewer than two: no answer is better."""
    reward_Gk = reward_R.view(-1, group_size)
    lowest_G = reward_Gk.nan_to_num(nan=torch.inf).amin(1)
    highest_G = reward_Gk.nan_to_num(nan=-torch.inf).amax(1)
    return ~(highest_G > lowest_G)


def generalised_advantages(
    reward_N: Tensor, value_N: Tensor, lengths: list[int], *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(advantage of each token [N], return [N] = advantage + value), answer after answer.

    delta_t = r_t + gamma V_(t+1) - V_t, A_t = delta_t + gamma lam A_(t+1); after the last token V is 0.
    Source: Schulman et al. 2016 (GAE), arXiv:1506.02438, eq. 11, 12 and 16.
    """
    rewards, values = reward_N.tolist(), value_N.tolist()
    advantages = [0.0] * len(values)
    end = 0
    for length in lengths:
        start, end = end, end + length
        later_value = later_advantage = 0.0
        for t in range(end - 1, start - 1, -1):
            delta = rewards[t] + gamma * later_value - values[t]
            later_advantage = delta + gamma * lam * later_advantage
            later_value = values[t]
            advantages[t] = later_advantage
    advantage_N = torch.tensor(advantages, dtype=value_N.dtype, device=value_N.device)
    return advantage_N, advantage_N + value_N


def standardised(advantage_N: Tensor, is_loss_token_N: Tensor) -> Tensor:
    """Advantages of tokens less their mean, over their standard deviation, both of the loss tokens alone.

    Source: Huang et al. 2022, "The 37 implementation details of PPO" (https://iclr-blog-track.github.io),
    detail 7, over a rollout in place of a mini-batch, so that micro-batches and ranks do not move it.
    """
    loss_tokens = advantage_N[is_loss_token_N]
    if len(loss_tokens) < 2:
        return advantage_N
    return (advantage_N - loss_tokens.mean()) / (loss_tokens.std() + EPSILON)


def _deviation(value: Tensor, dim: int) -> Tensor:
    """Standard deviation over `dim` without NaN, with Bessel's correction, the dimension kept; NaN of one."""
    mean = value.nanmean(dim, keepdim=True)
    count = (~value.isnan()).sum(dim, keepdim=True)
    return ((value - mean).square().nansum(dim, keepdim=True) / (count - 1)).sqrt()


# From rewards to the update: advantages, the passes before it, and answers left out of it.


@dataclass(frozen=True, slots=True)
class AdvantageStep:
    """Step that gives the answers of a rollout their advantages."""

    method: OnlineMethod
    feed: PolicyFeed
    passes: Callable[[], Passes]
    weight_F: Tensor
    group_size: int

    def weigh(self, window: Rollout) -> None:
        """Give a judged window its advantages and log-probs, and say which of its answers are trained on.

        Called by all ranks together: the passes are shared.
        """
        method, needs = self.method, self.method.section.needs
        may_learn_A = ~window.is_cut_A if method.section.mask_truncated else np.ones_like(window.is_cut_A)
        window.is_trained_A = may_learn_A
        window.norms = self._norms(window, may_learn_A)
        self.feed.window = window
        kl_A = None
        if needs.is_for_rewards:
            # Rewards are penalised for every answer: those that are not trained on are in the baseline too.
            window.is_trained_A = np.ones_like(may_learn_A)
            self.passes().fill(self.feed, needs)
            kl_A = _sums(window) if needs.reference else None
        scored = ScoredRollout(
            reward_AF=torch.from_numpy(window.reward_AF),
            weight_F=self.weight_F,
            group_size=self.group_size,
            may_learn_A=torch.from_numpy(may_learn_A),
            kl_A=kl_A,
        )
        window.advantage_A = method.advantages(scored).float().numpy()
        window.is_trained_A = may_learn_A
        if isinstance(method, WeightsTokens):
            window.metrics |= method.weigh_tokens(window, scored)
            window.kept = method.kept()
        if needs.skip_zero_advantage:
            window.is_trained_A = may_learn_A & (window.advantage_A != 0)
        if not needs.is_for_rewards:
            self.passes().fill(self.feed, needs)

    def _norms(self, window: Rollout, may_learn_A: NDArray[np.bool_]) -> list[dict[str, float]]:
        """Divisors of each part's loss, whatever is left out of the update."""
        num_parts = self.method.section.steps_per_rollout
        tokens_A = window.length_A * may_learn_A
        return [
            {
                "answers": float((window.part_A == part).sum()),
                "tokens": float(tokens_A[window.part_A == part].sum()),
                "rollout_tokens": float(tokens_A.sum()) / num_parts,
            }
            for part in range(num_parts)
        ]


def rollout_facts(window: Rollout, reward_A: Tensor, group_size: int) -> dict[str, float]:
    """Metrics of a rollout; `reward_A`: the weighted rewards of its answers."""
    known_A = reward_A[~reward_A.isnan()]
    lengths = window.length_A
    return {
        REWARD: known_A.mean().item() if len(known_A) else float("nan"),
        "reward_std": known_A.std().item() if len(known_A) > 1 else 0.0,
        "zero_std_groups": zero_std_groups(reward_A, group_size).float().mean().item(),
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "completions_cut": float(window.is_cut_A.mean()),
        "completions_trained": float(window.is_trained_A.mean()),
        "rollout_tokens": float(np.diff(window.prompt_ptr).sum() + window.context_length_A.sum()),
    }


def _sums(window: Rollout) -> Tensor:
    """Sum over each answer's tokens of log p_old - log p_reference [A]."""
    assert window.old_N is not None, "The pass was made."
    assert window.reference_N is not None, "The pass was made."
    difference_N = window.old_N.astype(np.float64) - window.reference_N
    return torch.from_numpy(np.add.reduceat(difference_N, window.answer_ptr[:-1]))
