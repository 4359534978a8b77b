"""Attention without contamination: the rows of one flattened row never see each other, on any back end.

`two_part` is the autograd function; `torch_cpu`, `torch_varlen`, `flash` are its kernels; `flex` and `masked`
take a mask.
`functions` makes them known to transformers; `probe` runs each of them here and now.
"""

from memtrain.trainers.model.attention.functions import (
    NAMES,
    attend_of,
    attention_switched,
    own_implementation,
    register,
    set_attention,
)

__all__ = ["NAMES", "attend_of", "attention_switched", "own_implementation", "register", "set_attention"]
