"""Examples of every command, as its help shows them: lines to type, a remark behind some."""

from __future__ import annotations

from memtrain.recipes.registry import METHODS, Method

EXAMPLES: dict[str, tuple[str, ...]] = {
    "quickstart": ("memtrain quickstart", "memtrain quickstart --run-dir runs/first"),
    "score-teacher": ("memtrain score-teacher my.yaml",),
    "score": ("memtrain score runs/my answers.jsonl", "memtrain score runs/my pairs.jsonl -o rewards.jsonl"),
    "train": ("memtrain train my.yaml", "memtrain train my.yaml --no-resume  # start over"),
    "plan": (
        "memtrain plan my.yaml",
        "memtrain plan my.yaml --gpu 4090 --explain",
        "memtrain plan my.yaml --gpu l4 --solve max_length",
        "memtrain plan Qwen/Qwen3-8B  # LoRA, QLoRA and full fine-tuning on common cards",
        "memtrain plan rows.jsonl --model Qwen/Qwen3-8B model.adapter={}  # without a recipe",
    ),
    "calibrate": ("memtrain calibrate", "memtrain calibrate --show"),
    "verify": (
        "memtrain verify my.yaml",
        "memtrain verify my.yaml --shrink  # a small model of the same kind",
    ),
    "bench": (
        "memtrain bench my.yaml",
        "memtrain bench my.yaml --ablate --html bench.html",
        "memtrain bench my.yaml --against other.yaml",
    ),
    "slurm": (
        "memtrain slurm my.yaml --nodes 2 --gpus 8 --time 4:00:00",
        "memtrain slurm my.yaml --array train.seed=0,1,2 --submit",
    ),
    "status": ("memtrain status runs/my",),
    "logs": ("memtrain logs runs/my -f",),
    "check": ("memtrain check my.yaml", "memtrain check my.yaml --all"),
    "show-data": (
        "memtrain show-data rows.jsonl",
        "memtrain show-data my.yaml -n 1",
        "memtrain show-data my.yaml --eval",
    ),
    "inspect-lengths": (
        "memtrain inspect-lengths rows.jsonl",
        "memtrain inspect-lengths rows.jsonl --model Qwen/Qwen3-0.6B --html lengths.html",
        "memtrain inspect-lengths my.yaml --max-length 512,1024,2048",
    ),
    "init": ("memtrain init sft", "memtrain init dpo -o my.yaml"),
    "import": (
        "memtrain import axolotl.yml -o my.yaml",
        "memtrain import train.py --tool unsloth -o my.yaml",
    ),
    "rescue": (
        "memtrain rescue axolotl.yml --traceback oom.txt --gpu 4090",
        "memtrain rescue train.py --gpu 4090 -o my.yaml --html rescue.html",
    ),
    "import-trl": ("memtrain import-trl sft.yaml -m sft -o my.yaml",),
    "recipes": ("memtrain recipes", "memtrain recipes show sft/qwen3-0.6b-lora"),
    "methods": ("memtrain methods", "memtrain methods --strategies"),
    "schema": ("memtrain schema -o recipe.schema.json", "memtrain schema --reference"),
    "merge": ("memtrain merge runs/my", "memtrain merge runs/my -o merged --dtype bfloat16"),
    "export": ("memtrain export runs/my", "memtrain export runs/my --step 200 -o model"),
    "chat": ("memtrain chat runs/my", "memtrain chat runs/my --prompt 'What is 2 + 2?' --temperature 0"),
    "lm-eval": ("memtrain lm-eval runs/my --tasks gsm8k,ifeval --limit 200",),
    "serve": ("memtrain serve runs/my", "memtrain serve runs/my --port 8080 --start"),
    "gguf": ("memtrain gguf runs/my --type q8_0",),
    "push": ("memtrain push runs/my me/my-model --dry-run", "memtrain push runs/my me/my-model --private"),
    "clean": ("memtrain clean runs/my",),
    "doctor": ("memtrain doctor", "memtrain doctor --json"),
}
"""Lines of each command that is no method."""


def examples_of(command: str) -> tuple[str, ...]:
    """The lines for the help of a command."""
    methods = {method.command: method for method in METHODS.values()}
    return _of_method(methods[command]) if command in methods else EXAMPLES[command]


def _of_method(method: Method) -> tuple[str, ...]:
    start = f"memtrain {method.command}"
    keys = "generate.max_tokens=512" if method.is_online else "train.epochs=2"
    lines = [
        f"{start} my.yaml",
        f"{start} my.yaml {keys} optim.lr=1e-5",
        f"{start} my.yaml --dry-run  # the plan and the launch files; nothing is started",
    ]
    if not method.is_online:
        rows = ("rows", "answers", "pairs")[method.num_answers]
        lines.append(f"{start} {rows}.jsonl --model Qwen/Qwen3-0.6B  # no recipe needed: it is written")
    return tuple(lines)
