"""The registry of methods: names of `method:`, descriptions, and the module of each trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Method:
    """A method. `trainer` names its module as text, so that this floor imports nothing above."""

    name: str
    says: str
    trainer: str
    head: Literal["lm", "score"] = "lm"
    """End of the model: the LM head, or one number for a sequence."""
    num_answers: int = 0
    """Answers of a row that is a prompt with its answers; 0: the row is learnt whole, or is a prompt."""
    is_online: bool = False
    """Whether the method writes the completions it learns from."""
    in_pairs: bool = False
    """Whether the method learns from two of a prompt's completions together."""
    has_value: bool = False
    """A value model is trained beside the policy."""

    @property
    def trains_numbers(self) -> bool:
        """Whether a head of one number, of a sequence or a token, is trained in float32."""
        return self.head == "score" or self.has_value

    @property
    def verb(self) -> str:
        """The verb of the command line."""
        return self.name.replace("_", "-")


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "sft",
            "Supervised fine-tuning: cross-entropy on the loss tokens.",
            "memtrain.trainers.methods.sft",
        ),
        Method(
            "dpo",
            "Direct preference optimization: chosen answers made likelier than rejected ones.",
            "memtrain.trainers.methods.dpo",
            num_answers=2,
        ),
        Method(
            "kto",
            "KTO: single answers that are desirable or not, without pairs.",
            "memtrain.trainers.methods.kto",
            num_answers=1,
        ),
        Method(
            "reward",
            "A reward model: one number for an answer, trained on pairs.",
            "memtrain.trainers.methods.reward",
            num_answers=2,
            head="score",
        ),
        Method(
            "grpo",
            "Group relative policy optimization: completions judged by rewards, against their group.",
            "memtrain.trainers.methods.grpo",
            is_online=True,
        ),
        Method(
            "rloo",
            "REINFORCE with a leave-one-out baseline: completions judged by rewards.",
            "memtrain.trainers.methods.rloo",
            is_online=True,
        ),
        Method(
            "online_dpo",
            "Online DPO: the best and the worst of a prompt's completions are its pair.",
            "memtrain.trainers.methods.online_dpo",
            is_online=True,
            in_pairs=True,
        ),
        Method(
            "ppo",
            "Proximal policy optimization: rewards, a value model, and advantages of single tokens.",
            "memtrain.trainers.methods.ppo",
            is_online=True,
            has_value=True,
        ),
    )
}
"""Every method by its name: `method:` and the section of its own knobs; the verb of the command line."""
