"""A value model beside the policy: a second head on its hidden states, or a model of its own."""

# B rows, T tokens of a row, D hidden size, N scored tokens

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memtrain.trainers.losses.head.linear import LogprobResult
from memtrain.trainers.losses.head.request import LogprobRequest, Request
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.heads.lm_head import Scorer, hidden_states
from memtrain.trainers.model.heads.reward_head import head_of_rewards, in_float
from memtrain.trainers.model.loading.save import save_final
from memtrain.trainers.model.offload.weights import compute_device
from memtrain.trainers.runtime.atomic_files import disk_fault, system_errors

HEAD_FILE = "value_head.safetensors"
"""A shared value model in the folder of the trained model: `weight` [1, D] and `bias` [1], in float32."""
OWN_FOLDER = "value"
"""A value model of its own in that folder: a sequence classifier with one number."""


class Valued(NamedTuple):
    """Log-probs, and values beside them."""

    scored: LogprobResult
    value_N: Tensor
    """float32: the expected return of the rest of the answer before each scored token."""


class ValuedRequest:
    """A request for log-probs that asks for values too."""

    def __init__(self, request: LogprobRequest) -> None:
        self.request = request


class ValueScorer(Scorer):
    """A scorer whose policy has a value model: `own`, or a head on the policy's own hidden states.

    The value of a token is read where the token is predicted: at the token before it. The head is kept and
    computed in float32, and begins at 0, so that the first advantages are those of the rewards.
    """

    def __init__(
        self, model: PreTrainedModel | PeftModel, own: PreTrainedModel | PeftModel | None, **form: Any
    ) -> None:
        super().__init__(model, **form)
        self.own = own
        if own is None:
            device = compute_device(model)
            width = base_model(model).config.get_text_config().hidden_size
            self.value_head = nn.Linear(width, 1, device=device)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        else:
            in_float(own)
            for parameter in head_of_rewards(base_model(own)).parameters():
                nn.init.zeros_(parameter)

    def forward(
        self, inputs: dict[str, Any], scored_index_N: Tensor, request: Request | ValuedRequest
    ) -> Any:
        """Result of a scorer's pass; `Valued` for a request that asks for values too."""
        if not isinstance(request, ValuedRequest):
            return super().forward(inputs, scored_index_N, request)
        if self.own is None:
            hidden_ND = self.hidden(inputs, scored_index_N)
            return Valued(self.answered(hidden_ND, request.request), self._values(hidden_ND))
        hidden_BTD = hidden_states(base_model(self.own), inputs, self.captured)
        value_N = self._values(hidden_BTD.flatten(0, 1).index_select(0, scored_index_N))
        return Valued(super().forward(inputs, scored_index_N, request.request), value_N)

    def _values(self, hidden_ND: Tensor) -> Tensor:
        head = self.value_head if self.own is None else head_of_rewards(base_model(self.own))
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return head(hidden_ND.float())[:, 0]


def value_of(scorer: ValueScorer) -> nn.Module:
    """Module that is trained beside the policy: the value model of its own, or the head on the policy's."""
    return scorer.value_head if scorer.own is None else scorer.own


def save_value(
    scorer: ValueScorer, tokenizer: PreTrainedTokenizerBase, folder: Path, state: dict[str, Tensor] | None
) -> None:
    """Write the value model into `folder`, beside the policy: its head, or a folder of its own.

    `state`: its whole weights where it holds only parts of them.
    Raises: LaunchError when the disk refuses.
    """
    if scorer.own is not None:
        save_final(scorer.own, tokenizer, folder / OWN_FOLDER, state)
        return
    held = state if state is not None else dict(scorer.value_head.named_parameters())
    tensors = {name: one.detach().cpu() for name, one in held.items()}
    try:
        with system_errors():
            save_file(cast(dict[str, Tensor], tensors), folder / HEAD_FILE)
    except OSError as error:
        raise disk_fault(error, "the value head cannot be saved", folder) from None
