"""A calculator for word problems: a multi-turn environment of memtrain, and its rewards.

Where the model writes `<<48/2=`, the calculator goes on with `24>>`, and the model with its sentence, as in
Cobbe et al. 2021, arXiv:2110.14168, section 2. The calculator's own tokens are read and never trained.

    memtrain grpo examples/calculator.yaml
"""

import ast
import operator
import re

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
MOST_DIGITS = 12


class Calculator:
    """Works out what the model asks for; `num_sums` counts it."""

    def reset(self) -> None:
        """Count anew for each completion."""
        self.num_sums = 0

    def step(self, text: str) -> str | None:
        """The result of `<<...=` at the end of a turn; None where nothing is asked, which ends the answer."""
        asked = re.search(r"<<([-0-9+*/(). ]{1,60})=$", text)
        if asked is None:
            return None if not text.endswith("=") else " "
        self.num_sums += 1
        try:
            value = worked_out(ast.parse(asked[1].strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return "?>>"
        return f"{value:.{MOST_DIGITS}g}>>"


def worked_out(node: ast.expr) -> float:
    """Value of a sum of numbers. Raises: ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](worked_out(node.left), worked_out(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](worked_out(node.operand))
    raise ValueError("not a sum")


def right(completion: str, answer: str) -> float:
    """1 where the last number of the completion is the last number of the row's answer."""
    numbers = r"-?[0-9]+(?:\.[0-9]+)?"
    wanted = re.findall(numbers, str(answer).replace(",", ""))
    found = re.findall(numbers, completion.replace(",", ""))
    return float(bool(wanted and found and float(found[-1]) == float(wanted[-1])))


def asked(environment: Calculator) -> float:
    """Sums that the model left to the calculator, at most three: a little for using it at all."""
    return min(environment.num_sums, 3) / 3
