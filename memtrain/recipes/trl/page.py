"""The page for users of TRL, in Markdown: every key, with its counterpart; and the table of all tools."""

from __future__ import annotations

from memtrain.recipes.peers.table import Row, table, tables, yaml_word

_HEAD = """\
# Migrating from TRL

Written from `memtrain/recipes/peers/keys/trl.toml` by `make docs-reference`; the keys are those of TRL 1.16.

```
memtrain import-trl sft.yaml --method sft -o my.yaml    # the YAML file that `trl sft --config` takes
memtrain check my.yaml
memtrain sft my.yaml --dry-run                          # what it will need, before anything starts
```

TRL's own defaults (three epochs, a linear schedule without warm-up, seed 42, LoRA
dropout 0.05, ...) are written into the recipe with the comment `TRL's default`, so that the recipe trains
what the configuration trained. Keys without a counterpart are listed on the screen and at the head of the
recipe. The batch is that of all devices: `--processes 8` (or `num_processes` in the file) says how many
there were.

What works differently:

- **Packing and padding-free.** Rows never see each other, on any attention back end; `padding_free` works
  for every method. Batches are made by the plan: `per_device_train_batch_size` is only a factor of
  `train.batch_size`.
- **The loss of a step** is the mean over the loss tokens of the whole step, over all devices and
  micro-batches.
- **Pairs.** A prompt is computed once for its answers (`length.shared_prompts`).
- **GRPO, RLOO.** A step is counted in completions: `train.batch_size` divided by
  `generate.num_generations` is its number of prompts.
- **GKD** is `--method distill`. Its `beta` means the same here (0: forward KL, 1: reverse KL). Its
  `temperature` is that of the completions alone; `distill.temperature` is that of the loss, which TRL takes
  at 1. A share `lmbda` of the optimizer steps, and not of the micro-batches, learns from completions.
- **Resuming** needs no flag: the same command continues the run, bit for bit (on a GPU with
  `train.deterministic`).
"""


def trl_page() -> str:
    """docs/coming-from-trl.md. Written by `make docs-reference`."""
    parts = [_HEAD]
    for heading, rows in table("trl").sections():
        lines = [f"| `{row.key}` | {_becomes(row)} |" for row in rows]
        parts += [f"## {heading}", "", "| TRL | memtrain |", "|---|---|", *lines, ""]
    return "\n".join(parts)


def _becomes(row: Row) -> str:
    if row.done:
        return f"not needed: {row.done}"
    if row.lost:
        return f"no counterpart: {row.lost}"
    if row.words.startswith("remove it"):
        return row.words.replace("remove it", "not needed", 1)
    if "{" not in row.to and (row.words or not row.to):
        return row.words or "read with the keys beside it, or listed"
    words = ", ".join(
        f"`{old}` is `{yaml_word(new)}`" for old, new in row.values.items() if old not in ("true", "false")
    )
    return f"`{row.to.replace('{method}', 'METHOD')}`" + (f" ({words})" if words else "")


def tools_table() -> str:
    """The table of docs/importing.md: what is read of each tool, and the source of its rows."""
    rows = [f"| {one.title} | {one.reads} | {one.source} |" for one in tables() if one.reads]
    head = "| tool | what is read | source of its table in `memtrain/recipes/peers/keys/` |"
    return "\n".join([head, "|---|---|---|", *rows])
