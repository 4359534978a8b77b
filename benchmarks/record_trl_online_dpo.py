"""Record what TRL's experimental Online DPO trainer computes on fixed completions, for the tests of ours.

TRL is never imported by memtrain. Run this in an environment of its own:

    python -m venv trl-env && trl-env/bin/pip install trl==1.16.0 torch==2.13.0
    trl-env/bin/python benchmarks/record_trl_online_dpo.py tests/trainers/data/trl_online_dpo.json

The lines of `training_step` from the split of the rewards to the mean loss are run as they stand, cut out by
their first and last statement, on fixed log-probs, masks and rewards.
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformers
import trl
from torch import Tensor
from trl.experimental.online_dpo.online_dpo_trainer import OnlineDPOTrainer

LENGTHS = [3, 5, 2, 4, 2, 6]
"""Of the first completions of three prompts, then of their second ones."""
FIRST, LAST = "first_half, second_half = rewards.split(batch_size)", "loss = losses.mean()"


def fixed() -> dict[str, list]:
    """Log-probs of the completions under policy and reference, and their rewards (none alike)."""
    g = torch.Generator().manual_seed(11)
    logp = [(-2.0 * torch.rand(n, generator=g)).tolist() for n in LENGTHS]
    reference = [[x + 0.3 * float(torch.randn((), generator=g)) for x in row] for row in logp]
    return {
        "lengths": LENGTHS,
        "logp": logp,
        "reference": reference,
        "rewards": [0.5, -1.0, 2.0, 1.5, -2.0, 0.25],
    }


def padded(rows: list[list[float]]) -> Tensor:
    """[A, longest], zeros on the right."""
    out = torch.zeros(len(rows), max(LENGTHS))
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


def cut_lines() -> str:
    """The statements of the trainer's own source."""
    source = textwrap.dedent(inspect.getsource(OnlineDPOTrainer.training_step))
    body = textwrap.dedent("\n".join(line for line in source.splitlines()[1:]))
    start, end = body.index(FIRST), body.index(LAST) + len(LAST)
    start = body.rindex("\n", 0, start) + 1
    return textwrap.dedent(body[start:end])


def one_case(loss: str, beta: float, batch: dict[str, list]) -> dict[str, object]:
    """The loss and its gradient by the policy's log-probs."""
    logp = padded(batch["logp"]).requires_grad_()
    names = {
        "torch": torch,
        "F": F,
        "self": SimpleNamespace(args=SimpleNamespace(loss_type=loss), beta=beta),
        "rewards": torch.tensor(batch["rewards"]),
        "batch_size": len(LENGTHS) // 2,
        "device": torch.device("cpu"),
        "logprobs": logp,
        "ref_logprobs": padded(batch["reference"]),
        "completion_mask": padded([[1.0] * n for n in LENGTHS]),
    }
    exec(cut_lines(), names)
    names["loss"].backward()
    gradient = [row[:n] for row, n in zip(logp.grad.tolist(), LENGTHS, strict=True)]
    return {"loss_type": loss, "beta": beta, "loss": names["loss"].item(), "gradient": gradient}


def main() -> None:
    """Write the file that the command line names."""
    batch = fixed()
    reported = {
        "versions": {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": "python benchmarks/record_trl_online_dpo.py tests/trainers/data/trl_online_dpo.json",
        "batch": batch,
        "cases": [one_case(loss, beta, batch) for loss in ("sigmoid", "ipo") for beta in (0.1, 0.5)],
    }
    Path(sys.argv[1]).write_text(json.dumps(reported, indent=1) + "\n")


if __name__ == "__main__":
    main()
