"""The registry of methods: names of `method:`, descriptions, and the module of each trainer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Method:
    """A method. `trainer` names its module as text, so that this floor imports nothing above."""

    name: str
    summary: str
    """The sentence of `memtrain methods`, of the list of commands and of the command's own help."""
    title: str
    """The method in the words of a model card."""
    trainer: str
    head: Literal["lm", "score"] = "lm"
    """End of the model: the LM head, or one number for a sequence."""
    num_answers: int = 0
    """Answers of a row that is a prompt with its answers; 0: the row is trained on whole, or is a prompt."""
    is_online: bool = False
    """Whether the method writes the completions it learns from."""
    in_pairs: bool = False
    """Whether the method learns from two of a prompt's completions together."""
    has_value: bool = False
    """A value model is trained beside the policy."""
    has_teacher: bool = False
    """Whether the loss compares the student's distribution with a teacher's."""
    eval_metrics: tuple[str, ...] = ()
    """Metrics of held-out rows beside the loss that a run may be ended by; higher is better."""
    reads_margin: bool = False
    """Whether the loss reads the margin that a pair may have."""
    starter: tuple[tuple[str, str], ...] = ()
    """Keys of `memtrain init` for this method, with their values; `#`: commented out."""

    @property
    def has_prompts(self) -> bool:
        """Whether rows are prompts, with answers or without; otherwise they are trained on whole."""
        return self.is_online or self.num_answers > 0

    @property
    def trains_numbers(self) -> bool:
        """Whether a head of one number, of a sequence or a token, is trained in float32."""
        return self.head == "score" or self.has_value

    @property
    def command(self) -> str:
        """Name of the command that trains by it."""
        return self.name.replace("_", "-")


ONLINE_STARTER = (
    ("rewards.functions", "exact_answer"),
    ("generate.num_generations", "8"),
    ("generate.max_tokens", "256"),
    ("#generate.temperature", "1.0"),
)
"""Keys of `memtrain init` for every method that compares completions of a prompt."""

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "sft",
            "Supervised fine-tuning: cross-entropy on the loss tokens.",
            "supervised fine-tuning",
            "memtrain.trainers.methods.sft",
            eval_metrics=("accuracy",),
            starter=(("#sft.loss", "nll"),),
        ),
        Method(
            "dpo",
            "Direct preference optimization: chosen answers made likelier than rejected ones.",
            "direct preference optimization (DPO)",
            "memtrain.trainers.methods.dpo",
            num_answers=2,
            eval_metrics=("rewards/accuracies", "rewards/margins"),
            starter=(("#dpo.loss", "sigmoid"), ("#dpo.beta", "0.1"), ("#dpo.reference", "auto")),
        ),
        Method(
            "kto",
            "KTO: single answers that are desirable or not, without pairs.",
            "KTO",
            "memtrain.trainers.methods.kto",
            num_answers=1,
            eval_metrics=("rewards/margins",),
            starter=(("#kto.beta", "0.1"), ("#kto.desirable_weight", "1.0"), ("#kto.reference", "auto")),
        ),
        Method(
            "reward",
            "A reward model: one number for an answer, trained on pairs.",
            "reward modelling",
            "memtrain.trainers.methods.reward",
            num_answers=2,
            eval_metrics=("rewards/accuracies", "rewards/margins"),
            head="score",
            reads_margin=True,
            starter=(("#reward.center_rewards_coefficient", "0.01"),),
        ),
        Method(
            "grpo",
            "Group relative policy optimization: completions judged by rewards, against their group.",
            "group relative policy optimization (GRPO)",
            "memtrain.trainers.methods.grpo",
            is_online=True,
            starter=(*ONLINE_STARTER, ("#grpo.loss", "dapo"), ("#grpo.beta", "0.0")),
        ),
        Method(
            "rloo",
            "REINFORCE with a leave-one-out baseline: completions judged by rewards.",
            "REINFORCE leave-one-out (RLOO)",
            "memtrain.trainers.methods.rloo",
            is_online=True,
            starter=(*ONLINE_STARTER, ("#rloo.beta", "0.05")),
        ),
        Method(
            "online_dpo",
            "Online DPO: the best and the worst of a prompt's completions are its pair.",
            "online direct preference optimization (online DPO)",
            "memtrain.trainers.methods.online_dpo",
            is_online=True,
            in_pairs=True,
            starter=(*ONLINE_STARTER, ("#online_dpo.loss", "sigmoid"), ("#online_dpo.beta", "0.1")),
        ),
        Method(
            "ppo",
            "Proximal policy optimization: rewards, a value model, and advantages of single tokens.",
            "proximal policy optimization (PPO)",
            "memtrain.trainers.methods.ppo",
            is_online=True,
            has_value=True,
            starter=(
                ("rewards.functions", "exact_answer"),
                ("generate.num_generations", "1"),
                ("generate.max_tokens", "256"),
                ("#generate.temperature", "1.0"),
                ("#ppo.value", "shared"),
                ("#ppo.beta", "0.05"),
            ),
        ),
        Method(
            "distill",
            "Distillation: the student's next-token distribution becomes a teacher's.",
            "distillation",
            "memtrain.trainers.methods.distill",
            has_teacher=True,
            starter=(
                ("distill.teacher", "builtin:tiny"),
                ("#distill.beta", "0.5"),
                ("#distill.temperature", "1.0"),
                ("#distill.cross_entropy_weight", "0.5"),
            ),
        ),
    )
}
"""Every method by its name: `method:` and the section of its own knobs; the command of the command line."""


_ELSEWHERE = {
    **dict.fromkeys(("rewardmodel", "rewardmodeling", "rewardmodelling", "rm"), "reward"),
    **dict.fromkeys(("distil", "distillation", "gkd"), "distill"),
}
"""Words of other trainers for a method, in small letters."""


def spelled_method(text: str) -> str:
    """A method's name however it is spelled: `online-dpo`, `OnlineDPO` and `online_dpo` are one."""
    letters = re.sub(r"[^a-z]", "", text.lower())
    if letters in _ELSEWHERE:
        return _ELSEWHERE[letters]
    if known := next((name for name in METHODS if name.replace("_", "") == letters), None):
        return known
    return re.sub(r"[\s-]+", "_", text.strip().lower())


def nearest_methods(text: str, known: Collection[str] | None = None) -> list[str]:
    """At most two of the known methods that a misspelled word may mean, the likeliest first.

    The first letter is rarely mistyped: `dppo` is dpo sooner than ppo.
    """
    near = difflib.get_close_matches(text.lower(), METHODS if known is None else known, n=3)
    first = text[:1].lower()
    return sorted(near, key=lambda name: (name[0] != first, near.index(name)))[:2]
