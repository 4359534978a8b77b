"""The formulas as the methods use them, against derivations in plain float64 by none of our helpers.

A scorer with logits of its own answers what a method asks of the model, so that what the method asks for (the
temperature, sum of squares) counts too.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.data import Data, Source
from memtrain.recipes.sections.generate import Generate
from memtrain.recipes.sections.methods.grpo_rloo import Grpo, Rloo
from memtrain.recipes.sections.methods.online_dpo import OnlineDpo
from memtrain.recipes.sections.methods.ppo import Ppo
from memtrain.recipes.sections.methods.preference import Dpo
from memtrain.recipes.sections.model import Model
from memtrain.recipes.sections.rewards import Rewards
from memtrain.trainers.losses.head.linear import LogprobResult
from memtrain.trainers.losses.policy.registry import (
    Norms,
    entropy_threshold,
    kl_estimate,
    mismatch_facts,
    quantiles,
)
from memtrain.trainers.methods import dpo, grpo, online_dpo, ppo, rloo
from memtrain.trainers.model.heads.value_head import Valued, ValuedRequest
from memtrain.trainers.online.generation.protocol import Sample
from memtrain.trainers.online.rollout.advantages import AdvantageStep
from memtrain.trainers.online.rollout.rollout_batches import PolicyMicro, Rollout, new_window

VOCAB, LENGTHS = 7, [3, 2, 4, 1]
N = sum(LENGTHS)
ENDS = np.cumsum(LENGTHS).tolist()
SPANS = [range(end - length, end) for end, length in zip(ENDS, LENGTHS, strict=True)]
NORMS = Norms(num_answers=6, num_tokens=17, rollout_tokens=20, max_tokens=5)
"""Of a step that is larger than this micro-batch."""


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LOGITS, TARGETS = 2 * numbers(0, N, VOCAB), torch.arange(N) * 3 % VOCAB


class Scorer(nn.Module):
    """Answers questions about the scored tokens from its logits, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(LOGITS.clone())
        self.values = nn.Parameter(numbers(9, N))

    def forward(self, inputs: Any, index: Any, request: Any) -> Any:
        is_valued = isinstance(request, ValuedRequest)
        asked = request.request if is_valued else request
        logp_NV = (self.logits / asked.temperature).log_softmax(-1)
        scored = LogprobResult(
            logp_NV.gather(1, TARGETS[:, None])[:, 0],
            -(logp_NV.exp() * logp_NV).sum(1) if asked.options.want_entropy else None,
            (2 * logp_NV.detach()).logsumexp(1) if asked.options.want_log_sum_squares else None,
        )
        return Valued(scored, self.values) if is_valued else scored


def logp(temperature: float = 1.0) -> list[float]:
    """log p of each target by hand."""
    made = []
    for row, target in zip(LOGITS.tolist(), TARGETS.tolist(), strict=True):
        total = sum(math.exp(x / temperature) for x in row)
        made.append(row[target] / temperature - math.log(total))
    return made


def answers() -> Any:
    inside = SimpleNamespace(targets=TARGETS, scored_index=None, model_inputs=dict)
    return SimpleNamespace(micro_batch=inside, lengths_A=torch.tensor(LENGTHS))


ADVANTAGES = [1.0, -0.5, 2.0, -1.5]
OLD = [x - 0.1 * (-1) ** n * (n % 4) for n, x in enumerate(logp(0.7))]
SAMPLER = [x + 0.05 * n for n, x in enumerate(OLD)]
REFERENCE = [x + 0.2 * math.sin(n) for n, x in enumerate(OLD)]


def micro_batch(**changes: Any) -> PolicyMicro:
    given: dict[str, Any] = {
        "answers": answers(),
        "advantage_A": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "sampler_N": torch.tensor(SAMPLER, dtype=torch.float64),
        "old_N": torch.tensor(OLD, dtype=torch.float64),
        "reference_N": torch.tensor(REFERENCE, dtype=torch.float64),
        "is_kept_N": None,
        "norms": NORMS,
    }
    return PolicyMicro(**(given | changes))


def recipe(method: str, section: Any, **generate: Any) -> Recipe:
    return Recipe(
        method=method,  # type: ignore[arg-type]
        model=Model(path="builtin:tiny"),
        data=Data(train=(Source(source="builtin:arithmetic"),)),
        generate=Generate(**generate),
        rewards=Rewards(functions="exact_answer"),  # type: ignore[arg-type]
        **{method: section},
    )


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def test_grpo_divides_by_tokens_and_scores_at_the_sampling_temperature():
    """DAPO: the mean over all tokens of the clipped surrogate + beta (exp(-d) + d - 1)."""
    section = Grpo(beta=0.3, clip_low=0.1, clip_high=0.2, steps_per_rollout=2)
    method = grpo.method(recipe("grpo", section, temperature=0.7))
    expected = 0.0
    for span, advantage in zip(SPANS, ADVANTAGES, strict=True):
        for n in span:
            d = logp(0.7)[n] - REFERENCE[n]
            ratio = math.exp(logp(0.7)[n] - OLD[n])
            expected += surrogate(ratio, advantage, 0.1, 0.2) + 0.3 * (math.exp(-d) + d - 1)
    made = method.loss(Scorer(), micro_batch(), denominator=1.0, want_stats=False).value
    assert made.item() == pytest.approx(expected / 20, rel=1e-6)


def test_grpo_of_a_first_update_has_the_gradient_of_reinforce_at_that_temperature():
    """At ratio 1: d loss / d logit_v = -A (1[v = target] - p_v) / T over the rollout's tokens."""
    method = grpo.method(recipe("grpo", Grpo(), temperature=0.7))
    model = Scorer()
    method.loss(model, micro_batch(old_N=None), denominator=1.0, want_stats=True).value.backward()
    p_NV = (LOGITS / 0.7).softmax(-1)
    advantage_N1 = torch.tensor(ADVANTAGES, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))[
        :, None
    ]
    expected = -advantage_N1 * (nn.functional.one_hot(TARGETS, VOCAB) - p_NV) / 0.7 / 20
    assert model.logits.grad is not None
    torch.testing.assert_close(model.logits.grad, expected, rtol=1e-6, atol=1e-9)


def test_grpo_corrects_for_the_sampler_token_by_token():
    """min(max(p / p_sampler, 0.9), 1.1) weighs the surrogate; p is the policy's before the update."""
    section = Grpo(
        importance_correction="token_truncate",
        importance_correction_min=0.9,
        importance_correction_max=1.1,
        steps_per_rollout=2,
    )
    method = grpo.method(recipe("grpo", section, temperature=0.7))
    expected = 0.0
    for span, advantage in zip(SPANS, ADVANTAGES, strict=True):
        for n in span:
            weight = min(max(math.exp(OLD[n] - SAMPLER[n]), 0.9), 1.1)
            expected += weight * surrogate(math.exp(logp(0.7)[n] - OLD[n]), advantage, 0.2, 0.2)
    made = method.loss(Scorer(), micro_batch(), denominator=1.0, want_stats=False).value
    assert made.item() == pytest.approx(expected / 20, rel=1e-6)


def test_rloo_weighs_whole_answers():
    """-min(r A, clip(r) A) with r the product over an answer's tokens, over the number of answers."""
    section = Rloo(clip_low=0.1, steps_per_rollout=2)
    method = rloo.method(recipe("rloo", section, temperature=0.7))
    expected = 0.0
    for span, advantage in zip(SPANS, ADVANTAGES, strict=True):
        ratio = math.exp(sum(logp(0.7)[n] - OLD[n] for n in span))
        expected += surrogate(ratio, advantage, 0.1, 0.1)
    made = method.loss(Scorer(), micro_batch(), denominator=1.0, want_stats=True).value
    assert made.item() == pytest.approx(expected / 6, rel=1e-6)


def test_ppo_scores_at_the_sampling_temperature_and_learns_values():
    """Mean clipped surrogate of tokens + 0.1 * half the larger squared error - 0.01 * mean entropy."""
    method = ppo.method(recipe("ppo", Ppo(entropy_coef=0.01), num_generations=1, temperature=0.7))
    token_advantages, returns, old_values = (numbers(seed, N) for seed in (1, 2, 3))
    given = micro_batch(value_N=old_values, token_advantage_N=token_advantages, return_N=returns)
    expected = 0.0
    p_NV = (LOGITS / 0.7).softmax(-1).tolist()
    for n in range(N):
        value, old_value, target = (float(x[n]) for x in (numbers(9, N), old_values, returns))
        near = old_value + min(max(value - old_value, -0.2), 0.2)
        expected += surrogate(math.exp(logp(0.7)[n] - OLD[n]), float(token_advantages[n]), 0.2, 0.2)
        expected += 0.1 * 0.5 * max((value - target) ** 2, (near - target) ** 2)
        expected -= 0.01 * -sum(p * math.log(p) for p in p_NV[n])
    made = method.loss(Scorer(), given, denominator=1.0, want_stats=True).value
    assert made.item() == pytest.approx(expected / 17, rel=1e-6)


def test_online_dpo_scores_at_the_temperature_that_its_completions_were_written_at():
    """-log sigmoid(beta ((log p_w - log q_w) - (log p_l - log q_l))), at T = 0.7, over the pairs."""
    method = online_dpo.method(recipe("online_dpo", OnlineDpo(beta=0.4), temperature=0.7))
    method.num_pairs.write(3.0, torch.device("cpu"))
    scores = [sum(logp(0.7)[n] - REFERENCE[n] for n in span) for span in SPANS]
    expected = sum(math.log1p(math.exp(-0.4 * (scores[i] - scores[i + 1]))) for i in (0, 2)) / 3
    made = method.loss(Scorer(), micro_batch(), denominator=1.0, want_stats=True).value
    assert made.item() == pytest.approx(expected, rel=1e-6)


def pairs() -> Any:
    made = answers()
    made.label_I = torch.zeros(2)
    return made


class KnownReference:
    """A reference whose log-probs of the four answers are known."""

    def logps(self, batch: Any, ask: Any) -> Tensor:
        return torch.tensor([-3.0, -4.0, -5.0, -1.0], dtype=torch.float64)


def test_wpo_weighs_a_pair_by_both_of_its_answers():
    """An answer: exp of the mean over tokens of log p - log sum_v p_v^2; a pair: the product of its two."""
    method = dpo.method(recipe_of_dpo(Dpo(beta=0.2, use_weighting=True)), KnownReference())  # type: ignore[arg-type]
    p_NV = LOGITS.softmax(-1).tolist()
    weights = [
        math.exp(sum(logp()[n] - math.log(sum(p * p for p in p_NV[n])) for n in span) / len(span))
        for span in SPANS
    ]
    scores = [sum(logp()[n] for n in span) + c for span, c in zip(SPANS, (3.0, 4.0, 5.0, 1.0), strict=True)]
    expected = sum(
        weights[i] * weights[i + 1] * math.log1p(math.exp(-0.2 * (scores[i] - scores[i + 1]))) for i in (0, 2)
    )
    made = method.loss(Scorer(), pairs(), denominator=2.0, want_stats=False).value
    assert made.item() == pytest.approx(expected / 2, rel=1e-6)


def recipe_of_dpo(section: Dpo) -> Recipe:
    data = Data(train=(Source(source="builtin:arithmetic"),))
    return Recipe(method="dpo", model=Model(path="builtin:tiny"), data=data, dpo=section)


class Known:
    """Passes that found what is said here."""

    def fill(self, feed: Any, needs: Any) -> None:
        feed.window.old_N = np.array([-1.0, -2.0, -0.5, -1.0, -1.5, -0.25], np.float32)
        feed.window.reference_N = np.array([-1.5, -1.0, -0.5, -3.0, -1.25, -1.25], np.float32)


def weighed(method: Any, rewards: list[float]) -> Rollout:
    """One prompt with three completions of 2, 1 and 3 tokens; the second was cut."""
    samples = [
        [
            Sample((1, 2), (-1.0, -1.0), "stop"),
            Sample((3,), (-1.0,), "length"),
            Sample((4, 5, 6), (-1.0, -1.0, -1.0), "stop"),
        ]
    ]
    window = new_window(0, [0], [0], [[7]], samples, 1)
    window.reward_AF[:, 0] = rewards
    weight_F = torch.ones(1, dtype=torch.float64)
    AdvantageStep(method, SimpleNamespace(window=None), Known, weight_F, 3).weigh(window)  # type: ignore[arg-type]
    return window


def test_rloo_takes_the_divergence_off_the_reward():
    """KL by answer: 0.5 - 1, 0, 2 - 0.25 + 1: -0.5, 0 and 2.75; each against the mean of the others."""
    method = rloo.method(recipe("rloo", Rloo(beta=0.2)))
    net = [r - 0.2 * kl for r, kl in zip([1.0, 0.5, 2.0], [-0.5, 0.0, 2.75], strict=True)]
    expected = [x - (sum(net) - x) / 2 for x in net]
    window = weighed(method, [1.0, 0.5, 2.0])
    assert window.advantage_A.tolist() == pytest.approx(expected, rel=1e-6)
    assert method.kl == pytest.approx((-0.5 + 0 + 2.75) / 3)


def test_rloo_clips_rewards_before_the_divergence_is_taken_off():
    """Rewards 1, 0.5 and 2 in [0.75, 1.25]: 1, 0.75 and 1.25."""
    method = rloo.method(recipe("rloo", Rloo(beta=0.2, reward_clip=(0.75, 1.25))))
    net = [r - 0.2 * kl for r, kl in zip([1.0, 0.75, 1.25], [-0.5, 0.0, 2.75], strict=True)]
    expected = [x - (sum(net) - x) / 2 for x in net]
    assert weighed(method, [1.0, 0.5, 2.0]).advantage_A.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("masks", [False, True])
def test_a_truncated_completion_is_trained_on_only_where_the_recipe_allows(masks: bool):
    """The second of three was cut: it is in the baseline all the same, and in no denominator when masked."""
    method = grpo.method(recipe("grpo", Grpo(mask_truncated=masks)))
    window = weighed(method, [1.0, 0.5, 3.0])
    assert window.is_trained_A.tolist() == [True, not masks, True]
    tokens = 5.0 if masks else 6.0
    assert window.norms == [{"answers": 3.0, "tokens": tokens, "rollout_tokens": tokens}]
    deviation = (((1 - 1.5) ** 2 + (0.5 - 1.5) ** 2 + (3 - 1.5) ** 2) / 2) ** 0.5 + 1e-4
    assert window.advantage_A.tolist() == pytest.approx([-0.5 / deviation, -1 / deviation, 1.5 / deviation])


@pytest.mark.parametrize(
    ("kind", "is_weighted", "direction"),
    [
        ("k1", True, "reverse"),
        ("k2", False, "reverse"),
        ("k3", True, "reverse"),
        ("k3", False, "forward"),
        ("k1", False, "nothing"),
        ("k2", True, "wrong"),
    ],
)
def test_which_kl_estimates_have_the_gradient_of_a_kl_divergence(
    kind: str, is_weighted: bool, direction: str
):
    """The mean gradient over every token of a vocabulary, each with its probability: no sampling.

    That is what recipes are refused by: k1 alone pulls nowhere, k2 with the ratio elsewhere.
    """
    theta, reference = numbers(4, VOCAB).requires_grad_(), numbers(5, VOCAB).log_softmax(0)
    logp_V = theta.log_softmax(0)
    ratio_V = (logp_V - logp_V.detach()).exp() if is_weighted else None
    estimate_V = kl_estimate(logp_V, reference, kind, ratio_N=ratio_V)  # type: ignore[arg-type]
    (made,) = torch.autograd.grad((logp_V.detach().exp() * estimate_V).sum(), theta, retain_graph=True)
    (reverse,) = torch.autograd.grad((logp_V.exp() * (logp_V - reference)).sum(), theta, retain_graph=True)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - logp_V)).sum(), theta)
    expected = {"reverse": reverse, "forward": forward, "nothing": torch.zeros(VOCAB, dtype=torch.float64)}
    if direction == "wrong":
        assert (made - reverse).abs().max() > 0.05
    else:
        torch.testing.assert_close(made, expected[direction], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("generate", "mode"),
    [
        ({}, "none"),
        ({"backend": "transformers"}, "none"),
        ({"backend": "vllm"}, "token_truncate"),
        ({"backend": "vllm", "top_k": 50}, "none"),
        ({"backend": "vllm", "repetition_penalty": 1.1, "temperature": 0.7}, "none"),
    ],
)
def test_another_engines_probabilities_are_corrected_for_by_default(generate: dict[str, Any], mode: str):
    for method, module, section in (("grpo", grpo, Grpo()), ("rloo", rloo, Rloo())):
        assert module.method(recipe(method, section, **generate)).mismatch == mode
        asked = section.model_copy(update={"importance_correction": "none"})
        assert module.method(recipe(method, asked, **generate)).mismatch == "none"


@pytest.mark.slow
def test_quantiles_of_more_numbers_than_torch_takes():
    """17 million: torch.quantile refuses more than 2^24."""
    count = 17_000_001
    values = torch.arange(count, dtype=torch.float32).flip(0)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.5)
    assert entropy_threshold(values, 0.5).item() == 8_500_000
    facts = mismatch_facts(torch.zeros(count), torch.full((count,), -0.5))
    assert facts["mismatch/ratio_p50"] == pytest.approx(math.exp(0.5))


def test_quantiles_lie_between_two_values():
    values = torch.tensor([3.0, 0.0, 1.0, 7.0])
    assert quantiles(values, [0.0, 0.25, 0.5, 0.9, 1.0]) == pytest.approx([0.0, 0.75, 2.0, 5.8, 7.0])
    assert quantiles(values[:1], [0.3]) == [3.0]
