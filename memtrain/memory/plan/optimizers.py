"""Facts of each optimizer that memory and time follow from; its formula and its code ask them by these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from memtrain.recipes.sections.optim import OptimizerKind


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Facts of a value of `optim.kind`."""

    moments: Literal["two", "blockwise", "factored", "of matrices", "none"]
    """Two numbers a weight; the same in bitsandbytes' blocks; a row and a column for each matrix; one number
    a weight of a matrix and two for the rest; or none."""
    is_8bit: bool = False
    is_paged: bool = False
    smaller_than: tuple[OptimizerKind, ...] = ()
    """Optimizers in whose place it is suggested where nothing fits."""

    @property
    def is_bitsandbytes(self) -> bool:
        """Whether its states are bitsandbytes', which computes on CUDA devices."""
        return self.moments == "blockwise"

    @property
    def steps_on_host(self) -> bool:
        """Whether it steps weights that live on the host: not by CUDA's kernels, nor by large products."""
        return self.moments not in ("blockwise", "of matrices")

    @property
    def needs_matrices(self) -> bool:
        """Whether it steps whole matrices, one after another, by kernels of its own."""
        return self.moments in ("factored", "of matrices")


OPTIMIZERS: Mapping[OptimizerKind, OptimizerFacts] = {
    "adamw": OptimizerFacts("two"),
    "adamw_8bit": OptimizerFacts("blockwise", is_8bit=True, smaller_than=("adamw",)),
    "paged_adamw": OptimizerFacts("blockwise", is_paged=True),
    "paged_adamw_8bit": OptimizerFacts("blockwise", is_8bit=True, is_paged=True),
    "adafactor": OptimizerFacts(
        "factored", smaller_than=("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "muon")
    ),
    "muon": OptimizerFacts("of matrices"),
    "sgd": OptimizerFacts("none"),
}
"""Every optimizer by its name in `optim.kind`."""
