"""Reward of the tutorial: 1 for the right word at the beginning of a completion."""


def parity(completion: str, number: int) -> float:
    """The reward of one completion; `number` is a column of its row."""
    right = "yes" if number % 2 == 0 else "no"
    return float(completion.strip().lower().startswith(right))
