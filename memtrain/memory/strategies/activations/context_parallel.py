"""Context parallelism: several processes hold each row together, a slice each.

When: one row is too long for a device, or its activations are what does not fit. Saves: activations, by the
number of processes that share a row. Costs: keys and values of documents that cross slices are gathered in
every layer, and rows are padded to a multiple of twice the processes. Exact: documents stay apart, and losses
and gradients are those of one process. Refused: for methods that write completions, with noise on the
embeddings, and with attention that does not return its log-sum-exp. `cluster.context_parallel` is how many;
`cluster.context_parallel_mode: ulysses` deals out heads in place of gathering keys.

Source: Llama 3, arXiv:2407.21783, section 3.3.2 (keys and values gathered, two chunks to a process);
DeepSpeed Ulysses, arXiv:2309.14509, section 3.1 (heads).
"""

from __future__ import annotations

from memtrain.memory.plan.engine_kinds import ZERO
from memtrain.memory.rules.attention import MERGED, NOT_SLICED
from memtrain.memory.rules.context_parallel import NOT_WITH_LIGER, context_faults
from memtrain.memory.strategies.base import Conflict, Strategy, StrategyContext


def refusal(case: StrategyContext) -> str | None:
    """Part of the recipe or the model that slices cannot honour."""
    faults = context_faults(case.recipe, case.facts.config)
    return faults[0][0] if faults else None


STRATEGY = Strategy(
    name="context_parallel",
    axis="context",
    summary="several processes share each row, a slice each; no document sees another",
    saves="activations, by the number of processes",
    costs="keys and values are gathered in every layer",
    measured="[context parallelism, measured](context-parallel.md#measured)",
    is_exact=True,
    is_used=lambda settings: settings.context_parallel > 1,
    wish=lambda recipe: "on" if recipe.cluster.sharing > 1 else "off",
    use_keys=lambda recipe: {"cluster.context_parallel": max(2, recipe.cluster.sharing)},
    never_keys=lambda recipe: {"cluster.context_parallel": 1},
    without={"context_parallel": 1},
    refusal=refusal,
    conflicts=(
        Conflict(
            "attention that is flex or transformers",
            NOT_SLICED,
            when=lambda settings: settings.attention not in MERGED,
        ),
        Conflict("liger_loss", NOT_WITH_LIGER),
        Conflict(
            "DeepSpeed's ZeRO",
            "slices of rows are untested with DeepSpeed's shards",
            when=lambda settings: settings.engine in ZERO,
        ),
    ),
)
