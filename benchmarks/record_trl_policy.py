"""Record what TRL's GRPO and RLOO trainers compute on fixed completions, for the tests of the policy losses.

TRL is never imported by memtrain. Run this in an environment of its own:

    python -m venv trl-env && trl-env/bin/pip install trl==1.16.0 torch==2.13.0
    trl-env/bin/python benchmarks/record_trl_policy.py tests/trainers/data/trl_policy.json

Losses: each case calls the trainer's loss method on a stand-in for the trainer, whose model hands out the
fixed log-probs and entropies. Advantages: the lines of TRL's own source that turn rewards into advantages are
run as they stand, cut out by their first and last statement.
"""

from __future__ import annotations

import inspect
import json
import math
import platform
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
import trl
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer, nanstd
from trl.trainer.rloo_trainer import RLOOTrainer

LENGTHS = [3, 5, 2, 4, 2, 6]
MAX_TOKENS = 8
GROUP = 3
ROLLOUT_TOKENS = 44.0
"""Of a rollout of two steps: twice the tokens above."""


def fixed_batch() -> dict[str, list]:
    """Log-probs of two groups of three answers, under policy, older policy, sampler and reference."""
    g = torch.Generator().manual_seed(5)

    def rows(scale: float, shift: float = 0.0) -> list[list[float]]:
        return [(shift + scale * torch.randn(n, generator=g)).tolist() for n in LENGTHS]

    logp = [(-3.0 * torch.rand(n, generator=g)).tolist() for n in LENGTHS]

    def near(spread: float) -> list[list[float]]:
        noise = rows(spread)
        return [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(logp, noise, strict=True)]

    return {
        "lengths": LENGTHS,
        "logp": logp,
        "old": near(0.3),
        "sampler": near(0.5),
        "reference": near(0.4),
        "entropy": [(2.0 * torch.rand(n, generator=g)).tolist() for n in LENGTHS],
        "advantages": torch.randn(len(LENGTHS), generator=g).tolist(),
    }


def padded(rows: list[list[float]]) -> Tensor:
    """[A, longest], zeros on the right."""
    out = torch.zeros(len(rows), max(LENGTHS))
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


def mask() -> Tensor:
    """[A, longest]: 1 for a token of an answer."""
    return padded([[1.0] * n for n in LENGTHS])


def stand_in(logp: Tensor, entropy: Tensor, **settings: object) -> SimpleNamespace:
    """What the loss methods read of `self`."""
    same = lambda tensor, **_: tensor  # noqa: E731
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=same,
        reduce=lambda tensor, reduction: tensor,
        num_processes=1,
        pad_across_processes=lambda tensor, **_: tensor,
    )
    made = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        **settings,
    )
    made.get_high_entropy_mask = lambda e, m, t: GRPOTrainer.get_high_entropy_mask(made, e, m, t)
    return made


def gradients(leaf: Tensor) -> list[list[float]]:
    """Gradients of the answers' tokens."""
    return [leaf.grad[i, :n].tolist() for i, n in enumerate(LENGTHS)]


GRPO_KNOBS = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": False,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "off_policy_mask_threshold": None,
    "mode": None,
    "clip_min": None,
    "clip_max": None,
    "has_old": True,
}


def mismatch_ratio(batch: dict[str, list], knobs: dict) -> Tensor:
    """The importance ratio as TRL's own source computes it."""
    source = cut(
        GRPOTrainer._generate_and_score_completions,
        "per_token_logps_diff = (old_per_token_logps",
        "# Compute the per-token log probabilities for the reference model",
    )
    names = {
        "self": SimpleNamespace(
            vllm_importance_sampling_mode=knobs["mode"],
            vllm_importance_sampling_clip_min=knobs["clip_min"],
            vllm_importance_sampling_clip_max=knobs["clip_max"],
        ),
        "mask": mask(),
        "old_per_token_logps": padded(batch["old"]),
        "sampling_per_token_logps": padded(batch["sampler"]),
        "torch": torch,
        "math": math,
    }
    exec(source, names)
    return names["vllm_importance_sampling_ratio"]


def record_grpo(batch: dict[str, list], **changes: object) -> dict:
    """One case of GRPOTrainer."""
    knobs = GRPO_KNOBS | changes
    leaf = padded(batch["logp"]).requires_grad_()
    entropy = padded(batch["entropy"]).requires_grad_()
    inputs = {
        "prompt_ids": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.ones(len(LENGTHS), max(LENGTHS), dtype=torch.long),
        "completion_mask": mask(),
        "advantages": torch.tensor(batch["advantages"]),
        "ref_per_token_logps": padded(batch["reference"]),
        "num_items_in_batch": torch.tensor(ROLLOUT_TOKENS),
    }
    if knobs["has_old"]:
        inputs["old_per_token_logps"] = padded(batch["old"])
    if knobs["mode"]:
        inputs["importance_sampling_ratio"] = mismatch_ratio(batch, knobs)
        inputs["sampling_per_token_logps"] = padded(batch["sampler"])
    args = SimpleNamespace(
        delta=knobs["delta"],
        use_bias_correction_kl=knobs["use_bias_correction_kl"],
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=2,
    )
    names = ("loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high", "beta")
    names += ("top_entropy_quantile", "off_policy_mask_threshold", "entropy_coef")
    trainer = stand_in(
        leaf,
        entropy,
        args=args,
        use_vllm=bool(knobs["mode"]),
        vllm_importance_sampling_correction=bool(knobs["mode"]),
        max_completion_length=MAX_TOKENS,
        _entropy_bonus_enabled=bool(knobs["entropy_coef"]),
        use_adaptive_entropy=False,
        **{name: knobs[name] for name in names},
    )
    trainer.accelerator.sync_gradients = True
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    metrics = {k: v[0] for k, v in trainer._metrics["train"].items() if "_min" not in k and "_max" not in k}
    entropy_gradient = gradients(entropy) if knobs["entropy_coef"] else None
    return {
        "trainer": "grpo",
        "knobs": knobs,
        "loss": loss.item(),
        "gradient": gradients(leaf),
        "entropy_gradient": entropy_gradient,
        "metrics": metrics,
    }


def record_rloo(batch: dict[str, list], **changes: object) -> dict:
    """One case of RLOOTrainer's loss."""
    knobs = {"epsilon_low": 0.2, "epsilon_high": 0.2} | changes
    leaf = padded(batch["logp"]).requires_grad_()
    inputs = {
        "prompt_ids": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.ones(len(LENGTHS), max(LENGTHS), dtype=torch.long),
        "completion_mask": mask(),
        "advantages": torch.tensor(batch["advantages"]),
        "old_logps": padded(batch["old"]).sum(1),
    }
    trainer = stand_in(leaf, padded(batch["entropy"]), **knobs)
    loss = RLOOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return {"trainer": "rloo", "knobs": knobs, "loss": loss.item(), "gradient": gradients(leaf)}


def cut(method: object, first: str, last: str) -> str:
    """The statements of a method from the line that has `first` to before the one that has `last`."""
    lines = inspect.getsource(method).splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i, line in enumerate(lines) if last in line and i > start)
    return textwrap.dedent("\n".join(lines[start:end]))


REWARDS = {
    "plain": [[1.0], [0.0], [0.5], [2.0], [1.0], [1.0]],
    "two": [[1.0, 0.2], [0.0, 0.4], [0.5, 0.9], [2.0, 0.1], [1.0, 0.1], [1.0, 0.7]],
    "alike": [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.5]],
    "missing": [[1.0, None], [None, None], [0.5, 0.9], [2.0, 0.1], [None, 0.3], [1.0, 0.7]],
}


def record_grpo_advantages(name: str, weights: list[float], scale: str, aggregation: str) -> dict:
    """Advantages by GRPOTrainer."""
    source = cut(
        GRPOTrainer._generate_and_score_completions, "unscorable_mask = ", "# Slice to keep only the local"
    )
    rewards = torch.tensor([[math.nan if x is None else x for x in row] for row in REWARDS[name]])
    made = SimpleNamespace(
        reward_weights=torch.tensor(weights),
        multi_objective_aggregation=aggregation,
        scale_rewards=scale,
        reward_funcs=weights,
    )
    names = {
        "self": made,
        "rewards_per_func": rewards,
        "device": torch.device("cpu"),
        "num_generations": GROUP,
        "torch": torch,
        "nanstd": nanstd,
    }
    exec(source, names)
    return {
        "trainer": "grpo_advantages",
        "rewards": REWARDS[name],
        "knobs": {"weights": weights, "scale": scale, "aggregation": aggregation},
        "advantages": names["advantages"].tolist(),
    }


def record_rloo_advantages(
    batch: dict[str, list], name: str, weights: list[float], **changes: object
) -> dict:
    """Advantages by RLOOTrainer."""
    source = cut(
        RLOOTrainer._generate_and_score_completions, "unscorable_mask = ", "# Slice to keep only the local"
    )
    knobs = {"beta": 0.0, "normalize_advantages": False, "reward_clip_range": None} | changes
    rewards = torch.tensor([[math.nan if x is None else x for x in row] for row in REWARDS[name]])
    names = {
        "self": SimpleNamespace(reward_weights=torch.tensor(weights), **knobs),
        "rewards_per_func": rewards,
        "device": torch.device("cpu"),
        "num_generations": GROUP,
        "torch": torch,
        "nanstd": nanstd,
        "gather": lambda tensor: tensor,
        "old_per_token_logps": padded(batch["old"]),
        "ref_per_token_logps": padded(batch["reference"]),
        "completion_mask": mask(),
    }
    exec(source, names)
    return {
        "trainer": "rloo_advantages",
        "rewards": REWARDS[name],
        "knobs": knobs | {"weights": weights},
        "advantages": names["advantages"].tolist(),
    }


def all_cases(batch: dict[str, list]) -> list[dict]:
    """Every loss and the knobs that change it; advantages of every kind."""
    losses = ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
    cases = [record_grpo(batch, loss_type=loss) for loss in losses]
    cases += [record_grpo(batch, loss_type=loss, has_old=False) for loss in losses]
    cases += [
        record_grpo(batch, loss_type=loss, beta=0.3, use_bias_correction_kl=fix)
        for loss in losses
        for fix in (False, True)
    ]
    sequence = [loss for loss in losses if loss != "vespo"]
    cases += [record_grpo(batch, loss_type=loss, importance_sampling_level="sequence") for loss in sequence]
    cases.append(
        record_grpo(batch, loss_type="grpo", importance_sampling_level="sequence", epsilon_high=4e-4)
    )
    cases += [record_grpo(batch, epsilon_high=0.28), record_grpo(batch, delta=1.05)]
    cases.append(record_grpo(batch, loss_type="cispo", epsilon_high=1.1))
    cases += [record_grpo(batch, loss_type=loss, top_entropy_quantile=0.4) for loss in losses]
    cases += [record_grpo(batch, loss_type=loss, entropy_coef=0.05) for loss in ("dapo", "grpo")]
    cases.append(record_grpo(batch, entropy_coef=0.05, top_entropy_quantile=0.4))
    cases += [record_grpo(batch, off_policy_mask_threshold=0.05), record_grpo(batch, mode="token_mask")]
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    cases += [record_grpo(batch, mode=mode, clip_max=1.2) for mode in modes]
    cases += [record_grpo(batch, mode=mode, clip_min=0.7, clip_max=1.2) for mode in modes]
    cases.append(record_grpo(batch, mode="token_mask", clip_max=2.0, off_policy_mask_threshold=0.05))
    cases += [record_grpo(batch, loss_type="vespo", mode=mode, clip_max=1.2) for mode in modes[:2]]
    cases += [record_rloo(batch), record_rloo(batch, epsilon_high=0.9, epsilon_low=0.6)]
    cases += [
        record_grpo_advantages(name, weights, scale, "sum_then_normalize")
        for name, weights in (
            ("plain", [1.0]),
            ("two", [1.0, 0.5]),
            ("alike", [1.0, 0.0]),
            ("missing", [1.0, 2.0]),
        )
        for scale in ("group", "batch", "none")
    ]
    cases += [
        record_grpo_advantages(name, weights, "group", "normalize_then_sum")
        for name, weights in (("two", [1.0, 0.5]), ("alike", [1.0, 1.0]))
    ]
    for name, weights in (("plain", [1.0]), ("two", [1.0, 0.5]), ("missing", [1.0, 2.0])):
        cases += [
            record_rloo_advantages(batch, name, weights),
            record_rloo_advantages(batch, name, weights, beta=0.1),
            record_rloo_advantages(batch, name, weights, normalize_advantages=True),
            record_rloo_advantages(batch, name, weights, reward_clip_range=(0.2, 0.8)),
        ]
    return cases


def main(path: Path) -> None:
    """Write the batch, the cases and where they come from to `path`."""
    batch = fixed_batch()
    cases = ",\n".join(json.dumps(case) for case in all_cases(batch))
    origin = {
        "command": "python benchmarks/record_trl_policy.py tests/trainers/data/trl_policy.json",
        "versions": {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "batch": batch,
        "max_tokens": MAX_TOKENS,
        "group": GROUP,
        "rollout_tokens": ROLLOUT_TOKENS,
    }
    path.write_text(json.dumps(origin)[:-1] + ',\n"cases": [\n' + cases + "\n]}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
