"""Steps of single tensors amid a backward pass, and what is there beside gradient and scratch."""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.activations import layer_kept, mlp_output_backward
from memtrain.memory.estimate.experts import num_steps, stack_gradients
from memtrain.memory.estimate.optimizer_scratch import scratch_of_tensor
from memtrain.memory.estimate.workload import Workload


class Step(NamedTuple):
    """Step of one tensor."""

    gradient: int
    scratch: int
    beside: int
    """Bytes that its layer, or the head, holds then."""


def head_step(load: Workload) -> Step | None:
    """Step of an untied head, when the loss is made and no other gradient waits. None: there is none."""
    if not steps_by_tensor(load) or load.shape.tied:
        return None
    num_weights = load.shape.num_head
    scratch = scratch_of_tensor(load, num_weights, is_map=False)
    return Step(load.a * num_weights, scratch, load.a * load.S * load.shape.width)


def layer_steps(load: Workload) -> list[Step]:
    """Steps of a layer's largest map, or of its stacks of experts; none in slices, whose sums are handed out
    when the layer is through."""
    if not steps_by_tensor(load) or load.settings.slice_tokens or load.settings.offload == "all":
        return []
    shape = load.shape
    if shape.experts is None:
        largest = shape.largest_linear
        # The product that enters the last map is gone.
        beside = mlp_output_backward(load) - load.a * load.N * shape.mlp_width
        return [Step(load.a * largest, scratch_of_tensor(load, largest), beside)]
    copies = load.a * load.N * shape.experts.num_per_token
    outputs, product = copies * shape.width, copies * shape.experts.mlp_width
    left = layer_kept(load) + load.a * load.N * shape.width - outputs
    down, up = (size // load.a for size in stack_gradients(load))
    entering = left - num_steps(load) * product
    return [
        Step(load.a * down, scratch_of_tensor(load, down), left),
        Step(load.a * up, scratch_of_tensor(load, up), entering),
    ]


def steps_by_tensor(load: Workload) -> bool:
    """Whether weights of the device are stepped inside the backward pass, one by one where they are large."""
    settings = load.settings
    return settings.in_backward and load.trains_all and not settings.weights_offload
