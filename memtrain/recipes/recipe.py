"""The recipe: all sections put together."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from memtrain.recipes.base import Section, changes
from memtrain.recipes.data import Data
from memtrain.recipes.length import Length
from memtrain.recipes.memory import Memory
from memtrain.recipes.methods import Sft
from memtrain.recipes.model import Model
from memtrain.recipes.optim import Optim
from memtrain.recipes.preference import Dpo, Kto, Reward
from memtrain.recipes.run import Cluster, Eval, Log, Save, Train

MethodName = Literal["sft", "dpo", "kto", "reward"]

HAS_ANSWERS = ("dpo", "kto", "reward")
"""Methods whose rows are a prompt with one or two answers."""


class Recipe(Section):
    """One training run, as asked. What is not written takes the default shown in docs/recipe.md."""

    method: MethodName
    """What is done: the verb of the command line."""

    run_dir: str | None = None
    """Folder of the run. Not given: `runs/<recipe file name>`."""

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

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.save.keep_best and not (self.data.eval or self.data.held_out):
            raise ValueError("save.keep_best needs held-out rows; set data.held_out or data.eval")
        if self.eval.every_steps and not (self.data.eval or self.data.held_out):
            raise ValueError("eval.every_steps needs held-out rows; set data.held_out or data.eval")
        return self

    @model_validator(mode="after")
    def _lengths_fit_the_method(self) -> Recipe:
        length = self.length
        if self.method in HAS_ANSWERS:
            if length.packing != "none":
                raise ValueError(
                    f"length.packing {length.packing} fills sequences with rows that are only read; "
                    f"remove it: {self.method} lays prompts with their answers end to end by itself"
                )
            return self
        for name in ("max_prompt", "max_completion", "shared_prompts", "group_prompts"):
            if changes(length, name):
                raise ValueError(
                    f"length.{name} has no effect on {self.method}, which learns rows whole; remove it"
                )
        return self
