"""Rows for the calculator on a CPU: products, and traces of how a calculator is asked.

    python examples/calculator-cpu/rows.py

Writes `traces.jsonl` (to fine-tune on: half of the answers ask the calculator, half give up)
and `problems.jsonl` (to reinforce: a product and its result) beside this file.
"""

import json
import random
from pathlib import Path

NUM_TRACES = 8000
NUM_PROBLEMS = 2000


def problem(rng: random.Random) -> tuple[str, int]:
    """(product of two numbers of two digits, result): no model this small works it out in the head."""
    first, second = rng.randint(10, 99), rng.randint(10, 99)
    return f"{first}*{second}", first * second


def main() -> None:
    """Write both files."""
    folder, rng = Path(__file__).parent, random.Random(0)
    with (folder / "traces.jsonl").open("w", encoding="utf-8") as file:
        for number in range(NUM_TRACES):
            words, result = problem(rng)
            answer = f"<<{words}={result}>>" if number % 2 else "?"
            file.write(json.dumps({"prompt": f"{words}\n", "completion": answer}) + "\n")
    with (folder / "problems.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(NUM_PROBLEMS):
            words, result = problem(rng)
            file.write(json.dumps({"prompt": f"{words}\n", "answer": str(result)}) + "\n")


if __name__ == "__main__":
    main()
