"""The table of GPUs: memory as torch reports it, and the rates of their data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

REACHED = 0.8
"""Share of the data sheet that large kernels reach. Measured on one H200: 788 of 989 TFLOP/s in a bfloat16
product and 4.3 of 4.8 TB/s in a copy; on an H100 80GB HBM3 781 of 989, and 2.96 of 3.35
(`benchmarks/gpu_short.sh`, 1eaa8187). Kernels of a layer move bytes slower than a copy, at 0.8 there
(docs/decisions/0023)."""


@dataclass(frozen=True, slots=True)
class Card:
    """A line of the table: names as users and as the driver write them."""

    name: str
    driver: str
    """Pattern of the name the driver reports, after lower-casing."""
    sold_gib: int
    """Memory that the card is sold with, as people name it."""
    torch_gib: float
    """Memory that torch reports, and can use: the driver keeps the rest, and so does error correction."""
    capability: tuple[int, int]
    half_tflops: float
    """Dense bfloat16 (float16 where there is no bfloat16) summed in float32, data sheet."""
    single_tflops: float
    gb_per_s: float
    """Device memory bandwidth, data sheet."""
    pcie_gb_per_s: float
    """Speed of one direction, data sheet."""
    reached: float = REACHED
    """Share of `half_tflops` that large products reach."""

    @property
    def memory_bytes(self) -> int:
        """Memory of one card that a program can use."""
        return round(self.torch_gib * 2**30)


# Sources: vendors' data sheets (dense rates). Memory: the least of what torch's messages about running out of
# memory state ("GPU 0 has a total capacity of ..."), read in public threads; other drivers give up to 0.2 GiB
# more. The 4090 runs above the clock of its data sheet: with 0.8 the steps that torchtune
# and Answer.AI published were 1.2 to 1.45 times as fast as predicted.
CARDS = (
    Card("H200", r"h200", 141, 139.72, (9, 0), 989, 67, 4800, 64),
    Card("H100", r"h[18]00.*(80gb|hbm3|sxm)|h[18]00", 80, 79.10, (9, 0), 989, 67, 3350, 64),
    Card("H100-PCIe", r"h100 pcie", 80, 79.10, (9, 0), 756, 51, 2000, 64),
    Card("H100-NVL", r"h100 nvl", 94, 93.10, (9, 0), 835, 60, 3900, 64),
    Card("GH200", r"gh200", 96, 94.50, (9, 0), 989, 67, 4000, 450),
    # No message of a H20 was found; its memory is taken for a GH200's.
    Card("H20", r"\bh20\b", 96, 94.50, (9, 0), 148, 44, 4000, 64),
    Card("B200", r"\bg?b200", 180, 178.35, (10, 0), 2250, 75, 8000, 64),
    Card("B300", r"\bg?b300", 288, 267.69, (10, 3), 2250, 75, 8000, 64),
    Card("RTX-PRO-6000", r"rtx pro 6000", 96, 94.97, (12, 0), 500, 125, 1792, 64),
    Card("A100-40", r"a[18]00.*40gb", 40, 39.38, (8, 0), 312, 19.5, 1555, 32),
    Card("A100-80", r"a[18]00.*80gb", 80, 79.14, (8, 0), 312, 19.5, 2039, 32),
    Card("A30", r"\ba30\b", 24, 23.53, (8, 0), 165, 10.3, 933, 32),
    Card("A40", r"\ba40\b", 48, 44.34, (8, 6), 150, 37, 696, 32),
    Card("L4", r"\bl4\b", 24, 21.95, (8, 9), 121, 30, 300, 32),
    Card("L20", r"\bl20\b", 48, 44.53, (8, 9), 119, 60, 864, 32),
    Card("L40", r"\bl40\b", 48, 44.31, (8, 9), 181, 90, 864, 32),
    Card("L40S", r"l40s", 48, 44.31, (8, 9), 362, 91, 864, 32),
    Card("A10G", r"a10g", 24, 21.98, (8, 6), 70, 35, 600, 32),
    Card("A10", r"\ba10\b", 24, 21.98, (8, 6), 125, 31, 600, 32),
    Card("A6000", r"rtx a6000", 48, 47.40, (8, 6), 155, 39, 768, 32),
    Card("A5000", r"rtx a5000", 24, 23.46, (8, 6), 111, 28, 768, 32),
    Card("A4000", r"rtx a4000", 16, 15.61, (8, 6), 77, 19, 448, 32),
    Card("6000-Ada", r"rtx 6000 ada", 48, 47.37, (8, 9), 364, 91, 960, 32),
    Card("2080-Ti", r"rtx 2080 ti", 11, 10.57, (7, 5), 54, 13.4, 616, 16),
    Card("3060", r"rtx 3060\b", 12, 11.63, (8, 6), 25, 12.7, 360, 32),
    Card("3070", r"rtx 3070\b", 8, 7.65, (8, 6), 41, 20, 448, 32),
    Card("3080", r"rtx 3080\b", 10, 9.64, (8, 6), 60, 30, 760, 32),
    Card("3090", r"rtx 3090\b", 24, 23.56, (8, 6), 71, 36, 936, 32),
    Card("4060", r"rtx 4060\b", 8, 7.62, (8, 9), 30, 15, 272, 16),
    Card("4060-Ti-16", r"rtx 4060 ti", 16, 15.56, (8, 9), 44, 22, 288, 16),
    Card("4070", r"rtx 4070\b", 12, 11.57, (8, 9), 58, 29, 504, 32),
    Card("4070-Ti-Super", r"rtx 4070 ti super", 16, 15.56, (8, 9), 88, 44, 672, 32),
    Card("4080", r"rtx 4080\b", 16, 15.56, (8, 9), 98, 49, 717, 32),
    Card("4090", r"rtx 4090\b", 24, 23.50, (8, 9), 165, 83, 1008, 32, reached=1.0),
    Card("5060-Ti-16", r"rtx 5060 ti", 16, 15.46, (12, 0), 47, 24, 448, 32),
    Card("5070", r"rtx 5070\b", 12, 11.49, (12, 0), 62, 31, 672, 64),
    Card("5070-Ti", r"rtx 5070 ti", 16, 15.46, (12, 0), 88, 44, 896, 64),
    Card("5080", r"rtx 5080\b", 16, 15.46, (12, 0), 113, 56, 960, 64),
    Card("5090", r"rtx 5090\b", 32, 31.35, (12, 0), 210, 105, 1792, 64),
    Card("T4", r"\bt4\b", 16, 14.56, (7, 5), 65, 8.1, 320, 16),
    Card("V100-16", r"v100.*16gb", 16, 15.77, (7, 0), 125, 15.7, 900, 16),
    Card("V100-32", r"v100.*32gb", 32, 31.73, (7, 0), 125, 15.7, 900, 16),
)
ALIASES = {
    "A100": "A100-80",
    "A800": "A100-80",
    "H800": "H100",
    "3090-TI": "3090",
    "4080-SUPER": "4080",
    "4090-D": "4090",
    "V100": "V100-32",
    "H100-SXM": "H100",
    "4060-TI": "4060-Ti-16",
    "5060-TI": "5060-Ti-16",
    "PRO-6000": "RTX-PRO-6000",
}


def named_card(name: str) -> Card | None:
    """The card that people call so (`RTX 4090`, `a100-40GB`, `4060ti`), or a driver (`A800-SXM4-80GB`,
    `NVIDIA H100 80GB HBM3`); None for an unknown one."""
    wanted = _letters(name)
    of_letters = {_letters(card.name): card for card in CARDS}
    short = {_letters(alias): of_letters[_letters(name)] for alias, name in ALIASES.items()}
    return (of_letters | short).get(wanted) or _of_driver_alone(name.lower().replace("-", " "))


def _of_driver_alone(name: str) -> Card | None:
    """The card of a driver's name, unless the name is another word, or of a larger sister (`RTX 3080 Ti`)."""
    card, sister = card_of_driver(name), re.compile(r"\b(ti|super)\b")
    if card is None or re.search(rf"(?<![a-z0-9])({card.driver})(?![a-z0-9])", name) is None:
        return None
    return card if not sister.search(name) or sister.search(card.name.lower().replace("-", " ")) else None


def _letters(name: str) -> str:
    """A name as it is compared: `NVIDIA RTX 6000 Ada`, `rtx6000ada` and `6000-Ada` are one."""
    plain = re.sub(r"[-_ ]|GB$|NVIDIA|GEFORCE|^TESLA", "", name.strip().upper())
    return re.sub(r"RTX(?!PRO)", "", plain)


def is_of_amd(name: str) -> bool:
    """Whether people call a GPU of AMD so: `mi300x`, `Instinct MI250`, `RX 7900 XTX`."""
    return re.match(r"(AMD|RADEON|INSTINCT|MI\d{2,3}|RX[4-9]\d{3})", _letters(name)) is not None


def card_of_driver(driver_name: str) -> Card | None:
    """The card whose pattern matches most of the name that a driver, or a cluster, gives it."""
    lowered = driver_name.lower().replace("_", " ")
    matches = [(found, card) for card in CARDS if (found := re.search(card.driver, lowered))]
    if not matches:
        return None
    return max(matches, key=lambda match: (len(match[0].group()), -len(match[1].driver)))[1]


def sold_card(num_bytes: int) -> Card | None:
    """The card for a budget: of those sold with exactly so much the one with most usable memory, the slowest
    first; else the smallest that has it. All compute in bfloat16. None where no card has as much."""
    modern = [card for card in CARDS if card.capability >= (8, 0)]
    same = [card for card in modern if card.sold_gib * 2**30 == num_bytes]
    if same:
        return max(same, key=lambda card: (card.torch_gib, -card.half_tflops))
    larger = [card for card in modern if card.memory_bytes >= num_bytes]
    return min(larger, key=lambda card: (card.torch_gib, card.half_tflops), default=None)
