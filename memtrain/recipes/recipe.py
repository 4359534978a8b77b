"""The recipe: all sections put together."""

from __future__ import annotations

from functools import cache
from typing import Literal

from pydantic import model_validator

from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.base import Section, changes
from memtrain.recipes.sections.data import Data
from memtrain.recipes.sections.evaluation import LOSS, REWARD, SET_MARK, EarlyStopping, Eval
from memtrain.recipes.sections.generate import Generate
from memtrain.recipes.sections.length import OF_ANSWERS, OF_READ_ROWS, Length, RowLimits, limits_of
from memtrain.recipes.sections.memory import Memory
from memtrain.recipes.sections.methods.distill import Distill
from memtrain.recipes.sections.methods.grpo_rloo import Grpo, Rloo
from memtrain.recipes.sections.methods.online_base import FromOwnCompletions, WithMismatch
from memtrain.recipes.sections.methods.online_dpo import OnlineDpo
from memtrain.recipes.sections.methods.ppo import Ppo
from memtrain.recipes.sections.methods.preference import Dpo, Kto, Reward, WithReference
from memtrain.recipes.sections.methods.sft import Sft
from memtrain.recipes.sections.model import Model
from memtrain.recipes.sections.optim import Optim
from memtrain.recipes.sections.rewards import Rewards
from memtrain.recipes.sections.training import Cluster, Log, Save, Train

MethodName = Literal["sft", "dpo", "kto", "reward", "grpo", "rloo", "online_dpo", "ppo", "distill"]

SECTIONS: dict[MethodName, type[Section]] = {
    "sft": Sft,
    "dpo": Dpo,
    "kto": Kto,
    "reward": Reward,
    "grpo": Grpo,
    "rloo": Rloo,
    "online_dpo": OnlineDpo,
    "ppo": Ppo,
    "distill": Distill,
}
"""Section of each method's own keys."""
HAS_ANSWERS = tuple(name for name, method in METHODS.items() if method.num_answers)
"""Methods whose rows are a prompt with one or two answers."""


@cache
def _default_section(method: MethodName) -> Section:
    return SECTIONS[method]()


class Recipe(Section):
    """A training run, as asked. What is not written takes the default shown in docs/recipe.md."""

    method: MethodName
    """Method of training: the command of the command line."""

    run_dir: str | None = None
    """Folder of the run. If not set: `runs/<recipe file name>`."""

    model: Model
    data: Data
    length: Length = Length()
    memory: Memory = Memory()
    optim: Optim = Optim()
    train: Train = Train()
    eval: Eval = Eval()
    save: Save = Save()
    log: Log = Log()
    cluster: Cluster = Cluster()
    sft: Sft | None = None
    dpo: Dpo | None = None
    kto: Kto | None = None
    reward: Reward | None = None
    grpo: Grpo | None = None
    rloo: Rloo | None = None
    online_dpo: OnlineDpo | None = None
    ppo: Ppo | None = None
    distill: Distill | None = None
    generate: Generate | None = None
    rewards: Rewards | None = None

    @property
    def own(self) -> Section:
        """The section of the method, with its defaults where the recipe has none."""
        return getattr(self, self.method) or _default_section(self.method)

    @property
    def ranks_the_batch(self) -> bool:
        """Whether the loss sorts the pairs of a step, which must then be one micro-batch."""
        section = self.own
        return isinstance(section, Dpo) and section.ranks_the_batch

    @property
    def near_reference(self) -> WithReference | None:
        """The section of a method that stays near a reference; None for other methods."""
        section = self.own
        return section if isinstance(section, WithReference) else None

    @property
    def compared(self) -> Dpo | Kto | None:
        """The section of a method that compares read answers with a reference; None where none does."""
        section = self.own
        if isinstance(section, Dpo):
            return section if section.needs_reference else None
        return section if isinstance(section, Kto) else None

    @property
    def online(self) -> FromOwnCompletions | None:
        """The section of a method that learns from its own completions, with its defaults."""
        section = self.own
        return section if isinstance(section, FromOwnCompletions) else None

    @property
    def taught(self) -> Distill | None:
        """The section of a method that learns from a teacher's distribution, with its defaults."""
        section = self.own
        return section if isinstance(section, Distill) else None

    @property
    def writes_completions(self) -> bool:
        """Whether the model writes completions that it learns from."""
        taught = self.taught
        return self.online is not None or (taught is not None and taught.on_policy_fraction > 0)

    @property
    def mixes_answers(self) -> bool:
        """Whether prompts are read once more with the answers of others, before a step or an evaluation."""
        return isinstance(self.own, Kto) and self.own.loss == "kto"

    @property
    def learns_entropy(self) -> bool:
        """Whether the loss has the entropy of the policy in it."""
        return getattr(self.online, "entropy_coef", 0.0) != 0.0

    @property
    def generation(self) -> Generate:
        """The `generate:` section, with its defaults; one completion of a row where a teacher judges it."""
        section = self.generate or Generate()
        return section if self.taught is None else section.model_copy(update={"num_generations": 1})

    @property
    def row_limits(self) -> RowLimits:
        """Limits and packing of rows, with the method's defaults, for Settings."""
        to_write = self.generation.max_tokens if METHODS[self.method].is_online else 0
        return limits_of(self.length, has_prompts=METHODS[self.method].has_prompts, to_write=to_write)

    @property
    def keeps_best(self) -> bool:
        """Whether the best weights so far are kept, and are the final ones."""
        return self.save.keep_best or self.eval.early_stopping is not None

    @property
    def eval_metrics(self) -> tuple[str, ...]:
        """Names of the metrics of held-out rows that a run may be ended by."""
        own = (REWARD,) if self.online is not None else (LOSS, *METHODS[self.method].eval_metrics)
        if self.method == "sft" and self.sft is not None and self.sft.loss == "dft":
            own = (LOSS,)
        own = (*own, *self.eval.metric_names)
        sets = (f"{name}{SET_MARK}{metric}" for name in self.data.eval_sets for metric in own)
        return (*own, *sets)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        for key, asked in (
            ("save.keep_best", self.save.keep_best),
            ("eval.every_steps", self.eval.every_steps),
            ("eval.per_epoch", self.eval.per_epoch),
            ("eval.early_stopping", self.eval.early_stopping),
            ("eval.metrics", self.eval.metrics),
        ):
            if asked and not (self.data.eval or self.data.eval_fraction):
                raise ValueError(f"{key} needs held-out rows; set data.eval_fraction or data.eval")
        if self.eval.early_stopping is not None:
            self._check_watched_metric(self.eval.early_stopping)
        return self

    @model_validator(mode="after")
    def _has_a_teacher(self) -> Recipe:
        section = self.taught
        if section is None:
            return self
        if section.teacher is None and section.top_k is None:
            raise ValueError(
                f"{self.method} needs a teacher; set {self.method}.teacher to a model with the student's "
                "tokenizer, to adapter_off, or set top_k and top_k_file"
            )
        if section.kind == "adapter_off" and self.model.adapter is None:
            raise ValueError(
                f"{self.method}.teacher is adapter_off, but every weight is trained; set model.adapter, or "
                "name a teacher"
            )
        return self

    @model_validator(mode="after")
    def _writes_beside_training(self) -> Recipe:
        """Samples and metrics are of models that write, and do not write already."""
        asked = [name for name in ("samples", "metrics") if getattr(self.eval, name) is not None]
        for name in asked:
            if self.online is not None:
                fix = "generate.show shows some" if name == "samples" else "a reward of weight 0 is a metric"
                raise ValueError(
                    f"eval.{name} has no effect on {self.method}, whose completions are written and judged "
                    f"anyway; remove it: {fix}"
                )
            if METHODS[self.method].head == "score":
                raise ValueError(
                    f"eval.{name} needs generated text, but a model of {self.method} gives numbers; remove it"
                )
        if self.eval.lm_eval is not None and METHODS[self.method].head == "score":
            raise ValueError(
                f"eval.lm_eval needs generated text, but a model of {self.method} gives numbers; remove it"
            )
        return self

    def _check_watched_metric(self, stopping: EarlyStopping) -> None:
        if stopping.metric is not None and stopping.metric not in self.eval_metrics:
            known = ", ".join(self.eval_metrics)
            raise ValueError(
                f"eval.early_stopping.metric {stopping.metric} is not a metric of the held-out rows of this "
                f"recipe; give one of {known}"
            )

    @model_validator(mode="after")
    def _own_completions_can_be_taught(self) -> Recipe:
        if self.taught is None or not self.writes_completions:
            return self
        refused = {
            f"length.packing {self.length.packing}": self.length.packing != "none",
            f"generate.backend {self.generation.backend}": self.generation.backend == "vllm",
            "generate.num_generations": self.generate is not None
            and changes(self.generate, "num_generations"),
            "eval.samples": self.eval.samples is not None,
            "eval.metrics": self.eval.metrics is not None,
            "optim.neftune_alpha": self.optim.neftune_alpha is not None,
        }
        for name, is_there in refused.items():
            if is_there:
                raise ValueError(
                    f"{name} cannot be combined with {self.method}.on_policy_fraction: the trained module "
                    "writes one completion for each row by itself, as it is trained; remove it"
                )
        return self

    @model_validator(mode="after")
    def _lengths_fit_the_method(self) -> Recipe:
        length = self.length
        if METHODS[self.method].is_online:
            self._check_online_lengths()
            return self
        if self.method in HAS_ANSWERS:
            if length.packing != "none":
                raise ValueError(
                    f"length.packing {length.packing} fills sequences with rows that are only read; "
                    f"remove it: {self.method} concatenates prompts with their answers by itself"
                )
            return self
        for name in OF_ANSWERS:
            if changes(length, name):
                raise ValueError(
                    f"length.{name} has no effect on {self.method}, which trains on whole rows; remove it"
                )
        return self

    def _check_online_lengths(self) -> None:
        length = self.length
        for name in OF_READ_ROWS:
            if changes(length, name):
                fix = "; set generate.max_tokens" if name == "max_completion" else ""
                raise ValueError(
                    f"length.{name} has no effect on {self.method}, which generates its answers; remove "
                    f"it{fix}"
                )
        room = None if length.max_length is None else length.max_length - self.generation.max_tokens
        if room is not None and room < 1:
            raise ValueError(
                f"generate.max_tokens {self.generation.max_tokens} leaves no room for a prompt in "
                f"length.max_length {length.max_length}; lower it, or raise length.max_length"
            )

    def _check_bounds_are_read(self, section: WithMismatch) -> None:
        mode, why = section.correction(self.generation)
        for name in ("importance_correction_min", "importance_correction_max"):
            if mode == "none" and changes(section, name):
                raise ValueError(
                    f"{name} has no effect: importance_correction: auto is off, because {why}; "
                    "set importance_correction, or remove it"
                )

    def _correction_can_be_made(self, section: WithMismatch) -> None:
        """The sampler's probabilities are compared with the trainer's."""
        is_corrected = section.importance_correction not in ("auto", "none")
        if section.importance_correction == "auto":
            self._check_bounds_are_read(section)
        if is_corrected and self.generation.truncates:
            raise ValueError(
                "importance_correction compares the sampler's probabilities with the trainer's, and "
                "top_k, top_p and min_p leave the sampler fewer tokens; remove them, or set "
                "importance_correction: none"
            )
        generate = self.generation
        if (
            is_corrected
            and generate.backend == "vllm"
            and generate.repetition_penalty != 1
            and generate.temperature != 1
        ):
            raise ValueError(
                "importance_correction needs the sampler's probabilities before its repetition_penalty, "
                "and vLLM gives those only at temperature 1; remove repetition_penalty, or set "
                "temperature: 1, "
                "or importance_correction: none"
            )

    @model_validator(mode="after")
    def _completions_are_judged(self) -> Recipe:
        section = self.online
        if section is None:
            unread = ("rewards",) if self.writes_completions else ("generate", "rewards")
            for name in unread:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} has no effect on {self.method}, which generates nothing; remove it"
                    )
            return self
        if self.rewards is None:
            raise ValueError(
                f"{self.method} needs rewards; set rewards: {{functions: exact_answer}}, or your own function"
            )
        if self.data.holds_out and all(one.pairwise for one in self.rewards.functions):
            raise ValueError(
                "a pairwise judge compares completions of one prompt, and held-out prompts get one each; add "
                "a reward function (weight: 0 is enough), or remove data.eval_fraction and data.eval"
            )
        if self.generation.num_generations < 2 and any(one.pairwise for one in self.rewards.functions):
            raise ValueError(
                "a pairwise judge compares completions, but generate.num_generations is 1; set 2 or more"
            )
        if self.train.batch_tokens is not None:
            raise ValueError(
                f"train.batch_tokens is set, but {self.method} counts a step in completions; set "
                "train.batch_size instead"
            )
        if self.generation.num_generations < 2 and not METHODS[self.method].has_value:
            raise ValueError(
                f"{self.method} compares the completions of a prompt, but generate.num_generations is 1; "
                "set 2 or more"
            )
        if isinstance(section, WithMismatch):
            self._correction_can_be_made(section)
        if self.optim.neftune_alpha is not None:
            raise ValueError(
                f"optim.neftune_alpha makes the policy differ between training and sampling; remove it "
                f"for {self.method}"
            )
        return self
