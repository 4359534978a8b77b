"""Record what TRL's own trainers compute on fixed log-probs, for the tests of memtrain's losses.

TRL is never imported by memtrain. Run this in an environment of its own:

    python -m venv trl-env && trl-env/bin/pip install trl==1.16.0 torch==2.13.0
    trl-env/bin/python benchmarks/record_trl_losses.py tests/trainers/data/trl_losses.json

Each case calls the trainer's loss method on a stand-in for the trainer: a fake model hands out the fixed
log-probs, everything else (weights, masks, reductions) is TRL's. Values and gradients are fp32.
"""

from __future__ import annotations

import json
import platform
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
import trl
from torch import Tensor
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer

PROMPT_TOKENS = 2
LENGTHS = [3, 5, 2, 4, 2, 6]  # chosen answers of three pairs, then the rejected ones
LABELS = [True, False, True, True, False, False]  # the same answers as rows of KTO


def fixed_batch() -> dict[str, list]:
    """Per-token log-probs and log sums of squares, reference log-probs, mismatched log-ratios, rewards."""
    g = torch.Generator().manual_seed(11)
    logps = [(-3.0 * torch.rand(n, generator=g)).tolist() for n in LENGTHS]
    squares = [(-1.5 * torch.rand(n, generator=g)).tolist() for n in LENGTHS]
    reference = [sum(logp) + torch.randn((), generator=g).item() for logp in logps]
    return {
        "lengths": LENGTHS,
        "labels": LABELS,
        "logps": logps,
        "log_sum_squares": squares,
        "reference": reference,
        "mismatched": (0.5 + torch.randn(len(LENGTHS), generator=g)).tolist(),
        "rewards": torch.randn(len(LENGTHS), generator=g).tolist(),
        "margins": torch.rand(len(LENGTHS) // 2, generator=g).tolist(),
    }


def padded(rows: list[list[float]], width: int) -> Tensor:
    """[A, width - 1] values of predicted tokens, the prompt's and the padding's zero."""
    out = torch.zeros(len(rows), width - 1)
    for i, row in enumerate(rows):
        out[i, PROMPT_TOKENS - 1 : PROMPT_TOKENS - 1 + len(row)] = torch.tensor(row)
    return out


def stand_in(**settings: object) -> SimpleNamespace:
    """What the trainers' loss methods read of `self`."""
    same = lambda tensor: tensor  # noqa: E731
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same)
    return SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=accelerator,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        **settings,
    )


def token_inputs(batch: dict[str, list]) -> tuple[dict[str, Tensor], Tensor, SimpleNamespace]:
    """(model inputs, leaf of log-probs, fused outputs) of the fixed answers."""
    width = PROMPT_TOKENS + max(LENGTHS)
    mask = torch.zeros(len(LENGTHS), width, dtype=torch.long)
    for i, n in enumerate(LENGTHS):
        mask[i, PROMPT_TOKENS : PROMPT_TOKENS + n] = 1
    leaf = padded(batch["logps"], width).requires_grad_()
    zeros = torch.zeros_like(leaf)
    outputs = SimpleNamespace(
        log_probs=leaf,
        log_sum_sq_probs=padded(batch["log_sum_squares"], width),
        entropy=zeros,
        mean_logits=zeros,
        is_top1=zeros.bool(),
    )
    inputs = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
    }
    return inputs, leaf, outputs


def answer_gradients(leaf: Tensor) -> list[list[float]]:
    """Gradients of the answers' tokens."""
    first = PROMPT_TOKENS - 1
    return [leaf.grad[i, first : first + n].tolist() for i, n in enumerate(LENGTHS)]


def record_dpo(batch: dict[str, list], parts: dict[str, float], **knobs: object) -> dict:
    """One case of DPOTrainer."""
    inputs, leaf, outputs = token_inputs(batch)
    reference = torch.tensor(batch["reference"])
    inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = reference.chunk(2)
    settings = {
        "beta": 0.1,
        "label_smoothing": 0.0,
        "ld_alpha": None,
        "use_weighting": False,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
    } | knobs
    args = SimpleNamespace(discopop_tau=0.05)
    trainer = stand_in(loss_types=list(parts), loss_weights=list(parts.values()), args=args, **settings)
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    loss.backward()
    rewards = {k: v[0] for k, v in trainer._metrics["eval"].items() if k.startswith(("rewards", "logps"))}
    return {
        "trainer": "dpo",
        "parts": parts,
        "knobs": settings,
        "loss": loss.item(),
        "gradient": answer_gradients(leaf),
        "metrics": rewards,
    }


def record_kto(batch: dict[str, list], **knobs: object) -> dict:
    """One case of KTOTrainer."""
    inputs, leaf, outputs = token_inputs(batch)
    inputs |= {
        "label": torch.tensor(batch["labels"]),
        "ref_logps": torch.tensor(batch["reference"]),
        "ref_KL_logps": torch.zeros(len(LENGTHS)),
    }
    settings = {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0} | knobs
    trainer = stand_in(
        calculate_KL=settings["loss_type"] == "kto",
        _compute_kl_logps=lambda model, rows: torch.tensor(batch["mismatched"]),
        **settings,
    )
    loss = KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    loss.backward()
    return {
        "trainer": "kto",
        "knobs": settings,
        "loss": loss.item(),
        "gradient": answer_gradients(leaf),
        "metrics": {"kl": trainer._metrics["eval"]["kl"][0]},
    }


def record_reward(batch: dict[str, list], *, with_margin: bool, center: float | None) -> dict:
    """One case of RewardTrainer."""
    rewards = torch.tensor(batch["rewards"]).requires_grad_()
    inputs = {"attention_mask": torch.ones(len(LENGTHS), 1)}
    if with_margin:
        inputs["margin"] = torch.tensor(batch["margins"])
    trainer = stand_in(args=SimpleNamespace(center_rewards_coefficient=center))
    model = lambda **_: SimpleNamespace(logits=rewards[:, None])  # noqa: E731
    loss = RewardTrainer.compute_loss(trainer, model, inputs)
    loss.backward()
    return {
        "trainer": "reward",
        "knobs": {"with_margin": with_margin, "center": center},
        "loss": loss.item(),
        "gradient": rewards.grad.tolist(),
    }


def record_free(batch: dict[str, list], name: str, **knobs: object) -> dict:
    """One case of CPOTrainer's or ORPOTrainer's pair loss; it takes log-probs as their trainers sum them."""
    per_token = name in ("simpo", "orpo")
    logps = torch.tensor([sum(row) / (len(row) if per_token else 1) for row in batch["logps"]])
    leaf = logps.requires_grad_()
    chosen, rejected = leaf.chunk(2)
    settings = {"beta": 0.1, "label_smoothing": 0.0, "simpo_gamma": 0.5} | knobs
    if name == "orpo":
        loss = (
            -ORPOTrainer.odds_ratio_loss(stand_in(**settings), chosen, rejected)[0].mean() / settings["beta"]
        )
    else:
        kind = "simpo" if name == "simpo" else "sigmoid"
        loss = CPOTrainer.cpo_loss(stand_in(loss_type=kind, alpha=0.0, **settings), chosen, rejected)[
            0
        ].mean()
    loss.backward()
    return {
        "trainer": "free",
        "parts": {name: 1.0},
        "knobs": settings,
        "loss": loss.item(),
        "gradient": leaf.grad.tolist(),
    }


def all_cases(batch: dict[str, list]) -> list[dict]:
    """Every loss of TRL's three trainers with its knobs, and the reference-free ones."""
    margin = ["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "discopop"]
    pointwise = ["nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired", "sft"]
    cases = [record_dpo(batch, {name: 1.0}) for name in margin + pointwise]
    cases += [record_dpo(batch, {name: 1.0}, beta=0.7) for name in margin + pointwise]
    for name in ("robust", "exo_pair", "aot", "aot_unpaired"):
        cases.append(record_dpo(batch, {name: 1.0}, label_smoothing=0.2))
    for divergence in ("forward_kl", "js_divergence", "alpha_divergence"):
        cases += [record_dpo(batch, {name: 1.0}, f_divergence_type=divergence) for name in margin]
        cases.append(record_dpo(batch, {"exo_pair": 1.0}, f_divergence_type=divergence, label_smoothing=0.1))
    cases.append(
        record_dpo(batch, {"sigmoid": 1.0}, f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.8)
    )
    cases += [record_dpo(batch, {name: 1.0}, ld_alpha=0.4) for name in ("sigmoid", "ipo", "sft")]
    # TRL 1.16 multiplies in place what relu saved for its backward pass: hinge with weights raises there.
    weighted = [name for name in margin if name != "hinge"] + pointwise[:5]
    cases += [record_dpo(batch, {name: 1.0}, use_weighting=True) for name in weighted]
    cases.append(record_dpo(batch, {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}))
    cases += [record_kto(batch), record_kto(batch, loss_type="apo_zero_unpaired")]
    cases += [
        record_kto(batch, loss_type=kind, desirable_weight=1.3, undesirable_weight=0.6, beta=0.4)
        for kind in ("kto", "apo_zero_unpaired")
    ]
    cases += [record_reward(batch, with_margin=m, center=c) for m in (False, True) for c in (None, 0.01)]
    cases += [record_free(batch, name) for name in ("cpo", "simpo", "orpo")]
    cases += [record_free(batch, name, beta=2.0, label_smoothing=0.1) for name in ("cpo", "simpo")]
    return cases


def main(path: Path) -> None:
    """Write the batch, the cases and where they come from to `path`."""
    batch = fixed_batch()
    cases = ",\n".join(json.dumps(case) for case in all_cases(batch))
    origin = {
        "command": "python benchmarks/record_trl_losses.py tests/trainers/data/trl_losses.json",
        "versions": {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "batch": batch,
    }
    path.write_text(json.dumps(origin)[:-1] + ',\n"cases": [\n' + cases + "\n]}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
