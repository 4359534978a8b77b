"""The `eval:` section: when held-out rows are measured, and when a run that gains nothing ends."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from memtrain.recipes.sections.base import PositiveInt, Section, changes, one_or_many
from memtrain.recipes.sections.rewards import Rewards

LOSS = "loss"
REWARD = "reward"
TAKEN = (LOSS, REWARD, "accuracy", "entropy", "extra", "kind", "nll", "seconds", "step", "time", "tokens")
"""Names in the lines of evaluations that are no function's."""
SET_MARK = "/"
"""Stands between the name of an evaluation set and a metric of it: `math/loss`."""


class EarlyStopping(Section):
    """Early end of a run whose held-out rows show no gain. The best checkpoint is kept and becomes the
    final model, as with `save.keep_best`."""

    patience: PositiveInt = 3
    """Evaluations without a gain after which the run ends. Higher: more steps before the run ends."""

    min_gain: Annotated[float, Field(ge=0)] = 0.0
    """Least improvement on the best value so far that counts as a gain, in the metric's own unit."""

    metric: str | None = None
    """Metric of the held-out rows that is watched. If not set: `loss`; of online methods `reward`. Others:
    `accuracy` (sft), `rewards/accuracies` and `rewards/margins` (preferences), the name of a metric of
    `eval.metrics`; of one evaluation set with its name before it: `math/loss`."""

    greater_is_better: bool | None = None
    """Direction of the metric. If not set: lower is better for the loss, higher for all others."""


class Samples(Section):
    """Prompts that the model continues during training, shown side by side over the steps in the report.
    They do not change the training."""

    prompts: Annotated[tuple[str, ...], BeforeValidator(one_or_many), Field(min_length=1)]
    """A prompt, or a list of them. In runs on conversations each is a user turn, rendered by the chat
    template (after `data.system_prompt`); otherwise plain text that is continued."""

    every_steps: PositiveInt | None = None
    """Write every n optimizer steps, and after the last. If not set: at the end of every epoch."""

    at_start: bool = True
    """Write before the first step too: what the model wrote before it was trained."""

    max_tokens: PositiveInt = 64
    """Longest completion in tokens. Higher: more time, more memory for keys and values."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy. Above: sampled, with the same random numbers at every step."""


class Metrics(Rewards):
    """Metrics of completions: functions read what the model writes for prompts of held-out rows. They are
    called like reward functions, with the same rules for errors and timeouts."""

    KEY: ClassVar[str] = "eval.metrics"

    max_rows: PositiveInt = 64
    """Held-out rows (of each evaluation set) whose prompts are answered, evenly spaced. Higher: a more
    reliable mean, more time for each evaluation."""

    max_tokens: PositiveInt = 256
    """Longest completion in tokens. Higher: more time, more memory for keys and values."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy. Above: sampled, with the same random numbers at every evaluation."""

    @model_validator(mode="after")
    def _are_functions(self) -> Metrics:
        if self.environment is not None:
            raise ValueError("eval.metrics: environment has no effect on a metric; remove it")
        for one in self.functions:
            if one.model is not None:
                raise ValueError(
                    f"eval.metrics: {one.label} is a model, and metrics are functions; remove it, and score "
                    "the final model with `memtrain score`"
                )
            for name in ("pairwise", "both_orders", "weight"):
                if changes(one, name):
                    raise ValueError(f"eval.metrics: {name} has no effect on a metric; remove it")
            if SET_MARK in one.label or one.label in TAKEN:
                raise ValueError(
                    f"eval.metrics: {one.label} cannot be the name of a metric; give it another name"
                )
        return self


class LmEval(Section):
    """Benchmarks of EleutherAI's lm-evaluation-harness (`pip install 'memtrain[lm-eval]'`) for the final
    model."""

    tasks: Annotated[tuple[str, ...], BeforeValidator(one_or_many), Field(min_length=1)]
    """Names of its tasks or groups (`lm-eval ls tasks`), or your own YAML files."""

    limit: PositiveInt | None = None
    """Number of rows per task. If not set: all."""

    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Number of few-shot examples. If not set: as each task says."""

    batch_size: PositiveInt = 8
    """Rows that are computed at once. Higher: more memory, faster."""

    include_path: str | None = None
    """Folder with your own tasks."""

    apply_chat_template: bool = False
    """Apply the model's chat template."""


class Eval(Section):
    """Loss on held-out rows, metrics of generated text, and samples."""

    every_steps: PositiveInt | None = None
    """Evaluate every n optimizer steps. If not set: at the end of every epoch."""

    per_epoch: PositiveInt | None = None
    """Evaluate n times an epoch, after equal parts of it, the last at its end. In place of `every_steps`."""

    at_start: bool = False
    """Evaluate before the first step too."""

    max_rows: PositiveInt | None = None
    """Use at most this many held-out rows, of each evaluation set."""

    samples: Samples | None = None
    """Fixed prompts that the model answers during the run: `{prompts: [...], every_steps: 50}`. Not for
    online methods, which show their completions anyway."""

    metrics: Metrics | None = None
    """Metrics from functions, for SFT and preference methods: `{functions: ./metrics.py:exact}`. A
    function gets the arguments of a reward function, and as `reference` (or `answer`) the answer of the
    row (of a pair, the chosen one). Its mean is reported by each evaluation under its name."""

    lm_eval: LmEval | None = None
    """Run benchmarks of lm-evaluation-harness on the final model when the run is done, in a separate
    process: `{tasks: [gsm8k, ifeval], limit: 200}`. Their results are in RUN/lm_eval.json. `memtrain
    lm-eval RUN` runs them later."""

    early_stopping: EarlyStopping | None = None
    """End the run when held-out rows show no gain: `{patience: 3}`. If not set: all steps are made."""

    @model_validator(mode="after")
    def _one_interval(self) -> Eval:
        if self.every_steps is not None and self.per_epoch is not None:
            raise ValueError("evaluations are set twice; set eval.every_steps or eval.per_epoch, not both")
        return self

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that come from functions."""
        return tuple(one.label for one in self.metrics.functions) if self.metrics is not None else ()

    @property
    def writes(self) -> bool:
        """Whether completions are asked for beside the training."""
        return self.samples is not None or self.metrics is not None

    @property
    def longest_written(self) -> int:
        """Tokens of the longest completion that is asked for; 0 where none is."""
        return max((one.max_tokens for one in (self.samples, self.metrics) if one is not None), default=0)
